// The formats of key and value pages, and appending a token to them.
#ifndef PENSTOCK_KERNELS_ATTENTION_KV_PAGES_H
#define PENSTOCK_KERNELS_ATTENTION_KV_PAGES_H

namespace ps {
namespace {

constexpr int kPageTokens = PS_PAGE_TOKENS;

// Values [32][dim] of a page of latents, whose keys begin with them: keys [dim][32].  Sixteen dimensions at a time, so
// that whole lines are written.
template <class T>
inline void transpose_page(const T* keys, int64_t dim, T* values) {
  for (int64_t d = 0; d < dim; d += 16) {
    const int n = dim - d < 16 ? int(dim - d) : 16;
    for (int t = 0; t < kPageTokens; ++t)
      for (int i = 0; i < n; ++i) values[t * dim + d + i] = keys[(d + i) * kPageTokens + t];
  }
}

// How attention reads each format: a step is kStep dimensions of keys, or kStep positions of values.
//   head_bytes, values: bytes of one head of one page; where its values begin
//   Element, put, put_probability: the type of queries and probabilities in the dot product, and rounding 16 of them
//   key: a step of the keys of 16 positions, the lower or the upper half of a page
//   value: a step of the values of n of 16 dimensions from d on; single_value: only position t, zeros beside it
//   order_values: writes the values of a page of latents as `values` of other pages are stored
struct KvF32 {
  using Element = float;
  static constexpr bool kScaled = false;
  static constexpr int kStep = 1, kElement = 4;  // kElement: bytes
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * dim * 4; }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + kPageTokens * dim * 4; }
  PS_INLINE static F16 put(Element* p, F16 x) {
    f_store(p, x);
    return x;
  }
  PS_INLINE static F16 put_probability(Element* p, F16 x) { return put(p, x); }
  PS_INLINE static F16 at(const Element* p, int64_t step) { return f_set(p[step]); }
  PS_INLINE static F16 key(const uint8_t* head, int64_t step, int half) {
    return f_load((const float*)head + step * kPageTokens + 16 * half);
  }
  PS_INLINE static F16 last_key(const uint8_t* head, int64_t step, int half) { return key(head, step, half); }
  PS_INLINE static F16 value(const uint8_t* values, int64_t step, int64_t dim, int64_t d, int n) {
    return f_load_n((const float*)values + step * dim + d, n);
  }
  PS_INLINE static F16 value(const uint8_t* values, int64_t step, int64_t dim, int64_t d) {
    return f_load((const float*)values + step * dim + d);
  }
  PS_INLINE static F16 single_value(const uint8_t* v, int t, int64_t dim, int64_t d, int n) {
    return value(v, t, dim, d, n);
  }
  PS_INLINE static F16 dot(F16 a, F16 x, F16 acc) { return f_fma(x, a, acc); }
  static void order_values(const uint8_t* head, int64_t dim, uint8_t* values) {
    transpose_page((const uint32_t*)head, dim, (uint32_t*)values);
  }
};
// Pairs are stored as the dot product of pairs reads them: keys [dim / 2][32][2], values [16][dim][2].  An odd last
// dimension is padded with zeros.
struct KvBf16 {
  using Element = Half;
  static constexpr bool kScaled = false;
  static constexpr int kStep = 2, kElement = 2;
  PS_INLINE static int64_t key_bytes(int64_t dim) { return kPageTokens * (dim + dim % 2) * 2; }
  PS_INLINE static int64_t head_bytes(int64_t dim) { return key_bytes(dim) + kPageTokens * dim * 2; }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + key_bytes(dim); }
  PS_INLINE static F16 put(Element* p, F16 x) { return put_half(p, x); }
  PS_INLINE static F16 put_probability(Element* p, F16 x) { return ps::put_probability(p, x); }
  PS_INLINE static Pair at(const Element* p, int64_t step) { return pair_at(p + 2 * step); }
  PS_INLINE static Pairs key(const uint8_t* head, int64_t step, int half) {
    return pairs_load((const uint16_t*)head + 2 * (step * kPageTokens + 16 * half));
  }
  PS_INLINE static Pairs last_key(const uint8_t* head, int64_t step, int half) { return key(head, step, half); }
  PS_INLINE static Pairs value(const uint8_t* values, int64_t step, int64_t dim, int64_t d, int n) {
    return pairs_load_n((const uint16_t*)values + 2 * (step * dim + d), n);
  }
  PS_INLINE static Pairs value(const uint8_t* values, int64_t step, int64_t dim, int64_t d) {
    return pairs_load((const uint16_t*)values + 2 * (step * dim + d));
  }
  PS_INLINE static Pairs single_value(const uint8_t* values, int t, int64_t dim, int64_t d, int n) {
    const Pairs both = value(values, t / 2, dim, d, n);
    return t % 2 ? only_high(both) : only_low(both);
  }
  PS_INLINE static F16 dot(const Pairs& a, const Pair& x, F16 acc) { return f_dot(a, x, acc); }
  static void order_values(const uint8_t* head, int64_t dim,
                           uint8_t* values) {  // pairs of dimensions to pairs of tokens
    const uint16_t* keys = (const uint16_t*)head;
    uint16_t* out = (uint16_t*)values;
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = dim - d < 16 ? int(dim - d) : 16;
      for (int t = 0; t < kPageTokens; ++t)
        for (int i = 0; i < n; ++i)
          out[2 * (t / 2 * dim + d + i) + t % 2] = keys[2 * ((d + i) / 2 * kPageTokens + t) + i % 2];
    }
  }
};
struct KvInt8 {  // scales of the 32 keys follow the keys, scales of the values the values
  using Element = Half;
  static constexpr bool kScaled = true;
  static constexpr int kStep = 2, kElement = 1;
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * (dim + 4); }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + kPageTokens * (dim + 4); }
  PS_INLINE static F16 put(Element* p, F16 x) { return put_half(p, x); }
  PS_INLINE static F16 put_probability(Element* p, F16 x) { return put_half(p, x); }  // times the scale of a value
  PS_INLINE static Pair at(const Element* p, int64_t step) { return pair_at(p + 2 * step); }
  PS_INLINE static Pairs key(const uint8_t* head, int64_t step, int half) {
    const int8_t* k = (const int8_t*)head + 2 * step * kPageTokens + 16 * half;
    return pairs_of(f_load_i8(k), f_load_i8(k + kPageTokens));
  }
  PS_INLINE static Pairs last_key(const uint8_t* head, int64_t step, int half) {  // of an odd number of dimensions
    return pairs_of(f_load_i8((const int8_t*)head + 2 * step * kPageTokens + 16 * half), f_set(0.f));
  }
  PS_INLINE static Pairs value(const uint8_t* values, int64_t step, int64_t dim, int64_t d, int n) {
    const int8_t* v = (const int8_t*)values + 2 * step * dim + d;
    return pairs_of(f_load_i8_n(v, n), f_load_i8_n(v + dim, n));
  }
  PS_INLINE static Pairs value(const uint8_t* values, int64_t step, int64_t dim, int64_t d) {
    const int8_t* v = (const int8_t*)values + 2 * step * dim + d;
    return pairs_of(f_load_i8(v), f_load_i8(v + dim));
  }
  PS_INLINE static Pairs single_value(const uint8_t* values, int t, int64_t dim, int64_t d, int n) {
    const F16 v = f_load_i8_n((const int8_t*)values + t * dim + d, n);
    return t % 2 ? pairs_of(f_set(0.f), v) : pairs_of(v, f_set(0.f));
  }
  PS_INLINE static F16 dot(const Pairs& a, const Pair& x, F16 acc) { return f_dot(a, x, acc); }
  static void order_values(const uint8_t* head, int64_t dim, uint8_t* values) {
    transpose_page((const int8_t*)head, dim, (int8_t*)values);
  }
};

