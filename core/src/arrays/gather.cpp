// Ops of general networks: gather, gather_elements, gather_nd, scatter_elements, scatter_nd.
// Hot: runs in every step.
#include "arrays/integers.h"
#include "arrays/strided_copy.h"
#include "ops/expect.h"
#include "ops/failure.h"

namespace ps {
namespace {

constexpr int32_t kGatherAxis = attr_at(OP_GATHER, "int axis"), kElementsAxis = attr_at(OP_GATHER_ELEMENTS, "int axis"),
                  kBatchDims = attr_at(OP_GATHER_ND, "int batch_dims"),
                  kScatterAxis = attr_at(OP_SCATTER_ELEMENTS, "int axis"),
                  kScatterReduction = attr_at(OP_SCATTER_ELEMENTS, "str reduction"),
                  kNdReduction = attr_at(OP_SCATTER_ND, "str reduction");

long long ll(int64_t x) { return static_cast<long long>(x); }

// The position that index i means along an axis of `size`; reports a failure and returns -1 if it is out of range.
int64_t index_at(const Call& c, int64_t i, int64_t size) {
  const Tensor& t = c.in[1];
  const int64_t index =
      t.dtype == PS_I64 ? reinterpret_cast<const int64_t*>(t.data)[i] : reinterpret_cast<const int32_t*>(t.data)[i];
  const int64_t place = index < 0 ? index + size : index;
  if (place >= 0 && place < size) return place;
  report_failure(c, "indices: expected -%lld to %lld, got %lld", ll(size), ll(size - 1), ll(index));
  return -1;
}

// ---- gather ----

int64_t gather_items(const Call& c) {
  const int32_t axis = static_cast<int32_t>(c.attrs[kGatherAxis].i);
  return num_elements(c.out[0]) ? extent(c.in[0], 0, axis) * num_elements(c.in[1]) : 0;
}

void run_gather(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor& x = c.in[0];
  const int32_t axis = static_cast<int32_t>(c.attrs[kGatherAxis].i);
  const int64_t count = num_elements(c.in[1]), size = x.dims[axis];
  const int64_t inner = extent(x, axis + 1, x.rank) * dtype_bytes(x.dtype);
  int64_t outer = begin / count, i = begin % count;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t place = index_at(c, i, size);
    if (place >= 0) copy_elements(c.out[0].data + item * inner, x.data + (outer * size + place) * inner, inner);
    if (++i == count) {
      i = 0;
      ++outer;
    }
  }
}
constexpr Phase kGather = {.split = SPLIT_ITEMS,
                           .items = gather_items,
                           .run = run_gather,
                           .reads_all = operands(0, 1),
                           .writes_outputs = true};

// ---- gather_elements, scatter_elements ----

// Calls function(i, offset) for the elements of `indices` in [begin, end): offset is the position in `data`, which has
// other sizes, with the index in place of the axis's coordinate.
template <class Function>
void each_element(const Call& c, const Tensor& data, int32_t axis, int64_t begin, int64_t end, Function function) {
  const Tensor& indices = c.in[1];
  int64_t strides[kMaxRank], at[kMaxRank], stride = 1, offset = 0, rest = begin;
  for (int32_t i = data.rank - 1; i >= 0; stride *= data.dims[i--]) {
    strides[i] = stride;
    at[i] = rest % indices.dims[i];
    rest /= indices.dims[i];
    if (i != axis) offset += at[i] * stride;
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t place = index_at(c, i, data.dims[axis]);
    if (place >= 0) function(i, offset + place * strides[axis]);
    for (int32_t d = data.rank - 1; d >= 0; --d) {
      if (d != axis) offset += strides[d];
      if (++at[d] < indices.dims[d]) break;
      if (d != axis) offset -= at[d] * strides[d];
      at[d] = 0;
    }
  }
}

void run_gather_elements(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t bytes = dtype_bytes(c.out[0].dtype), total = num_elements(c.out[0]);
  each_element(c, c.in[0], static_cast<int32_t>(c.attrs[kElementsAxis].i), begin * kItem,
               end * kItem < total ? end * kItem : total, [&](int64_t i, int64_t offset) {
                 copy_elements(c.out[0].data + i * bytes, c.in[0].data + offset * bytes, bytes);
               });
}
constexpr Phase kGatherElements = {.split = SPLIT_ITEMS,
                                   .items = element_items,
                                   .run = run_gather_elements,
                                   .reads_all = operands(0, 1),
                                   .writes_outputs = true};

// ---- gather_nd, scatter_nd: the last axis of indices holds a position along `depth` axes ----

// The offset that row i of indices names, in units of the remaining axes; -1: out of range.
int64_t offset_nd(const Call& c, const Tensor& data, int32_t batch, int64_t i) {
  const Tensor& indices = c.in[1];
  const int64_t depth = indices.dims[indices.rank - 1];
  int64_t offset = 0;
  for (int64_t d = 0; d < depth; ++d) {
    const int64_t size = data.dims[batch + d], place = index_at(c, i * depth + d, size);
    if (place < 0) return -1;
    offset = offset * size + place;
  }
  return offset;
}
int64_t num_rows(const Tensor& indices) { return extent(indices, 0, indices.rank - 1); }

int64_t gather_nd_items(const Call& c) { return num_elements(c.out[0]) ? num_rows(c.in[1]) : 0; }
void run_gather_nd(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &indices = c.in[1];
  const int32_t batch = static_cast<int32_t>(c.attrs[kBatchDims].i),
                inside = batch + static_cast<int32_t>(indices.dims[indices.rank - 1]);
  const int64_t rows = extent(indices, batch, indices.rank - 1), places = extent(x, batch, inside);
  const int64_t inner = extent(x, inside, x.rank) * dtype_bytes(x.dtype);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t offset = offset_nd(c, x, batch, i);
    if (offset >= 0) copy_elements(c.out[0].data + i * inner, x.data + (i / rows * places + offset) * inner, inner);
  }
}
constexpr Phase kGatherNd = {.split = SPLIT_ITEMS,
                             .items = gather_nd_items,
                             .run = run_gather_nd,
                             .reads_all = operands(0, 1),
                             .writes_outputs = true};

