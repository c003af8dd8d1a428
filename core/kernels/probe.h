// The machine's limits: reading memory, and multiply-adds in registers.
#ifndef PENSTOCK_KERNELS_PROBE_H
#define PENSTOCK_KERNELS_PROBE_H

namespace ps {
namespace {

uint64_t read_bytes(const uint8_t* data, int64_t bytes) {
  uint64_t sum = wide_sum(data, bytes);
  for (int64_t i = bytes / 64 * 64; i < bytes; ++i) sum += data[i];
  return sum;
}

constexpr int kPeakChains = kFloatN > 1 ? 12 : 6;  // enough to hide the latency, few enough for registers

int64_t peak_float(int64_t iterations, float* sink) {
  F16 acc[kPeakChains];
  for (int j = 0; j < kPeakChains; ++j) acc[j] = f_set(float(j));
  F16 a = f_set(*sink), b = f_set(0.5f);
  for (int64_t i = 0; i < iterations; ++i) {
    PS_UNROLL for (int j = 0; j < kPeakChains; ++j) acc[j] = f_fma(acc[j], a, b);
  }
  for (int j = 1; j < kPeakChains; ++j) acc[0] = acc[0] + acc[j];
  *sink = f_sum(acc[0]);
  return iterations * kPeakChains * 32;
}

int64_t peak_int8(int64_t iterations, float* sink) {
  constexpr int chains = kFloatN > 1 ? 12 : 4;
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(i);
  W8 w = w8_load(bytes);
  int8_t x[4 * chains];
  for (int i = 0; i < 4 * chains; ++i) x[i] = int8_t(i);
  I16 acc[chains];
  for (int j = 0; j < chains; ++j) acc[j] = i_set(j);
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : : "r"(x) : "memory");  // so that no product is a constant of the loop
    PS_UNROLL for (int j = 0; j < chains; ++j) acc[j] = w8_dot(acc[j], w, x + 4 * j);
  }
  for (int j = 1; j < chains; ++j) acc[0] = acc[0] + acc[j];
  *sink = f_sum(f_from_i(acc[0]));
  return iterations * chains * 128;
}

int64_t peak(int32_t dtype, int64_t iterations, float* sink) {
  return dtype == PS_I8 ? peak_int8(iterations, sink) : peak_float(iterations, sink);
}

}  // namespace
}  // namespace ps

#endif
