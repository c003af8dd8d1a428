// Sixteen lanes in one AVX-512 register; integer dot products by VNNI.
#ifndef PENSTOCK_KERNELS_SIMD_AVX512_H
#define PENSTOCK_KERNELS_SIMD_AVX512_H

#include "base/half.h"

namespace ps {
namespace {

constexpr const char* kLevel = "avx512";
#ifdef __AMX_INT8__
constexpr int kIntRows = 16;  // rows of a tile register
#else
constexpr int kIntRows = 12;
#endif
constexpr int kFloatM = 6, kFloatN = 4, kIntTiles = 2, kGroupRows = 2, kQueries = 8;
constexpr bool kHalfTiles = false;  // whether eight lanes of a tile cost less than sixteen
// Attention: queries and vectors of dimensions that weigh values together, queries x pages that score together.
constexpr int kWeighQueries = 4, kWeighColumns = 4, kScoreChains = 4;

struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct M16 { __mmask16 v; };

PS_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }

PS_INLINE F16 f_set(float x) { return {_mm512_set1_ps(x)}; }
PS_INLINE F16 f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
PS_INLINE F16 f_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
PS_INLINE void f_store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
PS_INLINE void f_store_n(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
PS_INLINE void f_store_half(float* p, F16 a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a.v)); }
PS_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PS_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PS_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PS_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PS_INLINE F16 f_fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PS_INLINE F16 f_max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PS_INLINE F16 f_min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PS_INLINE F16 f_sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
template <int n> PS_INLINE F16 f_swap(F16 a) {  // each lane gets the value of the lane n away
  constexpr int order = n == 8 || n == 2 ? 0x4e : 0xb1;
  if constexpr (n >= 4) return {_mm512_shuffle_f32x4(a.v, a.v, order)};
  else return {_mm512_permute_ps(a.v, order)};
}
PS_INLINE F16 f_abs(F16 a) { return {_mm512_abs_ps(a.v)}; }

PS_INLINE M16 m_range(int lo, int hi) {
  lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
  hi = hi < 0 ? 0 : hi > 16 ? 16 : hi;
  return {__mmask16(first_lanes(hi) & ~first_lanes(lo))};
}
PS_INLINE M16 m_lt(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PS_INLINE F16 f_select(M16 m, F16 a, F16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }

PS_INLINE I16 i_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
PS_INLINE I16 i_load(const void* p) { return {_mm512_loadu_si512(p)}; }
PS_INLINE I16 i_table(const int8_t* table, I16 nibbles) {  // 16 aligned entries; each byte is below 16
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), nibbles.v)};
}
PS_INLINE I16 i_trits(I16& bytes) {  // see avx2.h
  const __m512i x = bytes.v, one = _mm512_set1_epi8(1);
  bytes.v = _mm512_add_epi8(_mm512_add_epi8(x, x), x);
  const __m512i digits = _mm512_maskz_mov_epi8(_mm512_cmpgt_epi8_mask(x, _mm512_set1_epi8(-43)), one);
  return {_mm512_mask_add_epi8(digits, _mm512_cmpgt_epi8_mask(x, _mm512_set1_epi8(42)), digits, one)};
}
PS_INLINE void i_store(void* p, I16 a) { _mm512_storeu_si512(p, a.v); }
PS_INLINE I16 i_bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
PS_INLINE F16 f_bits(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
PS_INLINE I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PS_INLINE I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PS_INLINE I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
PS_INLINE I16 operator|(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
PS_INLINE I16 i_max(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int n> PS_INLINE I16 i_shl(I16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> PS_INLINE I16 i_srl(I16 a) { return {_mm512_srli_epi32(a.v, n)}; }
template <int n> PS_INLINE I16 i_sra(I16 a) { return {_mm512_srai_epi32(a.v, n)}; }
PS_INLINE F16 f_from_i(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PS_INLINE I16 i_from_f(F16 a) { return {_mm512_cvttps_epi32(a.v)}; }  // whole numbers only

PS_INLINE float f_sum(F16 a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
PS_INLINE float f_hmax(F16 a) {
  __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
PS_INLINE int32_t i_hmax(I16 a) { return _mm512_reduce_max_epi32(a.v); }

PS_INLINE F16 widen_bf16(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
PS_INLINE F16 f_load_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
PS_INLINE F16 f_load_bf16_n(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
PS_INLINE F16 f_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PS_INLINE F16 f_load_f16_n(const uint16_t* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
PS_INLINE F16 widen_i8(__m128i b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))}; }
PS_INLINE F16 f_load_i8(const int8_t* p) { return widen_i8(_mm_loadu_si128((const __m128i*)p)); }
PS_INLINE F16 f_load_i8_n(const int8_t* p, int n) { return widen_i8(_mm_maskz_loadu_epi8(first_lanes(n), p)); }
PS_INLINE void f_store_bf16_n(uint16_t* p, F16 a, int n) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
PS_INLINE void f_store_f16_n(uint16_t* p, F16 a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PS_INLINE void f_store_i8_n(int8_t* p, F16 a, int n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a.v)));
}
// Rounds half to even; x is at most 127, and those below `least` become it.
PS_INLINE void f_store_round_i8_n(int8_t* p, F16 a, int32_t least, int n) {
  const __m512i q = _mm512_max_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(least));
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(q));
}
// p[2 * i] = h[i]; the elements between are unchanged.
PS_INLINE void i_store_halves(uint16_t* p, const uint16_t* h, int n) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)h));
  _mm512_mask_storeu_epi16(p, __mmask32(0x55555555u & (n == 16 ? ~0u : (1u << 2 * n) - 1u)), words);
}

