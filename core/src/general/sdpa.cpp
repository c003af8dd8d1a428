// Ops of general networks: sdpa.
// Hot: runs in every step.
#include <math.h>

#include <algorithm>

#include "base/memory.h"
#include "general/panel.h"

namespace ps {
namespace {

constexpr int32_t kMask = argument_at(OP_SDPA, "Tensor? mask");
constexpr int32_t kScale = attr_at(OP_SDPA, "float scale");
constexpr int32_t kCausal = attr_at(OP_SDPA, "bool causal");
constexpr int32_t kSoftcap = attr_at(OP_SDPA, "float softcap");
constexpr int64_t kQueryRows = 24;  // per item: their scores stay in the cache

// Keys and values are packed once for all queries: the keys of a head into tiles [keys / 16][dim][16], the values into
// [value dim / 16][keys][16].
struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  int64_t key_floats, value_floats;  // per packed head
};
Sizes sizes_of(const Call& c) {
  const Tensor &q = c.in[0], &k = c.in[1], &v = c.in[2];
  Sizes s{q.dims[0], q.dims[1], k.dims[1], q.dims[2], k.dims[2], q.dims[3], v.dims[3], 0, 0};
  s.key_floats = round_up(s.keys, 16) * s.dim;
  s.value_floats = round_up(s.value_dim, 16) * s.keys;
  return s;
}

int64_t key_tiles(const Sizes& s) { return (s.keys + 15) / 16; }
int64_t chunks(const Sizes& s) { return (s.queries + kQueryRows - 1) / kQueryRows; }
bool is_empty(const Call& c, const Sizes& s) { return c.out[0].dims[3] == 0 || s.batch * s.heads * s.queries == 0; }

// Items: the key tiles of all heads, then their values.
int64_t pack_items(const Call& c) {
  const Sizes s = sizes_of(c);
  return is_empty(c, s) ? 0 : s.batch * s.kv_heads * (key_tiles(s) + 1);
}
int64_t attend_items(const Call& c) {
  const Sizes s = sizes_of(c);
  return is_empty(c, s) ? 0 : s.batch * s.heads * chunks(s);
}

float* packed_keys(const Call& c) { return reinterpret_cast<float*>(c.scratch); }
float* packed_values(const Call& c, const Sizes& s) { return packed_keys(c) + s.batch * s.kv_heads * s.key_floats; }

void run_pack(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sizes s = sizes_of(c);
  const int64_t tiles = key_tiles(s);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t head = item / (tiles + 1), tile = item % (tiles + 1);
    if (tile < tiles) {
      pack_rows(f32_data(c.in[1]) + (head * s.keys + tile * 16) * s.dim, s.dim,
                std::min<int64_t>(16, s.keys - tile * 16), s.dim,
                packed_keys(c) + head * s.key_floats + tile * 16 * s.dim);
    } else {
      pack_columns(f32_data(c.in[2]) + head * s.keys * s.value_dim, s.value_dim, s.keys, s.value_dim,
                   packed_values(c, s) + head * s.value_floats);
    }
  }
}

// The mask of one query, broadcast from [batch, heads, queries, keys].
struct MaskRow {
  const uint8_t* data;
  int64_t step;  // 0 or 1 elements from one key to the next
};
MaskRow mask_row(const Tensor& mask, int64_t batch, int64_t head, int64_t query) {
  const int64_t at[4] = {batch, head, query, 0};
  int64_t offset = 0, step = 1, last = 0;
  for (int32_t i = mask.rank - 1; i >= 0; --i) {
    const int32_t axis = i + 4 - mask.rank;
    if (mask.dims[i] > 1) offset += at[axis] * step;
    if (axis == 3) last = mask.dims[i] > 1;
    step *= mask.dims[i];
  }
  return MaskRow{mask.data + offset * (mask.dtype == PS_F32 ? 4 : 1), last};
}

