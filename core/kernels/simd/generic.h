// Sixteen virtual lanes in plain C++; every other level must match them bit for bit.
#ifndef PENSTOCK_KERNELS_SIMD_GENERIC_H
#define PENSTOCK_KERNELS_SIMD_GENERIC_H

#include "base/half.h"

namespace ps {
namespace {

constexpr const char* kLevel = "generic";
// Register blocks: rows of activations x tiles of weights; query heads that share a page's loads.
constexpr int kFloatM = 2, kFloatN = 1, kIntRows = 2, kIntTiles = 1, kGroupRows = 1, kQueries = 1;
constexpr bool kHalfTiles = false;  // whether eight lanes of a tile cost less than sixteen
// Attention: queries and vectors of dimensions that weigh values together, queries x pages that score together.
constexpr int kWeighQueries = 1, kWeighColumns = 1, kScoreChains = 1;

struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };
struct M16 { int32_t v[16]; };

#define PS_LANES(expression)                            \
  do {                                                  \
    for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
    return r;                                           \
  } while (0)

// Without checks by sanitizers: they would take most of the time of a run, for arithmetic on lanes in local variables.
// The functions that load and store lanes are checked.
#define PS_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

// A fused multiply-add without the instruction: the product is exact in double, and the sum is rounded to odd there, so
// only the second rounding, to float, has an effect.
PS_UNCHECKED PS_INLINE float fma1(float a, float b, float c) {
  double p = double(a) * double(b), z = c;
  double s = p + z;
  double t = s - p;
  double e = (p - (s - t)) + (z - t);
  int64_t u, v;
  __builtin_memcpy(&u, &s, 8);
  __builtin_memcpy(&v, &e, 8);
  // Moves one step in magnitude towards the error if the sum is even.  No branch and no 64-bit comparison, so that two
  // lanes are computed at a time.
  int64_t towards = 1 - int64_t((uint64_t(u ^ v) >> 63) << 1);
  int64_t step = towards & ((u & 1) - 1);
  u += (e > 0 ? step : 0) + (e < 0 ? step : 0);
  __builtin_memcpy(&s, &u, 8);
  return float(s);
}

// clang-format off: one operation a line
PS_INLINE F16 f_set(float x) { F16 r; PS_LANES(x); }
PS_INLINE F16 f_load(const float* p) { F16 r; PS_LANES(p[i]); }
PS_LONG F16 f_load_n(const float* p, int n) { F16 r; PS_LANES(i < n ? p[i] : 0.f); }
PS_INLINE void f_store(float* p, F16 a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
PS_LONG void f_store_n(float* p, F16 a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
PS_INLINE void f_store_half(float* p, F16 a) { for (int i = 0; i < 8; ++i) p[i] = a.v[i]; }
PS_INLINE F16 operator+(F16 a, F16 b) { F16 r; PS_LANES(a.v[i] + b.v[i]); }
PS_INLINE F16 operator-(F16 a, F16 b) { F16 r; PS_LANES(a.v[i] - b.v[i]); }
PS_INLINE F16 operator*(F16 a, F16 b) { F16 r; PS_LANES(a.v[i] * b.v[i]); }
PS_LONG F16 operator/(const F16& a, const F16& b) { F16 r; PS_LANES(a.v[i] / b.v[i]); }
PS_UNCHECKED PS_LONG F16 f_fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  PS_LANES(fma1(a.v[i], b.v[i], c.v[i]));
}
// Like maxps: returns the second operand if either is NaN.
PS_INLINE F16 f_max(F16 a, F16 b) { F16 r; PS_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PS_INLINE F16 f_min(F16 a, F16 b) { F16 r; PS_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PS_LONG F16 f_sqrt(const F16& a) { F16 r; PS_LANES(__builtin_sqrtf(a.v[i])); }
template <int n> PS_INLINE F16 f_swap(F16 a) { F16 r; PS_LANES(a.v[i ^ n]); }  // each lane for the one n away
PS_INLINE F16 f_abs(F16 a) { F16 r; PS_LANES(float_of(bits_of(a.v[i]) & 0x7fffffffu)); }

PS_LONG M16 m_range(int lo, int hi) { M16 r; PS_LANES(i >= lo && i < hi ? -1 : 0); }
PS_INLINE M16 m_lt(F16 a, F16 b) { M16 r; PS_LANES(a.v[i] < b.v[i] ? -1 : 0); }
PS_LONG F16 f_select(const M16& m, const F16& a, const F16& b) { F16 r; PS_LANES(m.v[i] ? a.v[i] : b.v[i]); }

PS_INLINE I16 i_set(int32_t x) { I16 r; PS_LANES(x); }
PS_INLINE I16 i_load(const void* p) { I16 r; __builtin_memcpy(r.v, p, 64); return r; }
PS_INLINE I16 i_table(const int8_t* table, const I16& nibbles) {  // each byte is below 16
  uint8_t bytes[64];
  __builtin_memcpy(bytes, nibbles.v, 64);
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(table[bytes[i]]);
  return i_load(bytes);
}
PS_LONG I16 i_trits(I16& bytes) {  // see avx2.h
  int8_t x[64], digits[64];
  __builtin_memcpy(x, bytes.v, 64);
  for (int i = 0; i < 64; ++i) {
    digits[i] = int8_t((x[i] > -43) + (x[i] > 42));
    x[i] = int8_t(uint8_t(3 * x[i]));
  }
  bytes = i_load(x);
  return i_load(digits);
}
PS_INLINE void i_store(void* p, I16 a) { __builtin_memcpy(p, a.v, 64); }
PS_INLINE I16 i_bits(F16 a) { I16 r; PS_LANES(int32_t(bits_of(a.v[i]))); }
PS_INLINE F16 f_bits(I16 a) { F16 r; PS_LANES(float_of(uint32_t(a.v[i]))); }
PS_INLINE I16 operator+(I16 a, I16 b) { I16 r; PS_LANES(int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))); }
PS_INLINE I16 operator-(I16 a, I16 b) { I16 r; PS_LANES(int32_t(uint32_t(a.v[i]) - uint32_t(b.v[i]))); }
PS_INLINE I16 operator&(I16 a, I16 b) { I16 r; PS_LANES(a.v[i] & b.v[i]); }
PS_INLINE I16 operator|(I16 a, I16 b) { I16 r; PS_LANES(a.v[i] | b.v[i]); }
PS_INLINE I16 i_max(I16 a, I16 b) { I16 r; PS_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
template <int n> PS_INLINE I16 i_shl(I16 a) { I16 r; PS_LANES(int32_t(uint32_t(a.v[i]) << n)); }
template <int n> PS_INLINE I16 i_srl(I16 a) { I16 r; PS_LANES(int32_t(uint32_t(a.v[i]) >> n)); }
template <int n> PS_INLINE I16 i_sra(I16 a) { I16 r; PS_LANES(a.v[i] >> n); }
PS_INLINE F16 f_from_i(I16 a) { F16 r; PS_LANES(float(a.v[i])); }
PS_INLINE I16 i_from_f(F16 a) { I16 r; PS_LANES(int32_t(a.v[i])); }  // whole numbers only

PS_LONG float f_sum(F16 a) {
  for (int n = 8; n > 0; n >>= 1)
    for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
  return a.v[0];
}
PS_LONG float f_hmax(F16 a) {
  for (int n = 8; n > 0; n >>= 1)
    for (int i = 0; i < n; ++i) a.v[i] = a.v[i] > a.v[i + n] ? a.v[i] : a.v[i + n];
  return a.v[0];
}
PS_LONG int32_t i_hmax(I16 a) {
  int32_t m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

PS_LONG F16 f_load_bf16_n(const uint16_t* p, int n) { F16 r; PS_LANES(i < n ? bf16_to_f32(p[i]) : 0.f); }
PS_LONG F16 f_load_f16_n(const uint16_t* p, int n) { F16 r; PS_LANES(i < n ? f16_to_f32(p[i]) : 0.f); }
PS_LONG F16 f_load_i8_n(const int8_t* p, int n) { F16 r; PS_LANES(i < n ? float(p[i]) : 0.f); }
PS_LONG F16 f_load_bf16(const uint16_t* p) { F16 r; PS_LANES(bf16_to_f32(p[i])); }
PS_LONG F16 f_load_f16(const uint16_t* p) { F16 r; PS_LANES(f16_to_f32(p[i])); }
PS_LONG F16 f_load_i8(const int8_t* p) { F16 r; PS_LANES(float(p[i])); }
PS_LONG void f_store_bf16_n(uint16_t* p, F16 a, int n) { for (int i = 0; i < n; ++i) p[i] = f32_to_bf16(a.v[i]); }
PS_LONG void f_store_f16_n(uint16_t* p, F16 a, int n) { for (int i = 0; i < n; ++i) p[i] = f32_to_f16(a.v[i]); }
PS_LONG void f_store_i8_n(int8_t* p, F16 a, int n) { for (int i = 0; i < n; ++i) p[i] = int8_t(int32_t(a.v[i])); }
// Rounds half to even; x is at most 127, and those below `least` become it.
PS_LONG void f_store_round_i8_n(int8_t* p, F16 a, int32_t least, int n) {
  for (int i = 0; i < n; ++i) {
    const float x = a.v[i] < float(least) ? float(least) : a.v[i], magic = 12582912.f;  // as f_round
    p[i] = int8_t(int32_t((x + magic) - magic));
  }
}
// p[2 * i] = h[i]; the elements between are unchanged.
PS_INLINE void i_store_halves(uint16_t* p, const uint16_t* h, int n) { for (int i = 0; i < n; ++i) p[2 * i] = h[i]; }

// ---- integer dot products: 16 rows x 4 columns a step -----------------------------------------------------
struct W8 { int8_t v[64]; };
PS_INLINE W8 w8_load(const uint8_t* p) { W8 r; __builtin_memcpy(r.v, p, 64); return r; }
PS_LONG I16 w8_dot(I16 acc, const W8& w, const int8_t* x) {
  for (int i = 0; i < 16; ++i)
    acc.v[i] += w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3];
  return acc;
}
PS_INLINE I16 w8_start(int32_t) { return i_set(0); }
PS_INLINE W8 w8_ready(const I16& bytes) { W8 r; __builtin_memcpy(r.v, &bytes, 64); return r; }

// Dot products of conv_int8; unsigned activations are 0 to 127.
template <bool kSigned>
struct Int8Dot {
  static constexpr bool kPairs = false;  // whether two lines together take fewer steps: see avx2.h
  using Weight = W8;
  static PS_INLINE I16 start(const uint8_t*, int64_t) { return i_set(0); }
  static PS_INLINE Weight load(const uint8_t* p) { return w8_load(p); }
  static PS_INLINE I16 dot(const I16& acc, const Weight& w, const int8_t* x) { return w8_dot(acc, w, x); }
};

struct GroupParams { uint8_t step[16], offset[16]; };
PS_INLINE GroupParams w4_group_params(const I16& params, int group, bool) {
  GroupParams r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t word = uint32_t(params.v[i]) >> (16 * group);
    r.step[i] = uint8_t(word);
    r.offset[i] = uint8_t(word >> 8);
  }
  return r;
}
PS_LONG I16 dequantize(const I16& bytes, const GroupParams& group, int shift) {
  I16 r;
  for (int i = 0; i < 16; ++i) {
    uint32_t word = 0;
    for (int b = 0; b < 32; b += 8)
      word |= uint32_t(uint8_t(((uint32_t(bytes.v[i]) >> (b + shift)) & 15u) * group.step[i] + group.offset[i])) << b;
    r.v[i] = int32_t(word);
  }
  return r;
}
PS_INLINE I16 w4_low(const I16& bytes, const GroupParams& group) { return dequantize(bytes, group, 0); }
PS_INLINE I16 w4_high(const I16& bytes, const GroupParams& group) { return dequantize(bytes, group, 4); }

struct W4 { uint8_t v[64]; };
using G16 = I16;
PS_INLINE W4 w4_load(const uint8_t* p) { W4 r; __builtin_memcpy(r.v, p, 64); return r; }
PS_INLINE G16 w4_zero() { return i_set(0); }
PS_LONG G16 w4_dot(G16 acc, const W4& w, const int8_t* lo, const int8_t* hi) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) {
      int b = w.v[4 * i + j];
      acc.v[i] += (b & 15) * lo[j] + (b >> 4) * hi[j];
    }
  return acc;
}
PS_INLINE I16 w4_sum(const G16& acc) { return acc; }