// ---- scatters: a copy, then the updates in sequence, so that their order is fixed ----

enum Reduction : int32_t { REDUCTION_NONE, REDUCTION_ADD, REDUCTION_MUL, REDUCTION_MAX, REDUCTION_MIN, NUM_REDUCTIONS };
constexpr const char* kReductions[NUM_REDUCTIONS] = {"none", "add", "mul", "max", "min"};

float combined(int64_t reduction, float a, float b) {
  // clang-format off: one reduction a line
  switch (reduction) {
    case REDUCTION_ADD: return a + b;
    case REDUCTION_MUL: return a * b;
    case REDUCTION_MAX: return a > b || a != a ? a : b;
    default: return a < b || a != a ? a : b;
  }
  // clang-format on
}

// Combines the elements of `to` with the updates.
void update(int32_t dtype, int64_t reduction, uint8_t* to, const uint8_t* from, int64_t n) {
  const int64_t bytes = dtype_bytes(dtype);
  if (reduction == REDUCTION_NONE) return copy_elements(to, from, n * bytes);
  if (dtype == PS_F32) {
    float* y = reinterpret_cast<float*>(to);
    for (int64_t i = 0; i < n; ++i) y[i] = combined(reduction, y[i], reinterpret_cast<const float*>(from)[i]);
    return;
  }
  constexpr int32_t kinds[NUM_REDUCTIONS] = {BINARY_ADD, BINARY_ADD, BINARY_MUL, BINARY_MAX, BINARY_MIN};
  constexpr int64_t kSome = 64;
  for (int64_t i = 0; i < n; i += kSome) {
    const int64_t count = n - i < kSome ? n - i : kSome;
    int64_t a[kSome], b[kSome];
    load_integers(dtype, to + i * bytes, 1, count, a);
    load_integers(dtype, from + i * bytes, 1, count, b);
    integer_binary(kinds[reduction], a, b, count);
    store_integers(dtype, a, count, to + i * bytes);
  }
}

