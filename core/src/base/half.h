// Scalar conversions to and from the 16-bit float formats: round to nearest, ties to even.
#ifndef PENSTOCK_BASE_HALF_H
#define PENSTOCK_BASE_HALF_H

#include <stdint.h>

#define PS_INLINE inline __attribute__((always_inline))
#ifdef PS_GENERIC  // loops over lanes in memory: unrolling or inlining would only add code
#define PS_UNROLL
#define PS_LONG __attribute__((noinline))
#define PS_SMALL __attribute__((cold))  // for packing, which runs once per weight
#else
#define PS_SMALL
#define PS_UNROLL _Pragma("GCC unroll 16")
#define PS_LONG inline __attribute__((always_inline))
#endif

namespace ps {
namespace {

PS_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

PS_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

PS_INLINE float bf16_to_f32(uint16_t h) { return float_of(uint32_t(h) << 16); }

PS_INLINE uint16_t f32_to_bf16(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40u;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

PS_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16;
  uint32_t magnitude = h & 0x7fffu;
  // Multiplying by 2^112 rebases the exponent and is exact for subnormals too.
  float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
  uint32_t u = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : bits_of(scaled);
  return float_of(u | sign);
}

PS_INLINE uint16_t f32_to_f16(float x) {
  uint32_t u = bits_of(x);
  uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  // Below 2^-14 adding 0.5 makes the hardware round at the right bit.
  uint32_t subnormal = bits_of(float_of(u) + 0.5f) - 0x3f000000u;
  uint32_t h = u < 0x38800000u ? subnormal : normal;
  if (u >= 0x47800000u) h = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return uint16_t(h | sign);
}

}  // namespace
}  // namespace ps

#endif
