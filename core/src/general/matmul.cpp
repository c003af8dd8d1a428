// Ops of general networks: matmul.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "general/panel.h"

namespace ps {
namespace {

constexpr int32_t kTransposeA = attr_at(OP_MATMUL, "bool transpose_a");
constexpr int32_t kTransposeB = attr_at(OP_MATMUL, "bool transpose_b");
constexpr int32_t kScale = attr_at(OP_MATMUL, "float scale");
constexpr int64_t kRows = 96, kRowsTransposed = 192;  // per item: few items copy the same columns of b

// One product of a batch: [rows, inner] x [inner, cols].
struct Sizes { int64_t rows, inner, cols, batch; };
Sizes sizes_of(const Call& c) {
  const Tensor &a = c.in[0], &y = c.out[0];
  Sizes s{y.dims[y.rank - 2], a.dims[a.rank - (c.attrs[kTransposeA].i ? 2 : 1)], y.dims[y.rank - 1], 1};
  for (int32_t i = 0; i < y.rank - 2; ++i) s.batch *= y.dims[i];
  return s;
}

// The matrix of an operand for product `index` of the batch.
int64_t matrix_of(const Tensor& t, const Tensor& y, int64_t index) {
  int64_t matrix = 0, step = 1;
  for (int32_t i = y.rank - 3; i >= 0; --i) {
    const int32_t own = i - (y.rank - t.rank);
    if (own >= 0) {
      if (t.dims[own] > 1) matrix += index % y.dims[i] * step;
      step *= t.dims[own];
    }
    index /= y.dims[i];
  }
  return matrix;
}

// With few rows, b is read in place: a row of y is a weighted sum of b's rows, which is the same chain.
constexpr int64_t kFewRows = 2, kColumnsInPlace = 256;
bool is_in_place(const Call& c, const Sizes& s) { return s.rows <= kFewRows && !c.attrs[kTransposeB].i; }
int64_t item_columns(const Call& c, const Sizes& s) {
  return is_in_place(c, s) ? kColumnsInPlace : panel_columns(*c.kernels);
}

int64_t rows_of_item(const Call& c) { return c.attrs[kTransposeB].i ? kRowsTransposed : kRows; }
int64_t panels(const Call& c, const Sizes& s) { return (s.cols + item_columns(c, s) - 1) / item_columns(c, s); }
int64_t row_chunks(const Call& c, const Sizes& s) { return (s.rows + rows_of_item(c) - 1) / rows_of_item(c); }
int64_t matmul_items(const Call& c) {
  const Sizes s = sizes_of(c);
  return s.batch * panels(c, s) * row_chunks(c, s);
}

// The columns of b that an item multiplies by: copied to a panel, or in place.
void take_columns(const Call& c, const Sizes& s, const float* matrix, int64_t column, int64_t width, float* panel) {
  if (is_in_place(c, s)) {
    const float** const rows = reinterpret_cast<const float**>(panel);
    for (int64_t k = 0; k < s.inner; ++k) rows[k] = matrix + column + k * s.cols;
  } else if (c.attrs[kTransposeB].i) {
    pack_rows(matrix + column * s.inner, s.inner, width, s.inner, panel);
  } else {
    pack_columns(matrix + column, s.cols, s.inner, width, panel);
  }
}

void multiply_rows(const Call& c, const Sizes& s, const PanelRows& x, const float* panel, int64_t width, float* y) {
  if (!is_in_place(c, s)) return multiply(*c.kernels, x, panel, s.inner, width, y, s.cols);
  const float* const* const rows = reinterpret_cast<const float* const*>(panel);
  for (int64_t i = 0; i < x.count; ++i)
    c.kernels->windows.weighted_sum(rows, x.data + i * x.stride, s.inner, width, 1, y + i * s.cols);
}

// Consecutive items share a panel, so that its columns are copied once.
void run_matmul(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Sizes s = sizes_of(c);
  const Tensor &a = c.in[0], &b = c.in[1], &y = c.out[0];
  const int64_t most = item_columns(c, s);
  float* const panel = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  float* const rows = panel + s.inner * panel_columns(*c.kernels);
  const int64_t chunks = row_chunks(c, s), num_panels = panels(c, s);
  const float scale = static_cast<float>(c.attrs[kScale].f);
  int64_t packed = -1;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item / chunks % num_panels * most, batch = item / (chunks * num_panels),
                  chunk = item % chunks;
    const int64_t first = share_begin(s.rows, chunk, chunks), count = share_begin(s.rows, chunk + 1, chunks) - first;
    const int64_t width = std::min(most, s.cols - column);
    if (item / chunks != packed) {
      packed = item / chunks;
      const float* const matrix = f32_data(b) + matrix_of(b, y, batch) * s.inner * s.cols;
      take_columns(c, s, matrix, column, width, panel);
    }
    const float* x = f32_data(a) + matrix_of(a, y, batch) * s.rows * s.inner;
    if (c.attrs[kTransposeA].i) {
      for (int64_t k = 0; k < s.inner; ++k)
        for (int64_t i = 0; i < count; ++i) rows[i * s.inner + k] = x[k * s.rows + first + i];
      x = rows;
    } else {
      x += first * s.inner;
    }
    float* const out = f32_data(y) + (batch * s.rows + first) * s.cols + column;
    multiply_rows(c, s, PanelRows{x, s.inner, count}, panel, width, out);
    for (int64_t i = 0; scale != 1 && i < count; ++i)
      c.kernels->map_binary(BINARY_MUL, out + i * s.cols, 1, &scale, 0, out + i * s.cols, width);
  }
}

constexpr Phase kMatmul = {.split = SPLIT_SHARES,
                           .items = matmul_items,
                           .run = run_matmul,
                           .reads_all = operands(0, 1),
                           .writes_outputs = true};

}  // namespace