void run_copy(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t bytes = dtype_bytes(c.out[0].dtype), total = num_elements(c.out[0]), first = begin * kItem;
  const int64_t last = end * kItem < total ? end * kItem : total;
  if (c.in[0].data != c.out[0].data)
    memcpy(c.out[0].data + first * bytes, c.in[0].data + first * bytes, static_cast<size_t>((last - first) * bytes));
}
int64_t scatter_items(const Call& c) { return num_elements(c.in[2]) ? 1 : 0; }

void run_scatter_elements(const Call& c, int64_t, int64_t, int32_t) {
  const Tensor& y = c.out[0];
  const int64_t bytes = dtype_bytes(y.dtype), reduction = c.attrs[kScatterReduction].i;
  each_element(c, y, static_cast<int32_t>(c.attrs[kScatterAxis].i), 0, num_elements(c.in[1]),
               [&](int64_t i, int64_t offset) {
                 update(y.dtype, reduction, y.data + offset * bytes, c.in[2].data + i * bytes, 1);
               });
}

void run_scatter_nd(const Call& c, int64_t, int64_t, int32_t) {
  const Tensor &y = c.out[0], &indices = c.in[1];
  const int64_t inner = extent(y, static_cast<int32_t>(indices.dims[indices.rank - 1]), y.rank),
                bytes = inner * dtype_bytes(y.dtype);
  const int64_t rows = num_rows(indices);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t offset = offset_nd(c, y, 0, i);
    if (offset >= 0) update(y.dtype, c.attrs[kNdReduction].i, y.data + offset * bytes, c.in[2].data + i * bytes, inner);
  }
}

// The scratch, of size zero, stands for the output when the barrier between the two phases is placed.
constexpr Phase kCopy = {.split = SPLIT_ITEMS,
                         .items = element_items,
                         .run = run_copy,
                         .reads_all = operands(0),
                         .writes_outputs = true,
                         .writes_scratch = true};
constexpr Phase scatter_phase(void (*run)(const Call&, int64_t, int64_t, int32_t)) {
  return Phase{.split = SPLIT_ITEMS,
               .items = scatter_items,
               .run = run,
               .reads_all = operands(1, 2),
               .writes_outputs = true,
               .reads_scratch = true};
}
constexpr Phase kScatterElements[] = {kCopy, scatter_phase(run_scatter_elements)},
                kScatterNd[] = {kCopy, scatter_phase(run_scatter_nd)};

ps_status expect_index_type(const Spec& s) { return expect_dtype(s, "indices", dtypes(PS_I32, PS_I64)); }

ps_status parse_reduction(AttrValue* name, int32_t dtype) {
  name->i = -1;
  for (int32_t i = 0; i < NUM_REDUCTIONS; ++i) {
    if (equal(name->s, kReductions[i])) name->i = i;
  }
  if (name->i < 0)
    return fail(PS_UNSUPPORTED, "reduction: expected none, add, mul, max or min, got \"%.*s\"", PS_STR(name->s));
  if (name->i != REDUCTION_NONE && (dtype == PS_F16 || dtype == PS_BF16))
    return fail(PS_UNSUPPORTED, "x: expected f32 or integers for reduction %.*s, got %s", PS_STR(name->s),
                dtype_name(dtype));
  return PS_OK;
}

// x and indices have the same rank; each size of indices, except along the axis, is at most that of x.
ps_status expect_elements(const Spec* in, AttrValue* axis) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_index_type(in[1]));
  PS_TRY(resolve_axis("axis", axis, in[0].rank));
  bool fits = in[0].rank == in[1].rank;
  for (int32_t i = 0; i < in[0].rank && fits; ++i) fits = i == axis->i || in[1].dims[i].offset <= in[0].dims[i].offset;
  if (fits) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "indices: expected sizes up to those of %s, got %s", describe(in[0]).text,
              describe(in[1]).text);
}

}  // namespace