PS_INLINE __m512i four_bytes(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

// vpdpbusd multiplies unsigned by signed: 128 is added to weights, and sums start at the negative of its contribution.
struct W8 { __m512i v; };
PS_INLINE I16 w8_start(int32_t sum) { return {_mm512_set1_epi32(int32_t(-128u * uint32_t(sum)))}; }
PS_INLINE W8 w8_ready(I16 bytes) { return {bytes.v}; }
PS_INLINE W8 w8_load(const uint8_t* p) { return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))}; }
PS_INLINE I16 w8_dot(I16 acc, const W8& w, const int8_t* x) { return {_mm512_dpbusd_epi32(acc.v, w.v, four_bytes(x))}; }

// Dot products of conv_int8.  Unsigned activations are 0 to 127. 128 is added to signed ones, not to the weights,
// because that would need the sum of a window's activations.  Sums start at the negative of its contribution.
template <bool kSigned>
struct Int8Dot {
  static constexpr bool kPairs = false;  // whether two lines together take fewer steps: see avx2.h
  using Weight = I16;
  static PS_INLINE I16 start(const uint8_t* w, int64_t lines) {
    __m512i sum = _mm512_setzero_si512();
    if (kSigned)
      for (int64_t i = 0; i < lines; ++i, w += 64) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), i_load(w).v);
    return {_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7))};
  }
  static PS_INLINE Weight load(const uint8_t* p) { return i_load(p); }
  static PS_INLINE I16 dot(I16 acc, const Weight& w, const int8_t* x) {
    const __m512i q = four_bytes(x);
    return {_mm512_dpbusd_epi32(acc.v, kSigned ? _mm512_xor_si512(q, _mm512_set1_epi8(-128)) : q, w.v)};
  }
};