PS_INLINE void keep_order(I16&) {}  // see avx2.h

// Unsigned weights up to 63, multiplied as signed here.
using U8 = W8;
using U16 = I16;
PS_INLINE U8 u8_load(const uint8_t* p) { return w8_load(p); }
PS_INLINE U16 u8_zero() { return i_set(0); }
PS_INLINE U16 u8_dot(const U16& acc, const U8& w, const int8_t* x) { return w8_dot(acc, w, x); }
PS_INLINE I16 u8_sum(const U16& acc) { return acc; }
PS_INLINE I16 i_mul(const I16& a, const I16& b) { I16 r; PS_LANES(int32_t(uint32_t(a.v[i]) * uint32_t(b.v[i]))); }
PS_INLINE I16 u8_times(const U16& acc, const I16& steps) { return i_mul(acc, i_sra<16>(steps)); }
// Multiplies the two 16-bit halves of each lane by two numbers and adds them.
PS_INLINE I16 i_pairs(const I16& halves, const int16_t* x) {
  I16 r;
  PS_LANES(int16_t(uint32_t(halves.v[i])) * x[0] + (halves.v[i] >> 16) * x[1]);
}

PS_INLINE I16 w4_steps(const I16& params, int group) {
  I16 r;
  PS_LANES(int32_t((uint32_t(params.v[i]) >> (16 * group)) & 255u));
}
// Adds the offsets of two groups times the sums of their activations; with the parameters of a damaged file, sums wrap.
PS_INLINE I16 w4_offsets(const I16& acc, const I16& params, const int16_t* sums) {
  I16 first, second;
  for (int i = 0; i < 16; ++i) {
    first.v[i] = int8_t(uint32_t(params.v[i]) >> 8) * sums[0];
    second.v[i] = int8_t(uint32_t(params.v[i]) >> 24) * sums[1];
  }
  return acc + first + second;
}

PS_INLINE uint64_t wide_sum(const uint8_t* p, int64_t n) {
  uint64_t s[8] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64)
    for (int j = 0; j < 8; ++j) {
      uint64_t u;
      __builtin_memcpy(&u, p + i + 8 * j, 8);
      s[j] += u;
    }
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

#undef PS_LANES
// clang-format on

}  // namespace
}  // namespace ps

#endif