// y = kind(y, b[i * step])
void change(const Kernels& kernels, int32_t kind, float* y, const float* b, int64_t step, int64_t n) {
  kernels.map_binary(kind, y, 1, b, step, y, n);
}

// Otherwise softmax applies the scale.
bool scales_scores(const Call& c) { return c.in[kMask].data || c.attrs[kSoftcap].f > 0 || !(c.attrs[kScale].f > 0); }

// Prepares the scores of `keys` keys for softmax: scale, softcap, mask.
void mask_scores(const Call& c, const MaskRow& mask, int64_t keys, float* scores) {
  const float scale = static_cast<float>(c.attrs[kScale].f), cap = static_cast<float>(c.attrs[kSoftcap].f);
  if (scales_scores(c)) change(*c.kernels, BINARY_MUL, scores, &scale, 0, keys);
  if (cap > 0) {
    change(*c.kernels, BINARY_DIV, scores, &cap, 0, keys);
    c.kernels->map_unary(UNARY_TANH, 0, 0, scores, scores, keys);
    change(*c.kernels, BINARY_MUL, scores, &cap, 0, keys);
  }
  if (!mask.data) return;
  if (c.in[kMask].dtype == PS_F32) {
    change(*c.kernels, BINARY_ADD, scores, reinterpret_cast<const float*>(mask.data), mask.step, keys);
  } else {
    for (int64_t i = 0; i < keys; ++i) {
      if (!mask.data[i * mask.step]) scores[i] = -INFINITY;
    }
  }
}

// The weights of a query's keys.  Returns the factor that normalizes their sum to 1.  If the query sees no key, all
// weights are 0.
float softmax(const Kernels& kernels, float* scores, int64_t keys, float scale) {
  const float top = kernels.max(scores, keys);
  if (top > -INFINITY) return 1 / kernels.exp_sum(scores, keys, top, scale, scores);
  for (int64_t i = 0; i < keys; ++i) {
    if (scores[i] == -INFINITY) scores[i] = 0;  // a NaN stays
  }
  return 1;
}

void run_attend(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Sizes s = sizes_of(c);
  const bool causal = c.attrs[kCausal].i != 0;
  float* const scores = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  float factors[kQueryRows];
  const float scale = scales_scores(c) ? 1 : static_cast<float>(c.attrs[kScale].f);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t chunk = item % chunks(s), head = item / chunks(s),
                  kv = head / s.heads * s.kv_heads + head % s.heads / (s.heads / s.kv_heads);
    const int64_t first = share_begin(s.queries, chunk, chunks(s)), last = share_begin(s.queries, chunk + 1, chunks(s));
    const int64_t keys = causal ? std::min(s.keys, last) : s.keys;  // no query of the chunk sees later keys
    const float* const q = f32_data(c.in[0]) + (head * s.queries + first) * s.dim;
    multiply(*c.kernels, PanelRows{q, s.dim, last - first}, packed_keys(c) + kv * s.key_floats, s.dim, keys, scores,
             s.keys);
    for (int64_t i = first; i < last; ++i) {
      float* const row = scores + (i - first) * s.keys;
      const MaskRow mask = c.in[kMask].data ? mask_row(c.in[kMask], head / s.heads, head % s.heads, i) : MaskRow{};
      mask_scores(c, mask, keys, row);
      for (int64_t j = i + 1; causal && j < keys; ++j) row[j] = -INFINITY;
      factors[i - first] = softmax(*c.kernels, row, keys, scale);
    }
    float* const out = f32_data(c.out[0]) + (head * s.queries + first) * s.value_dim;
    for (int64_t j = 0; j < s.value_dim; j += panel_columns(*c.kernels)) {
      // Fewer keys than the panel has: one tile at a time.
      const int64_t width = keys < s.keys ? 16 : panel_columns(*c.kernels);
      for (int64_t k = j; k < std::min(j + panel_columns(*c.kernels), s.value_dim); k += width)
        multiply(*c.kernels, PanelRows{scores, s.keys, last - first},
                 packed_values(c, s) + kv * s.value_floats + k * s.keys, keys, std::min(width, s.value_dim - k),
                 out + k, s.value_dim);
    }
    for (int64_t i = first; i < last; ++i)
      change(*c.kernels, BINARY_MUL, out + (i - first) * s.value_dim, &factors[i - first], 0, s.value_dim);
  }
}