// The parameters of a group: the step in both halves of each 32-bit lane, the offset in all four bytes.  A nibble times
// a step fits a byte, so 16-bit products are two byte products. `ready`: with the 128 that w8_ready adds.
struct GroupParams { __m512i step, offset; };
PS_INLINE GroupParams w4_group_params(I16 params, int group, bool ready) {
  const __m512i lane = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  const int32_t step = int32_t(0x80008000u) + 0x20002 * group, offset = 0x01010101 + 0x02020202 * group;
  GroupParams r = {_mm512_shuffle_epi8(params.v, _mm512_or_si512(lane, _mm512_set1_epi32(step))),
                   _mm512_shuffle_epi8(params.v, _mm512_add_epi32(lane, _mm512_set1_epi32(offset)))};
  if (ready) r.offset = _mm512_xor_si512(r.offset, _mm512_set1_epi8(-128));
  return r;
}
PS_INLINE I16 dequantize(__m512i nibbles, const GroupParams& group) {
  return {_mm512_add_epi8(_mm512_mullo_epi16(nibbles, group.step), group.offset)};
}
PS_INLINE I16 w4_low(I16 bytes, const GroupParams& group) {
  return dequantize(_mm512_and_si512(bytes.v, _mm512_set1_epi8(15)), group);
}
PS_INLINE I16 w4_high(I16 bytes, const GroupParams& group) {
  return dequantize(_mm512_and_si512(_mm512_srli_epi16(bytes.v, 4), _mm512_set1_epi8(15)), group);
}

struct W4 { __m512i lo, hi; };
using G16 = I16;
PS_INLINE W4 w4_load(const uint8_t* p) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i b = _mm512_loadu_si512(p);
  return {_mm512_and_si512(b, mask), _mm512_and_si512(_mm512_srli_epi16(b, 4), mask)};
}
PS_INLINE G16 w4_zero() { return {_mm512_setzero_si512()}; }
PS_INLINE G16 w4_dot(G16 acc, const W4& w, const int8_t* lo, const int8_t* hi) {
  return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc.v, w.lo, four_bytes(lo)), w.hi, four_bytes(hi))};
}
PS_INLINE I16 w4_sum(G16 acc) { return acc; }

PS_INLINE void keep_order(I16&) {}  // see avx2.h

// Unsigned weights up to 63.
struct U8 { __m512i v; };
using U16 = I16;
PS_INLINE U8 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PS_INLINE U16 u8_zero() { return {_mm512_setzero_si512()}; }
PS_INLINE U16 u8_dot(U16 acc, const U8& w, const int8_t* x) { return {_mm512_dpbusd_epi32(acc.v, w.v, four_bytes(x))}; }
PS_INLINE I16 u8_sum(U16 acc) { return acc; }
PS_INLINE I16 i_mul(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// The sums times a step stored in both 16-bit halves of a lane.
PS_INLINE I16 u8_times(U16 acc, I16 steps) { return i_mul(acc, i_sra<16>(steps)); }
// Multiplies the two 16-bit halves of each lane by two numbers and adds them.
PS_INLINE I16 i_pairs(I16 halves, const int16_t* x) {
  return {_mm512_madd_epi16(halves.v, four_bytes((const int8_t*)x))};
}

PS_INLINE I16 w4_steps(I16 params, int group) {
  return {_mm512_and_si512(_mm512_srli_epi32(params.v, unsigned(16 * group)), _mm512_set1_epi32(255))};
}
// Adds the offsets of two groups times the sums of their activations.
PS_INLINE I16 w4_offsets(I16 acc, I16 params, const int16_t* sums) {
  return {_mm512_dpwssd_epi32(acc.v, _mm512_srai_epi16(params.v, 8), four_bytes((const int8_t*)sums))};
}

PS_INLINE uint64_t wide_sum(const uint8_t* p, int64_t n) {
  __m512i s[4] = {};
  int64_t i = 0;
  for (; i + 256 <= n; i += 256)
    for (int j = 0; j < 4; ++j) s[j] = _mm512_add_epi64(s[j], _mm512_loadu_si512(p + i + 64 * j));
  for (; i + 64 <= n; i += 64) s[0] = _mm512_add_epi64(s[0], _mm512_loadu_si512(p + i));
  s[0] = _mm512_add_epi64(_mm512_add_epi64(s[0], s[1]), _mm512_add_epi64(s[2], s[3]));
  uint64_t lanes[8], sum = 0;  // unsigned: the sum may wrap
  _mm512_storeu_si512(lanes, s[0]);
  for (int j = 0; j < 8; ++j) sum += lanes[j];
  return sum;
}

}  // namespace
}  // namespace ps

#endif
