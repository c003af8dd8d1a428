// Probes of the machine's limits: memory bandwidth, and multiply-adds in registers.
#ifndef PENSTOCK_KERNELS_LEVELS_PROBE_H
#define PENSTOCK_KERNELS_LEVELS_PROBE_H

namespace ps {
namespace {

uint64_t read_bytes(const uint8_t* data, int64_t bytes) {
  uint64_t sum = wide_sum(data, bytes);
  for (int64_t i = bytes / 64 * 64; i < bytes; ++i) sum += data[i];
  return sum;
}

#ifndef PS_GENERIC

constexpr int kPeakChains = kFloatN > 1 ? 12 : 6;  // enough to hide the latency, few enough to stay in registers

int64_t peak_float(int64_t iterations, float* sink) {
  float start[kPeakChains + 16];  // all lanes differ, or the compiler would compute them once
  for (int i = 0; i < kPeakChains + 16; ++i) start[i] = *sink + float(i);
  F16 acc[kPeakChains];
  PS_UNROLL for (int j = 0; j < kPeakChains; ++j) acc[j] = f_load(start + j);
  F16 a = f_set(*sink), b = f_set(0.5f);
  for (int64_t i = 0; i < iterations; ++i) {
    PS_UNROLL for (int j = 0; j < kPeakChains; ++j) acc[j] = f_fma(acc[j], a, b);
  }
  PS_UNROLL for (int j = 1; j < kPeakChains; ++j) acc[0] = acc[0] + acc[j];
  *sink = f_sum(acc[0]);
  return iterations * kPeakChains * 32;
}

// 256 operations a step, with the level's fastest dot product.
PS_INLINE void multiply_step(I16& acc, const W8& w, const int8_t* x) { acc = w8_dot(w8_dot(acc, w, x), w, x + 16); }

int64_t peak_int8(int64_t iterations, float* sink) {
  constexpr int chains = kFloatN > 1 ? 12 : 4;
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(3 * i + (*sink > 0));
  int8_t x[4 * chains + 32];
  for (int i = 0; i < 4 * chains + 32; ++i) x[i] = int8_t(i);
  I16 acc[chains];
  PS_UNROLL for (int j = 0; j < chains; ++j) acc[j] = i_set(0);
  if constexpr (kGroupRows == kIntRows) {  // 4-bit weights
    const W4 w = w4_load(bytes);
    G16 sums[chains];
    PS_UNROLL for (int j = 0; j < chains; ++j) sums[j] = w4_zero();
    for (int64_t i = 0; i < iterations; ++i) {
      __asm__ volatile("" : : "r"(x) : "memory");  // hides x from the optimizer: no product is loop-invariant
      PS_UNROLL for (int j = 0; j < chains; ++j) sums[j] = w4_dot(sums[j], w, x + 4 * j, x + 4 * j + 16);
    }
    PS_UNROLL for (int j = 0; j < chains; ++j) acc[j] = w4_sum(sums[j]);
  } else {
    const W8 w = w8_load(bytes);
    for (int64_t i = 0; i < iterations; ++i) {
      __asm__ volatile("" : : "r"(x) : "memory");
      PS_UNROLL for (int j = 0; j < chains; ++j) multiply_step(acc[j], w, x + 4 * j);
    }
  }
  I16 sum = i_set(0);
  PS_UNROLL for (int j = 0; j < chains; ++j) sum = sum + acc[j];
  *sink = f_sum(f_from_i(sum));
  return iterations * chains * 256;
}

#endif

int64_t peak(int32_t dtype, int64_t iterations, float* sink) {
#ifdef PS_GENERIC  // without dot product instructions, the baseline's multiplications and additions bound both
  float acc[16];
  for (int j = 0; j < 16; ++j) acc[j] = *sink + float(j);
  const float a = *sink;
  for (int64_t i = 0; i < iterations; ++i)
    for (int j = 0; j < 16; ++j) acc[j] = acc[j] * a + 0.5f;
  for (int j = 1; j < 16; ++j) acc[0] += acc[j];
  *sink = acc[0];
  (void)dtype;
  return iterations * 32;
#else
  return dtype == PS_I8 ? peak_int8(iterations, sink) : peak_float(iterations, sink);
#endif
}

}  // namespace
}  // namespace ps

#endif