// A nibble stands for an odd integer of -15 to 15, so that all 16 values serve a symmetric row.  Heads are rotated
// (rows/hadamard.h).  Attention widens pages to int8 in its scratch memory.
struct KvInt4 {
  PS_INLINE static int64_t row_bytes(int64_t dim) { return (dim + 1) / 2; }
  PS_INLINE static int64_t part_bytes(int64_t dim) { return kPageTokens * row_bytes(dim); }  // keys or values
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * (row_bytes(dim) + 4); }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) {
    return head + kPageTokens * (row_bytes(dim) + 4);
  }
};
constexpr bool kBuildsInt4 = builds_kv(PS_KV_INT4), kBuildsInt8 = builds_kv(PS_KV_INT8) || kBuildsInt4;

PS_INLINE int8_t widen_nibble(int nibble) { return int8_t(2 * nibble - 15); }
// Writes the head of an int4 page as the head of an int8 page, without loss.
void widen_head(const uint8_t* head, int64_t dim, uint8_t* out) {
  const uint8_t* const values = KvInt4::values(head, dim);
  const int64_t bytes = KvInt4::part_bytes(dim), run = dim % 2 ? KvInt4::row_bytes(dim) : bytes;
  int8_t *keys = (int8_t*)out, *row = (int8_t*)KvInt8::values(out, dim);
  for (int64_t at = 0; at < bytes; at += kPageTokens)
    for (int i = 0; i < kPageTokens; ++i) {
      keys[2 * at + i] = widen_nibble(head[at + i] & 15);
      keys[2 * at + kPageTokens + i] = widen_nibble(head[at + i] >> 4);
    }
  for (int64_t at = 0; at < bytes; at += run, row += dim)  // rows of odd dimensions overlap by one number
    for (int64_t i = 0; i < run; ++i) {
      row[2 * i] = widen_nibble(values[at + i] & 15);
      row[2 * i + 1] = widen_nibble(values[at + i] >> 4);
    }
  __builtin_memcpy(out + kPageTokens * dim, head + bytes, 4 * kPageTokens);  // after the nibble that is of no dimension
  __builtin_memcpy(out + kPageTokens * (2 * dim + 4), values + bytes, 4 * kPageTokens);
}