ps_status infer_gather(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_index_type(in[1]));
  PS_TRY(resolve_axis("axis", &attrs[kGatherAxis], in[0].rank));
  int64_t dims[2 * kMaxRank];
  int32_t rank = 0;
  for (int32_t i = 0; i < in[0].rank; ++i) {
    if (i != attrs[kGatherAxis].i) {
      dims[rank++] = in[0].dims[i].offset;
      continue;
    }
    for (int32_t j = 0; j < in[1].rank; ++j) dims[rank++] = in[1].dims[j].offset;
  }
  return set_output(in[0].dtype, rank, dims, out);
}
Phases gather_phases(const Call&) { return Phases{&kGather, 1}; }
ps_status gather_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_gather_elements(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_elements(in, &attrs[kElementsAxis]));
  copy_type(in[1], out);
  out->dtype = in[0].dtype;
  return PS_OK;
}
Phases gather_elements_phases(const Call&) { return Phases{&kGatherElements, 1}; }
ps_status gather_elements_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_gather_nd(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_index_type(in[1]));
  const int64_t batch = attrs[kBatchDims].i, rank = in[0].rank;
  if (in[1].rank < 1 || batch < 0 || batch >= in[1].rank || batch > rank)
    return fail(PS_INVALID_ARGUMENT, "batch_dims: expected 0 to %d, got %lld", in[1].rank - 1, ll(batch));
  const int64_t depth = last_dim(in[1]);
  if (depth < 0 || depth > rank - batch)
    return fail(PS_INVALID_ARGUMENT, "indices: expected up to %lld along the last axis, got %s", ll(rank - batch),
                describe(in[1]).text);
  int64_t dims[2 * kMaxRank];
  int32_t count = 0;
  for (int32_t i = 0; i < in[1].rank - 1; ++i) {
    dims[count++] = in[1].dims[i].offset;
    if (i < batch && in[1].dims[i].offset != in[0].dims[i].offset)
      return fail(PS_INVALID_ARGUMENT, "indices: expected the first %lld sizes of %s, got %s", ll(batch),
                  describe(in[0]).text, describe(in[1]).text);
  }
  for (int64_t i = batch + depth; i < rank; ++i) dims[count++] = in[0].dims[i].offset;
  return set_output(in[0].dtype, count, dims, out);
}
Phases gather_nd_phases(const Call&) { return Phases{&kGatherNd, 1}; }
ps_status gather_nd_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_scatter_elements(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_elements(in, &attrs[kScatterAxis]));
  PS_TRY(parse_reduction(&attrs[kScatterReduction], in[0].dtype));
  Spec updates = in[1];
  updates.dtype = in[0].dtype;
  PS_TRY(expect_same(in[2], updates, "updates", "indices"));
  copy_type(in[0], out);
  return PS_OK;
}
Phases scatter_elements_phases(const Call&) { return Phases{kScatterElements, 2}; }
ps_status scatter_elements_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_scatter_nd(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_index_type(in[1]));
  PS_TRY(parse_reduction(&attrs[kNdReduction], in[0].dtype));
  if (in[1].rank < 1 || last_dim(in[1]) > in[0].rank)
    return fail(PS_INVALID_ARGUMENT, "indices: expected up to %d along the last axis, got %s", in[0].rank,
                describe(in[1]).text);
  const int32_t depth = static_cast<int32_t>(last_dim(in[1])), rows = in[1].rank - 1;
  Spec updates{};
  int64_t dims[2 * kMaxRank];
  for (int32_t i = 0; i < rows; ++i) dims[i] = in[1].dims[i].offset;
  for (int32_t i = depth; i < in[0].rank; ++i) dims[rows + i - depth] = in[0].dims[i].offset;
  PS_TRY(set_output(in[0].dtype, rows + in[0].rank - depth, dims, &updates));
  PS_TRY(expect_same(in[2], updates, "updates", "indices and x together"));
  copy_type(in[0], out);
  return PS_OK;
}
Phases scatter_nd_phases(const Call&) { return Phases{kScatterNd, 2}; }
ps_status scatter_nd_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
