// A causal convolution of each channel over its last inputs, which lie in pages: the lower half of the channels as
// keys, the upper half as values.
#ifndef PENSTOCK_KERNELS_ATTENTION_SHORT_CONV_H
#define PENSTOCK_KERNELS_ATTENTION_SHORT_CONV_H

namespace ps {
namespace {

PS_INLINE float widen_bf16(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  return float_of(uint32_t(half) << 16);
}

PS_INLINE float read_nibble(uint8_t byte, bool high) { return float(widen_nibble(high ? byte >> 4 : byte & 15)); }

// Reads back the key of one position of a page that append_head stored.
inline void read_key(int32_t layout, const uint8_t* head, int64_t slot, int64_t dim, float* out) {
  if (kBuildsInt4 && layout == PS_KV_INT4) {
    const float scale = ((const float*)(head + KvInt4::part_bytes(dim)))[slot];
    for (int64_t d = 0; d < dim; ++d) out[d] = read_nibble(head[d / 2 * kPageTokens + slot], d % 2) * scale;
    restore_head(out, dim);
  } else if (builds_kv(PS_KV_INT8) && layout == PS_KV_INT8) {
    const float scale = ((const float*)(head + kPageTokens * dim))[slot];
    for (int64_t d = 0; d < dim; ++d) out[d] = float(((const int8_t*)head)[d * kPageTokens + slot]) * scale;
  } else if (builds_kv(PS_KV_BF16) && layout == PS_KV_BF16) {
    for (int64_t d = 0; d < dim; ++d) out[d] = widen_bf16(head + 4 * slot + d / 2 * 4 * kPageTokens + d % 2 * 2);
  } else {
    for (int64_t d = 0; d < dim; ++d) out[d] = ((const float*)head)[d * kPageTokens + slot];
  }
}

// Reads back the value of one position.
inline void read_value(int32_t layout, const uint8_t* head, int64_t slot, int64_t dim, float* out) {
  if (kBuildsInt4 && layout == PS_KV_INT4) {
    const uint8_t* values = KvInt4::values(head, dim);
    const uint8_t* row = values + slot * KvInt4::row_bytes(dim);
    const float scale = ((const float*)(values + KvInt4::part_bytes(dim)))[slot];
    for (int64_t d = 0; d < dim; ++d) out[d] = read_nibble(row[d / 2], d % 2) * scale;
    restore_head(out, dim);
  } else if (builds_kv(PS_KV_INT8) && layout == PS_KV_INT8) {
    const uint8_t* values = KvInt8::values(head, dim);
    const float scale = ((const float*)(values + kPageTokens * dim))[slot];
    for (int64_t d = 0; d < dim; ++d) out[d] = float(((const int8_t*)values)[slot * dim + d]) * scale;
  } else if (builds_kv(PS_KV_BF16) && layout == PS_KV_BF16) {
    const uint8_t* values = KvBf16::values(head, dim) + slot / 2 * 4 * dim + slot % 2 * 2;
    for (int64_t d = 0; d < dim; ++d) out[d] = widen_bf16(values + 4 * d);
  } else {
    for (int64_t d = 0; d < dim; ++d) out[d] = ((const float*)KvF32::values(head, dim))[slot * dim + d];
  }
}

// sum[d] = x[d] * weight[d * window] + sum[d]
inline void add_tap(const float* x, const float* weight, int64_t window, int64_t dim, float* sum) {
  for (int64_t d = 0; d < dim; d += 16) {
    const int n = tail(dim, d);
    float w[16] = {};
    for (int i = 0; i < n; ++i) w[i] = weight[(d + i) * window];
    f_store_n(sum + d, f_fma(f_load_n(x + d, n), f_load(w), f_load_n(sum + d, n)), n);
  }
}

// The sum of each channel starts from the bias and adds the positions in ascending order.
void short_conv(const ShortConvArgs& a, int64_t begin, int64_t end) {
  const int64_t dim = a.kv.head_dim, head_bytes = kv_head_bytes(a.kv.layout, dim), heads = a.kv.num_kv_heads;
  float x[kMaxHeadDim], sum[kMaxHeadDim];
  for (int64_t t = begin; t < end; ++t) {
    const int32_t position = a.batch.positions[t];
    const int32_t* table = a.batch.page_table + int64_t(a.batch.token_request[t]) * a.batch.page_table_width;
    for (int64_t h = 0; h < 2 * heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) sum[d] = a.bias ? a.bias[h * dim + d] : 0.f;
      for (int32_t tap = 0; tap < a.window; ++tap) {
        const int32_t p = position - (a.window - 1) + tap;
        if (p < 0) continue;
        const uint8_t* head = a.kv.data + table[p / kPageTokens] * a.kv.page_bytes + h % heads * head_bytes;
        (h < heads ? read_key : read_value)(a.kv.layout, head, p % kPageTokens, dim, x);
        add_tap(x, a.weight + h * dim * a.window + tap, a.window, dim, sum);
      }
      const float* gate = a.gate + t * a.gate_stride + h * dim;
      float* out = a.out + t * a.out_stride + h * dim;
      for (int64_t d = 0; d < dim; d += 16) {
        const int n = tail(dim, d);
        f_store_n(out + d, f_load_n(gate + d, n) * f_load_n(sum + d, n), n);
      }
    }
  }
}

}  // namespace
}  // namespace ps

#endif