PS_LONG F16 to_nibble(F16 x, float inverse) {  // 0 to 15 stand for -15, -13, ... 15 times the scale
  const F16 v = x * f_set(0.5f * inverse) - f_set(0.5f);
  return f_round(f_max(f_min(v, f_set(7.f)), f_set(-8.f))) + f_set(8.f);
}
// Rotates a row of `dim` and writes its nibbles into q, padded with those of zeros.  Returns the scale.
inline float round_to_nibbles(const float* x, int64_t dim, uint8_t* q) {
  float row[kMaxHeadDim];
  rotate_head(x, row, dim);
  const RowScale scale = row_scale(row, dim, 15.f);
  for (int64_t d = 0; d < dim; d += 16)
    f_store_i8_n((int8_t*)q + d, to_nibble(f_load_n(row + d, tail(dim, d)), scale.inverse), 16);
  return scale.scale;
}
inline void append_int4(uint8_t* keys, uint8_t* values, int64_t slot, const float* k, const float* v, int64_t dim) {
  uint8_t q[kMaxHeadDim];
  const int64_t row_bytes = KvInt4::row_bytes(dim);
  ((float*)(keys + KvInt4::part_bytes(dim)))[slot] = round_to_nibbles(k, dim, q);
  for (int64_t i = 0; i < row_bytes; ++i) keys[i * kPageTokens + slot] = uint8_t(q[2 * i] | q[2 * i + 1] << 4);
  ((float*)(values + KvInt4::part_bytes(dim)))[slot] = round_to_nibbles(v, dim, q);
  for (int64_t i = 0; i < row_bytes; ++i) values[slot * row_bytes + i] = uint8_t(q[2 * i] | q[2 * i + 1] << 4);
}

inline void append_int8(uint8_t* keys, uint8_t* values, int64_t slot, const float* k, const float* v, int64_t dim) {
  RowScale ks = row_scale(k, dim), vs = row_scale(v, dim);
  ((float*)(keys + kPageTokens * dim))[slot] = ks.scale;
  ((float*)(values + kPageTokens * dim))[slot] = vs.scale;
  for (int64_t d = 0; d < dim; d += 16) {
    int n = tail(dim, d);
    int8_t q[16];
    f_store_i8_n(q, to_int8(f_load_n(k + d, n), ks.inverse), 16);
    for (int i = 0; i < n; ++i) ((int8_t*)keys)[(d + i) * kPageTokens + slot] = q[i];
    f_store_i8_n((int8_t*)values + slot * dim + d, to_int8(f_load_n(v + d, n), vs.inverse), n);
  }
}

// Two tokens of a pair may be written by two threads: each stores only its own halves.
inline void append_bf16(uint8_t* head, int64_t slot, const float* k, const float* v, int64_t dim) {
  uint8_t* keys = head + 4 * slot;
  uint16_t* values = (uint16_t*)(head + KvBf16::key_bytes(dim)) + slot / 2 * 2 * dim + slot % 2;
  for (int64_t d = 0; d < dim; d += 16) {
    const int n = tail(dim, d);
    uint16_t h[16];
    f_store_bf16_n(h, f_flush_small(f_load_n(k + d, n)), 16);
    for (int i = 0; i < n; i += 2) __builtin_memcpy(keys + (d + i) * kPageTokens * 2, h + i, 4);
    f_store_bf16_n(h, f_flush_small(f_load_n(v + d, n)), 16);
    i_store_halves(values + 2 * d, h, n);
  }
}