ps_status infer_matmul(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &a = in[0], &b = in[1];
  PS_TRY(expect_f32(a, "a", 2, kMaxRank));
  PS_TRY(expect_f32(b, "b", 2, kMaxRank));
  const bool ta = attrs[kTransposeA].i, tb = attrs[kTransposeB].i;
  const int64_t inner = dim(a, a.rank - (ta ? 2 : 1));
  if (dim(b, b.rank - (tb ? 1 : 2)) != inner) {
    return fail(PS_INVALID_ARGUMENT, "b: expected an inner size of %lld as a has, got %s",
                static_cast<long long>(inner), describe(b).text);
  }
  const int32_t rank = std::max(a.rank, b.rank);
  int64_t dims[kMaxRank];
  for (int32_t i = 0; i < rank - 2; ++i) {
    const int32_t at_a = i - (rank - a.rank), at_b = i - (rank - b.rank);
    const int64_t da = at_a >= 0 ? dim(a, at_a) : 1, db = at_b >= 0 ? dim(b, at_b) : 1;
    if (da != db && da != 1 && db != 1) {
      return fail(PS_INVALID_ARGUMENT, "b: expected sizes that broadcast to those of a, %s, got %s", describe(a).text,
                  describe(b).text);
    }
    dims[i] = da == 1 ? db : da;
  }
  dims[rank - 2] = dim(a, a.rank - (ta ? 1 : 2));
  dims[rank - 1] = dim(b, b.rank - (tb ? 2 : 1));
  return set_output(out, PS_F32, rank, dims);
}

Phases matmul_phases(const Call&) { return Phases{&kMatmul, 1}; }

ps_status matmul_scratch(const Call& c, Scratch* out) {
  const Sizes s = sizes_of(c);
  const int64_t rows = panel_columns(*c.kernels) + (c.attrs[kTransposeA].i ? std::min(s.rows, rows_of_item(c)) : 0);
  if (checked_mul(s.inner, rows * 4, &out->per_thread) && checked_add(out->per_thread, 64, &out->per_thread))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "b: its columns do not fit in memory");
}

}  // namespace ps
