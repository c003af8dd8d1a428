// Sixteen lanes in four NEON registers.  Integer dot products use sdot if the translation unit may contain it, else
// widening multiplications whose sums fit their lanes.
#ifndef PENSTOCK_KERNELS_SIMD_NEON_H
#define PENSTOCK_KERNELS_SIMD_NEON_H

#include "base/half.h"

namespace ps {
namespace {

#ifdef PENSTOCK_NEON_DOT
constexpr const char* kLevel = "neon_dot";
#else
constexpr const char* kLevel = "neon";
#endif
constexpr int kFloatM = 4, kFloatN = 1, kIntRows = 4, kIntTiles = 1, kGroupRows = 1, kQueries = 2;
constexpr bool kHalfTiles = true;  // whether eight lanes of a tile cost less than sixteen
// Attention: queries and vectors of dimensions that weigh values together, queries x pages that score together.
constexpr int kWeighQueries = 2, kWeighColumns = 2, kScoreChains = 2;

struct F16 { float32x4_t v[4]; };
struct I16 { int32x4_t v[4]; };
struct M16 { uint32x4_t v[4]; };

#define PS_QUADS(expression)                                     \
  do {                                                           \
    PS_UNROLL for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
    return r;                                                    \
  } while (0)

// clang-format off: one operation a line
PS_INLINE F16 f_set(float x) { F16 r; PS_QUADS(vdupq_n_f32(x)); }
PS_INLINE F16 f_load(const float* p) { F16 r; PS_QUADS(vld1q_f32(p + 4 * i)); }
PS_INLINE void f_store(float* p, F16 a) { PS_UNROLL for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
PS_INLINE void f_store_half(float* p, F16 a) { PS_UNROLL for (int i = 0; i < 2; ++i) vst1q_f32(p + 4 * i, a.v[i]); }
// NEON masks no loads: a tail goes through a small buffer.
PS_INLINE F16 f_load_n(const float* p, int n) {
  if (n == 16) return f_load(p);
  float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load(t);
}
PS_INLINE void f_store_n(float* p, F16 a, int n) {
  if (n == 16) return f_store(p, a);
  float t[16];
  f_store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
PS_INLINE F16 operator+(F16 a, F16 b) { F16 r; PS_QUADS(vaddq_f32(a.v[i], b.v[i])); }
PS_INLINE F16 operator-(F16 a, F16 b) { F16 r; PS_QUADS(vsubq_f32(a.v[i], b.v[i])); }
PS_INLINE F16 operator*(F16 a, F16 b) { F16 r; PS_QUADS(vmulq_f32(a.v[i], b.v[i])); }
PS_INLINE F16 operator/(F16 a, F16 b) { F16 r; PS_QUADS(vdivq_f32(a.v[i], b.v[i])); }
PS_INLINE F16 f_fma(F16 a, F16 b, F16 c) { F16 r; PS_QUADS(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// Returns the second operand if either is NaN, as on x86.
PS_INLINE F16 f_max(F16 a, F16 b) { F16 r; PS_QUADS(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PS_INLINE F16 f_min(F16 a, F16 b) { F16 r; PS_QUADS(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
PS_INLINE F16 f_sqrt(F16 a) { F16 r; PS_QUADS(vsqrtq_f32(a.v[i])); }
template <int n> PS_INLINE F16 f_swap(F16 a) {  // each lane gets the value of the lane n away
  F16 r;
  if constexpr (n >= 4) PS_QUADS(a.v[i ^ (n / 4)]);
  else if constexpr (n == 2) PS_QUADS(vextq_f32(a.v[i], a.v[i], 2));
  else PS_QUADS(vrev64q_f32(a.v[i]));
}
PS_INLINE F16 f_abs(F16 a) { F16 r; PS_QUADS(vabsq_f32(a.v[i])); }

PS_INLINE M16 m_range(int lo, int hi) {
  static const int32_t indices[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32x4_t l = vdupq_n_s32(lo), h = vdupq_n_s32(hi);
  M16 r;
  PS_QUADS(vandq_u32(vcgeq_s32(vld1q_s32(indices + 4 * i), l), vcltq_s32(vld1q_s32(indices + 4 * i), h)));
}
PS_INLINE M16 m_lt(F16 a, F16 b) { M16 r; PS_QUADS(vcltq_f32(a.v[i], b.v[i])); }
PS_INLINE F16 f_select(M16 m, F16 a, F16 b) { F16 r; PS_QUADS(vbslq_f32(m.v[i], a.v[i], b.v[i])); }

PS_INLINE I16 i_set(int32_t x) { I16 r; PS_QUADS(vdupq_n_s32(x)); }
PS_INLINE I16 i_table(const int8_t* table, I16 nibbles) {  // 16 entries; each byte is below 16
  const int8x16_t t = vld1q_s8(table);
  I16 r;
  PS_QUADS(vreinterpretq_s32_s8(vqtbl1q_s8(t, vreinterpretq_u8_s32(nibbles.v[i]))));
}
PS_INLINE I16 i_trits(I16& bytes) {  // see avx2.h
  I16 r;
  PS_UNROLL for (int i = 0; i < 4; ++i) {
    const int8x16_t x = vreinterpretq_s8_s32(bytes.v[i]);
    bytes.v[i] = vreinterpretq_s32_s8(vaddq_s8(vaddq_s8(x, x), x));
    const uint8x16_t low = vcgtq_s8(x, vdupq_n_s8(-43)), high = vcgtq_s8(x, vdupq_n_s8(42));
    r.v[i] = vreinterpretq_s32_u8(vsubq_u8(vsubq_u8(vdupq_n_u8(0), low), high));
  }
  return r;
}
PS_INLINE I16 i_load(const void* p) { I16 r; PS_QUADS(vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * i))); }
PS_INLINE void i_store(void* p, I16 a) {
  PS_UNROLL for (int i = 0; i < 4; ++i) vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_s32(a.v[i]));
}
PS_INLINE I16 i_bits(F16 a) { I16 r; PS_QUADS(vreinterpretq_s32_f32(a.v[i])); }
PS_INLINE F16 f_bits(I16 a) { F16 r; PS_QUADS(vreinterpretq_f32_s32(a.v[i])); }
PS_INLINE I16 operator+(I16 a, I16 b) { I16 r; PS_QUADS(vaddq_s32(a.v[i], b.v[i])); }
PS_INLINE I16 operator-(I16 a, I16 b) { I16 r; PS_QUADS(vsubq_s32(a.v[i], b.v[i])); }
PS_INLINE I16 operator&(I16 a, I16 b) { I16 r; PS_QUADS(vandq_s32(a.v[i], b.v[i])); }
PS_INLINE I16 operator|(I16 a, I16 b) { I16 r; PS_QUADS(vorrq_s32(a.v[i], b.v[i])); }
PS_INLINE I16 i_max(I16 a, I16 b) { I16 r; PS_QUADS(vmaxq_s32(a.v[i], b.v[i])); }
template <int n> PS_INLINE I16 i_shl(I16 a) { I16 r; PS_QUADS(vshlq_s32(a.v[i], vdupq_n_s32(n))); }
template <int n> PS_INLINE I16 i_sra(I16 a) { I16 r; PS_QUADS(vshlq_s32(a.v[i], vdupq_n_s32(-n))); }
template <int n> PS_INLINE I16 i_srl(I16 a) {
  I16 r;
  PS_QUADS(vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[i]), vdupq_n_s32(-n))));
}
PS_INLINE F16 f_from_i(I16 a) { F16 r; PS_QUADS(vcvtq_f32_s32(a.v[i])); }
PS_INLINE I16 i_from_f(F16 a) { I16 r; PS_QUADS(vcvtq_s32_f32(a.v[i])); }  // whole numbers only

PS_INLINE float f_sum(F16 a) {
  float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
PS_INLINE float f_hmax(F16 a) {
  float t[16];
  f_store(t, a);
  for (int n = 8; n > 0; n >>= 1)
    for (int i = 0; i < n; ++i) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}
PS_INLINE int32_t i_hmax(I16 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}

PS_INLINE F16 f_load_bf16(const uint16_t* p) {
  F16 r;
  PS_QUADS(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
PS_INLINE F16 f_load_f16(const uint16_t* p) {
  F16 r;
  PS_QUADS(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
PS_INLINE F16 f_load_i8(const int8_t* p) {
  int8x16_t b = vld1q_s8(p);
  int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
  return f_from_i({{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)),
                    vmovl_s16(vget_high_s16(hi))}});
}
PS_INLINE F16 f_load_bf16_n(const uint16_t* p, int n) {
  uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_bf16(t);
}
PS_INLINE F16 f_load_f16_n(const uint16_t* p, int n) {
  uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_f16(t);
}
PS_INLINE F16 f_load_i8_n(const int8_t* p, int n) {
  int8_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_i8(t);
}
PS_INLINE void f_store_bf16_n(uint16_t* p, F16 a, int n) {
  float t[16];
  f_store(t, a);
  for (int i = 0; i < n; ++i) p[i] = f32_to_bf16(t[i]);
}
PS_INLINE void f_store_f16_n(uint16_t* p, F16 a, int n) {
  uint16_t t[16];
  PS_UNROLL for (int i = 0; i < 4; ++i) vst1_u16(t + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
PS_INLINE void f_store_i8_n(int8_t* p, F16 a, int n) {
  I16 q = i_from_f(a);
  int16x8_t lo = vcombine_s16(vmovn_s32(q.v[0]), vmovn_s32(q.v[1]));
  int16x8_t hi = vcombine_s16(vmovn_s32(q.v[2]), vmovn_s32(q.v[3]));
  int8_t t[16];
  vst1q_s8(t, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
// Rounds half to even; x is at most 127, and those below `least` become it.
PS_INLINE void f_store_round_i8_n(int8_t* p, F16 a, int32_t least, int n) {
  int32x4_t q[4];
  PS_UNROLL for (int i = 0; i < 4; ++i) q[i] = vmaxq_s32(vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(least));
  const int16x8_t lo = vcombine_s16(vmovn_s32(q[0]), vmovn_s32(q[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(q[2]), vmovn_s32(q[3]));
  const int8x16_t b = vcombine_s8(vmovn_s16(lo), vmovn_s16(hi));
  if (n == 16) return vst1q_s8(p, b);
  int8_t t[16];
  vst1q_s8(t, b);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
// p[2 * i] = h[i]; the elements between are unchanged.
PS_INLINE void i_store_halves(uint16_t* p, const uint16_t* h, int n) { for (int i = 0; i < n; ++i) p[2 * i] = h[i]; }

PS_INLINE int8x16_t four_bytes(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
// Adds the products of four columns to each of four rows.
PS_INLINE int32x4_t dot(int32x4_t acc, int8x16_t w, int8x16_t x) {
#ifdef PENSTOCK_NEON_DOT
  return vdotq_s32(acc, w, x);
#else
  // Two products fit 16 bits: 2 * 128 * 127 = 32512.
  return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)));
#endif
}

struct W8 { int8x16_t v[4]; };
PS_INLINE W8 w8_load(const uint8_t* p) { W8 r; PS_QUADS(vld1q_s8((const int8_t*)p + 16 * i)); }
PS_INLINE I16 w8_dot(I16 acc, const W8& w, const int8_t* x) {
  int8x16_t q = four_bytes(x);
  PS_UNROLL for (int i = 0; i < 4; ++i) acc.v[i] = dot(acc.v[i], w.v[i], q);
  return acc;
}
PS_INLINE I16 w8_start(int32_t) { return i_set(0); }
PS_INLINE W8 w8_ready(I16 bytes) { W8 r; PS_QUADS(vreinterpretq_s8_s32(bytes.v[i])); }

// Dot products of conv_int8; unsigned activations are 0 to 127.
template <bool kSigned>
struct Int8Dot {
  static constexpr bool kPairs = false;  // whether two lines together take fewer steps: see avx2.h
  using Weight = W8;
  static PS_INLINE I16 start(const uint8_t*, int64_t) { return i_set(0); }
  static PS_INLINE Weight load(const uint8_t* p) { return w8_load(p); }
  static PS_INLINE I16 dot(const I16& acc, const Weight& w, const int8_t* x) { return w8_dot(acc, w, x); }
};

struct GroupParams { uint8x16_t step[4], offset[4]; };
PS_INLINE GroupParams w4_group_params(I16 params, int group, bool) {
  const uint8_t lanes[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const uint8x16_t step = vaddq_u8(vld1q_u8(lanes), vdupq_n_u8(uint8_t(2 * group)));
  GroupParams r;
  PS_UNROLL for (int i = 0; i < 4; ++i) {
    const uint8x16_t p = vreinterpretq_u8_s32(params.v[i]);
    r.step[i] = vqtbl1q_u8(p, step);
    r.offset[i] = vqtbl1q_u8(p, vaddq_u8(step, vdupq_n_u8(1)));
  }
  return r;
}
PS_INLINE I16 w4_low(I16 bytes, const GroupParams& group) {
  I16 r;
  PS_QUADS(vreinterpretq_s32_u8(
      vmlaq_u8(group.offset[i], vandq_u8(vreinterpretq_u8_s32(bytes.v[i]), vdupq_n_u8(15)), group.step[i])));
}
PS_INLINE I16 w4_high(I16 bytes, const GroupParams& group) {
  I16 r;
  PS_QUADS(vreinterpretq_s32_u8(
      vmlaq_u8(group.offset[i], vshrq_n_u8(vreinterpretq_u8_s32(bytes.v[i]), 4), group.step[i])));
}

struct W4 { int8x16_t lo[4], hi[4]; };
PS_INLINE W4 w4_load(const uint8_t* p) {
  W4 r;
  PS_UNROLL for (int i = 0; i < 4; ++i) {
    uint8x16_t b = vld1q_u8(p + 16 * i);
    r.lo[i] = vreinterpretq_s8_u8(vandq_u8(b, vdupq_n_u8(15)));
    r.hi[i] = vreinterpretq_s8_u8(vshrq_n_u8(b, 4));
  }
  return r;
}
#ifdef PENSTOCK_NEON_DOT
using G16 = I16;
PS_INLINE G16 w4_zero() { return i_set(0); }
PS_INLINE G16 w4_dot(G16 acc, const W4& w, const int8_t* lo, const int8_t* hi) {
  int8x16_t l = four_bytes(lo), h = four_bytes(hi);
  PS_UNROLL for (int i = 0; i < 4; ++i) acc.v[i] = dot(dot(acc.v[i], w.lo[i], l), w.hi[i], h);
  return acc;
}
PS_INLINE I16 w4_sum(G16 acc) { return acc; }
#else
// A group's sums in 16 bits: rows 0 and 1 of four in `top`, rows 2 and 3 in `bottom`, one lane for each of four
// columns.  A lane adds eight products, and two lanes are added: 2 * 8 * 15 * 127 = 30480 fits.
struct G16 { int16x8_t top[4], bottom[4]; };
PS_INLINE G16 w4_zero() {
  G16 r;
  PS_UNROLL for (int i = 0; i < 4; ++i) r.top[i] = r.bottom[i] = vdupq_n_s16(0);
  return r;
}
PS_INLINE G16 w4_dot(G16 acc, const W4& w, const int8_t* lo, const int8_t* hi) {
  const int8x16_t l = four_bytes(lo), h = four_bytes(hi);
  PS_UNROLL for (int i = 0; i < 4; ++i) {
    acc.top[i] = vmlal_s8(acc.top[i], vget_low_s8(w.lo[i]), vget_low_s8(l));
    acc.top[i] = vmlal_s8(acc.top[i], vget_low_s8(w.hi[i]), vget_low_s8(h));
    acc.bottom[i] = vmlal_high_s8(vmlal_high_s8(acc.bottom[i], w.lo[i], l), w.hi[i], h);
  }
  return acc;
}
PS_INLINE I16 w4_sum(const G16& acc) { I16 r; PS_QUADS(vpaddlq_s16(vpaddq_s16(acc.top[i], acc.bottom[i]))); }
#endif

PS_INLINE void keep_order(I16&) {}  // see avx2.h

// Unsigned weights up to 63, multiplied as signed here.
using U8 = W8;
using U16 = I16;
PS_INLINE U8 u8_load(const uint8_t* p) { return w8_load(p); }
PS_INLINE U16 u8_zero() { return i_set(0); }
PS_INLINE U16 u8_dot(const U16& acc, const U8& w, const int8_t* x) { return w8_dot(acc, w, x); }
PS_INLINE I16 u8_sum(const U16& acc) { return acc; }
PS_INLINE I16 i_mul(I16 a, I16 b) { I16 r; PS_QUADS(vmulq_s32(a.v[i], b.v[i])); }
// The sums times a step stored in both 16-bit halves of a lane.
PS_INLINE I16 u8_times(const U16& acc, I16 steps) { return i_mul(acc, i_sra<16>(steps)); }
// Multiplies the two 16-bit halves of each lane by two numbers and adds them.
PS_INLINE I16 i_pairs(I16 halves, const int16_t* x) {
  I16 r;
  PS_QUADS(vmlaq_n_s32(vmulq_n_s32(vshrq_n_s32(vshlq_n_s32(halves.v[i], 16), 16), x[0]), vshrq_n_s32(halves.v[i], 16),
                       x[1]));
}

PS_INLINE I16 w4_steps(I16 params, int group) {
  const int32x4_t right = vdupq_n_s32(-16 * group);
  I16 r;
  PS_QUADS(vreinterpretq_s32_u32(
      vandq_u32(vshlq_u32(vreinterpretq_u32_s32(params.v[i]), right), vdupq_n_u32(255))));
}
// Adds the offsets of two groups times the sums of their activations.
PS_INLINE I16 w4_offsets(I16 acc, I16 params, const int16_t* sums) {
  PS_UNROLL for (int i = 0; i < 4; ++i) {
    const int32x4_t first = vshrq_n_s32(vshlq_n_s32(params.v[i], 16), 24), second = vshrq_n_s32(params.v[i], 24);
    acc.v[i] = vmlaq_n_s32(vmlaq_n_s32(acc.v[i], first, sums[0]), second, sums[1]);
  }
  return acc;
}

PS_INLINE uint64_t wide_sum(const uint8_t* p, int64_t n) {
  uint64x2_t s[4] = {vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0), vdupq_n_u64(0)};
  for (int64_t i = 0; i + 64 <= n; i += 64)
    PS_UNROLL for (int j = 0; j < 4; ++j) s[j] = vaddq_u64(s[j], vreinterpretq_u64_u8(vld1q_u8(p + i + 16 * j)));
  uint64x2_t t = vaddq_u64(vaddq_u64(s[0], s[1]), vaddq_u64(s[2], s[3]));
  return vgetq_lane_u64(t, 0) + vgetq_lane_u64(t, 1);
}

#undef PS_QUADS
// clang-format on

}  // namespace
}  // namespace ps

#endif