inline void append_head(int32_t layout, uint8_t* head, int64_t slot, const float* k, const float* v, int64_t dim) {
  if (kBuildsInt4 && layout == PS_KV_INT4)
    return append_int4(head, (uint8_t*)KvInt4::values(head, dim), slot, k, v, dim);
  if (builds_kv(PS_KV_INT8) && layout == PS_KV_INT8)
    return append_int8(head, (uint8_t*)KvInt8::values(head, dim), slot, k, v, dim);
  if (builds_kv(PS_KV_BF16) && layout == PS_KV_BF16) return append_bf16(head, slot, k, v, dim);
  if (!builds_kv(PS_KV_F32)) return;
  float* keys = (float*)head;
  float* values = (float*)KvF32::values(head, dim) + slot * dim;
  for (int64_t d = 0; d < dim; ++d) {
    keys[d * kPageTokens + slot] = k[d];
    values[d] = v[d];
  }
}

PS_INLINE int64_t kv_head_bytes(int32_t layout, int64_t dim) {
  if (layout == PS_KV_INT4) return KvInt4::head_bytes(dim);
  if (layout == PS_KV_INT8) return KvInt8::head_bytes(dim);
  return layout == PS_KV_BF16 ? KvBf16::head_bytes(dim) : KvF32::head_bytes(dim);
}

void kv_append(const KvAppendArgs& a, int64_t begin, int64_t end) {
  const int64_t dim = a.kv.head_dim, head_bytes = kv_head_bytes(a.kv.layout, dim);
  for (int64_t t = begin; t < end; ++t) {
    int32_t position = a.batch.positions[t];
    int64_t entry = int64_t(a.batch.token_request[t]) * a.batch.page_table_width + position / kPageTokens;
    if (a.batch.page_table[entry] < 0) continue;  // another rank stores it
    uint8_t* page = a.kv.data + a.batch.page_table[entry] * a.kv.page_bytes;
    for (int64_t h = 0; h < a.kv.num_kv_heads; ++h) {
      const float *k = a.k + t * a.k_stride + h * dim, *v = a.v + t * a.v_stride + h * dim;
      if (t + 1 < end) prefetch_row(k + a.k_stride, dim), prefetch_row(v + a.v_stride, dim);
      append_head(a.kv.layout, page + h * head_bytes, position % kPageTokens, k, v, dim);
    }
  }
}

// Stores a row of latents as append_head stores a key.
inline void append_latent(int32_t layout, uint8_t* head, int64_t slot, const float* row, int64_t dim) {
  if (builds_kv(PS_KV_INT8) && layout == PS_KV_INT8) {
    const RowScale scale = row_scale(row, dim);
    ((float*)(head + kPageTokens * dim))[slot] = scale.scale;
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = tail(dim, d);
      int8_t q[16];
      f_store_i8_n(q, to_int8(f_load_n(row + d, n), scale.inverse), 16);
      for (int i = 0; i < n; ++i) ((int8_t*)head)[(d + i) * kPageTokens + slot] = q[i];
    }
  } else if (builds_kv(PS_KV_BF16) && layout == PS_KV_BF16) {
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = tail(dim, d);
      uint16_t h[16];
      f_store_bf16_n(h, f_flush_small(f_load_n(row + d, n)), 16);
      for (int i = 0; i < n; i += 2) __builtin_memcpy(head + 4 * slot + (d + i) * kPageTokens * 2, h + i, 4);
    }
  } else if (builds_kv(PS_KV_F32)) {
    for (int64_t d = 0; d < dim; ++d) ((float*)head)[d * kPageTokens + slot] = row[d];
  }
}

void latent_append(const LatentAppendArgs& a, int64_t begin, int64_t end) {
  const int64_t first = a.kv.latent_dim, rest = a.kv.head_dim - first;
  float row[kMaxHeadDim];
  for (int64_t t = begin; t < end; ++t) {
    const int32_t position = a.batch.positions[t];
    const int64_t entry = int64_t(a.batch.token_request[t]) * a.batch.page_table_width + position / kPageTokens;
    if (a.batch.page_table[entry] < 0) continue;  // another rank stores it
    for (int64_t d = 0; d < first; ++d) row[d] = a.latent[t * a.latent_stride + d];
    for (int64_t d = 0; d < rest; ++d) row[first + d] = a.rope[t * a.rope_stride + d];
    append_latent(a.kv.layout, a.kv.data + a.batch.page_table[entry] * a.kv.page_bytes, position % kPageTokens, row,
                  first + rest);
  }
}

}  // namespace
}  // namespace ps

#endif
