// Key and value pages: their formats, and appending a token.
#ifndef PENSTOCK_KERNELS_KV_PAGES_H
#define PENSTOCK_KERNELS_KV_PAGES_H

namespace ps {
namespace {

constexpr int kPageTokens = PS_PAGE_TOKENS;

// bytes of one head of one page; where its values begin; 16 elements from element index i.
struct KvF32 {
  static constexpr bool kScaled = false;
  static constexpr int kElement = 4;  // bytes
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * dim * 4; }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + kPageTokens * dim * 4; }
  PS_INLINE static F16 load(const uint8_t* p, int64_t i) { return f_load((const float*)p + i); }
  PS_INLINE static F16 load_n(const uint8_t* p, int64_t i, int n) { return f_load_n((const float*)p + i, n); }
};
struct KvBf16 {
  static constexpr bool kScaled = false;
  static constexpr int kElement = 2;
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * dim * 2; }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + kPageTokens * dim * 2; }
  PS_INLINE static F16 load(const uint8_t* p, int64_t i) { return f_load_bf16((const uint16_t*)p + i); }
  PS_INLINE static F16 load_n(const uint8_t* p, int64_t i, int n) { return f_load_bf16_n((const uint16_t*)p + i, n); }
};
struct KvInt8 {  // scales of the 32 keys follow the keys, scales of the values the values
  static constexpr bool kScaled = true;
  static constexpr int kElement = 1;
  PS_INLINE static int64_t head_bytes(int64_t dim) { return 2 * kPageTokens * (dim + 4); }
  PS_INLINE static const uint8_t* values(const uint8_t* head, int64_t dim) { return head + kPageTokens * (dim + 4); }
  PS_INLINE static F16 load(const uint8_t* p, int64_t i) { return f_load_i8((const int8_t*)p + i); }
  PS_INLINE static F16 load_n(const uint8_t* p, int64_t i, int n) { return f_load_i8_n((const int8_t*)p + i, n); }
};

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

inline void append_head(int32_t layout, uint8_t* head, int64_t slot, const float* k, const float* v, int64_t dim) {
  if (layout == PS_KV_INT8)
    return append_int8(head, (uint8_t*)KvInt8::values(head, dim), slot, k, v, dim);
  if (layout == PS_KV_BF16) {
    uint16_t* keys = (uint16_t*)head;
    uint16_t* values = (uint16_t*)KvBf16::values(head, dim) + slot * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = tail(dim, d);
      uint16_t h[16];
      f_store_bf16_n(h, f_load_n(k + d, n), n);
      for (int i = 0; i < n; ++i) keys[(d + i) * kPageTokens + slot] = h[i];
      f_store_bf16_n(values + d, f_load_n(v + d, n), n);
    }
    return;
  }
  float* keys = (float*)head;
  float* values = (float*)KvF32::values(head, dim) + slot * dim;
  for (int64_t d = 0; d < dim; ++d) {
    keys[d * kPageTokens + slot] = k[d];
    values[d] = v[d];
  }
}

PS_INLINE int64_t kv_head_bytes(int32_t layout, int64_t dim) {
  if (layout == PS_KV_INT8) return KvInt8::head_bytes(dim);
  return layout == PS_KV_BF16 ? KvBf16::head_bytes(dim) : KvF32::head_bytes(dim);
}

void kv_append(const KvAppendArgs& a, int64_t begin, int64_t end) {
  const int64_t dim = a.kv.head_dim, head_bytes = kv_head_bytes(a.kv.layout, dim);
  for (int64_t t = begin; t < end; ++t) {
    int32_t position = a.batch.positions[t];
    int64_t entry = int64_t(a.batch.token_request[t]) * a.batch.page_table_width + position / kPageTokens;
    uint8_t* page = a.kv.data + a.batch.page_table[entry] * a.kv.page_bytes;
    for (int64_t h = 0; h < a.kv.num_kv_heads; ++h)
      append_head(a.kv.layout, page + h * head_bytes, position % kPageTokens, a.k + t * a.k_stride + h * dim,
                  a.v + t * a.v_stride + h * dim, dim);
  }
}

}  // namespace
}  // namespace ps

#endif