constexpr Phase kSdpa[] = {
    {.split = SPLIT_ITEMS, .items = pack_items, .run = run_pack, .reads_all = operands(1, 2), .writes_scratch = true},
    {.split = SPLIT_SHARES,
     .items = attend_items,
     .run = run_attend,
     .reads_all = operands(0, kMask),
     .writes_outputs = true,
     .reads_scratch = true},
};

}  // namespace

ps_status infer_sdpa(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &q = in[0], &k = in[1], &v = in[2], &mask = in[kMask];
  PS_TRY(expect_f32(q, "q", 4, 4));
  PS_TRY(expect_f32(k, "k", 4, 4));
  PS_TRY(expect_f32(v, "v", 4, 4));
  if (dim(k, 0) != dim(q, 0) || dim(k, 3) != dim(q, 3) || dim(k, 1) < 1 || dim(q, 1) % dim(k, 1)) {
    return fail(PS_INVALID_ARGUMENT, "k: expected the batch, a divisor of the heads and the head size of q, %s, got %s",
                describe(q).text, describe(k).text);
  }
  for (int32_t i = 0; i < 3; ++i) {
    if (dim(v, i) == dim(k, i)) continue;
    return fail(PS_INVALID_ARGUMENT, "v: expected the batch, heads and keys of k, %s, got %s", describe(k).text,
                describe(v).text);
  }
  if (mask.kind != OPERAND_NONE) {
    const int64_t all[4] = {dim(q, 0), dim(q, 1), dim(q, 2), dim(k, 2)};
    bool fits = (mask.dtype == PS_F32 || mask.dtype == PS_BOOL) && mask.rank <= 4;
    for (int32_t i = 0; fits && i < mask.rank; ++i) fits = dim(mask, i) == 1 || dim(mask, i) == all[i + 4 - mask.rank];
    if (!fits) {
      return fail(PS_INVALID_ARGUMENT, "mask: expected f32 or bool that broadcasts to [%lld, %lld, %lld, %lld], got %s",
                  static_cast<long long>(all[0]), static_cast<long long>(all[1]), static_cast<long long>(all[2]),
                  static_cast<long long>(all[3]), describe(mask).text);
    }
  }
  if (attrs[kSoftcap].f < 0) return fail(PS_INVALID_ARGUMENT, "softcap: expected 0 or more, got %g", attrs[kSoftcap].f);
  const int64_t dims[4] = {dim(q, 0), dim(q, 1), dim(q, 2), dim(v, 3)};
  return set_output(out, PS_F32, 4, dims);
}

Phases sdpa_phases(const Call&) { return Phases{kSdpa, 2}; }

ps_status sdpa_scratch(const Call& c, Scratch* out) {
  const Sizes s = sizes_of(c);
  int64_t key_floats, value_floats, heads;
  if (checked_mul(round_up(s.keys, 16), s.dim, &key_floats) &&
      checked_mul(round_up(s.value_dim, 16), s.keys, &value_floats) && checked_mul(s.batch, s.kv_heads, &heads) &&
      checked_add(key_floats, value_floats, &out->shared) && checked_mul(out->shared, heads, &out->shared) &&
      checked_mul(out->shared, 4, &out->shared) &&
      checked_mul(s.keys, std::min(kQueryRows, s.queries) * 4, &out->per_thread) &&
      checked_add(out->per_thread, 64, &out->per_thread))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "k: its packed copy does not fit in memory");
}

}  // namespace ps
