// Rounding of rows to int8, for activations and for int8 KV pages: scale = max|x| / 127, q = round(x / scale).
#ifndef PENSTOCK_KERNELS_QUANTIZE_H
#define PENSTOCK_KERNELS_QUANTIZE_H

namespace ps {
namespace {

struct RowScale {
  float scale, inverse;  // NaN and 0 for a row with a NaN or an infinity
};

// The largest magnitude as bits: integer order is float order there, and NaN and infinity come out on top.
inline __attribute__((noinline)) int32_t max_magnitude(const float* x, int64_t n) {
  I16 m = i_set(0);
  for (int64_t i = 0; i < n; i += 16) m = i_max(m, i_bits(f_abs(f_load_n(x + i, tail(n, i)))));
  return i_hmax(m);
}

PS_INLINE RowScale row_scale(const float* x, int64_t n) {
  int32_t bits = max_magnitude(x, n);
  if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.f};
  float scale = float_of(uint32_t(bits)) / 127.f;
  if (scale < 1e-37f) return {0.f, 0.f};  // the inverse must be finite
  return {scale, 1.f / scale};
}

PS_LONG F16 to_int8(F16 x, float inverse) {
  // A NaN becomes 127 (the first operand gives way), never an undefined conversion; its scale is NaN.
  F16 v = f_max(f_min(x * f_set(inverse), f_set(127.f)), f_set(-127.f));
  return f_round(v);
}

void quantize_rows(const float* x, int64_t x_stride, int64_t cols, int32_t layout, const QuantizedRows& out,
                   int64_t begin, int64_t end) {
  // The AVX-512 level keeps q + 128 as an unsigned byte for 8-bit weights: flipping the top bit adds it.
  const bool flip = kUnsignedActivations && layout == PS_T16_I8;
  for (int64_t row = begin; row < end; ++row) {
    const float* src = x + row * x_stride;
    int8_t* q = out.q + row * out.stride;
    RowScale s = row_scale(src, cols);
    out.scale[row] = s.scale;
    for (int64_t i = 0; i < out.stride; i += 32) {
      I16 sum = i_set(0);
      for (int64_t j = i; j < i + 32; j += 16) {
        int n = cols - j >= 16 ? 16 : cols > j ? int(cols - j) : 0;
        F16 v = n > 0 ? to_int8(f_load_n(src + j, n), s.inverse) : f_set(0.f);
        sum = sum + i_from_f(v);
        f_store_i8_n(q + j, v, 16);
        if (flip)
          for (int b = 0; b < 16; ++b) q[j + b] = int8_t(q[j + b] ^ -128);
      }
      if (!out.group_sums) continue;
      int32_t lanes[16], total = 0;
      i_store(lanes, sum);
      for (int l = 0; l < 16; ++l) total += lanes[l];
      out.group_sums[row * (out.stride / 32) + i / 32] = total;
    }
  }
}

}  // namespace
}  // namespace ps

#endif
