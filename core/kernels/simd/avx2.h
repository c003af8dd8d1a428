// Sixteen lanes in two AVX2 registers; integer dot products by exact vpmaddubsw.
#ifndef PENSTOCK_KERNELS_SIMD_AVX2_H
#define PENSTOCK_KERNELS_SIMD_AVX2_H

#include "base/half.h"

namespace ps {
namespace {

constexpr const char* kLevel = "avx2";
constexpr int kFloatM = 6, kFloatN = 1, kIntRows = 4, kIntTiles = 1, kGroupRows = 4, kQueries = 2;
constexpr bool kHalfTiles = true;  // whether eight lanes of a tile cost less than sixteen
// Attention: queries and vectors of dimensions that weigh values together, queries x pages that score together.
constexpr int kWeighQueries = 2, kWeighColumns = 2, kScoreChains = 2;

struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };
using M16 = F16;

#define PS_BOTH(op, x, y) {op(x.a, y.a), op(x.b, y.b)}

PS_INLINE __m256i lane_indices() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
PS_INLINE I16 first_lanes(int n) {
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_indices()),
          _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane_indices())};
}

PS_INLINE F16 f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PS_INLINE F16 f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PS_INLINE F16 f_load_n(const float* p, int n) {
  I16 m = first_lanes(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
PS_INLINE void f_store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PS_INLINE void f_store_n(float* p, F16 x, int n) {
  if (n == 16) return f_store(p, x);  // a masked store takes ten times as long on some processors
  I16 m = first_lanes(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
PS_INLINE void f_store_half(float* p, F16 x) { _mm256_storeu_ps(p, x.a); }
PS_INLINE F16 operator+(F16 x, F16 y) { return PS_BOTH(_mm256_add_ps, x, y); }
PS_INLINE F16 operator-(F16 x, F16 y) { return PS_BOTH(_mm256_sub_ps, x, y); }
PS_INLINE F16 operator*(F16 x, F16 y) { return PS_BOTH(_mm256_mul_ps, x, y); }
PS_INLINE F16 operator/(F16 x, F16 y) { return PS_BOTH(_mm256_div_ps, x, y); }
PS_INLINE F16 f_fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
PS_INLINE F16 f_max(F16 x, F16 y) { return PS_BOTH(_mm256_max_ps, x, y); }
PS_INLINE F16 f_min(F16 x, F16 y) { return PS_BOTH(_mm256_min_ps, x, y); }
PS_INLINE F16 f_sqrt(F16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
template <int n> PS_INLINE F16 f_swap(F16 x) {  // each lane gets the value of the lane n away
  if constexpr (n == 8) return {x.b, x.a};
  else if constexpr (n == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  else return {_mm256_permute_ps(x.a, n == 2 ? 0x4e : 0xb1), _mm256_permute_ps(x.b, n == 2 ? 0x4e : 0xb1)};
}
PS_INLINE F16 f_abs(F16 x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

PS_INLINE M16 m_range(int lo, int hi) {
  I16 l = first_lanes(lo), h = first_lanes(hi);
  return {_mm256_castsi256_ps(_mm256_andnot_si256(l.a, h.a)), _mm256_castsi256_ps(_mm256_andnot_si256(l.b, h.b))};
}
PS_INLINE M16 m_lt(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
PS_INLINE F16 f_select(M16 m, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
}

PS_INLINE I16 i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PS_INLINE I16 i_load(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
PS_INLINE I16 i_table(const int8_t* table, I16 nibbles) {  // 16 aligned entries; each byte is below 16
  const __m256i t = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, nibbles.a), _mm256_shuffle_epi8(t, nibbles.b)};
}
// Takes the leading base-3 digit, 0, 1 or 2, of each byte, which is a signed number in units of 1 / 256 whose digits
// count from -1; `bytes` becomes the remainder.
PS_INLINE I16 i_trits(I16& bytes) {
  const __m256i low = _mm256_set1_epi8(-43), high = _mm256_set1_epi8(42), zero = _mm256_setzero_si256();
  const I16 x = bytes;
  bytes = {_mm256_add_epi8(_mm256_add_epi8(x.a, x.a), x.a), _mm256_add_epi8(_mm256_add_epi8(x.b, x.b), x.b)};
  const I16 above = {_mm256_sub_epi8(zero, _mm256_cmpgt_epi8(x.a, low)),
                     _mm256_sub_epi8(zero, _mm256_cmpgt_epi8(x.b, low))};
  return {_mm256_sub_epi8(above.a, _mm256_cmpgt_epi8(x.a, high)),
          _mm256_sub_epi8(above.b, _mm256_cmpgt_epi8(x.b, high))};
}
PS_INLINE void i_store(void* p, I16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
PS_INLINE I16 i_bits(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
PS_INLINE F16 f_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PS_INLINE I16 operator+(I16 x, I16 y) { return PS_BOTH(_mm256_add_epi32, x, y); }
PS_INLINE I16 operator-(I16 x, I16 y) { return PS_BOTH(_mm256_sub_epi32, x, y); }
PS_INLINE I16 operator&(I16 x, I16 y) { return PS_BOTH(_mm256_and_si256, x, y); }
PS_INLINE I16 operator|(I16 x, I16 y) { return PS_BOTH(_mm256_or_si256, x, y); }
PS_INLINE I16 i_max(I16 x, I16 y) { return PS_BOTH(_mm256_max_epi32, x, y); }
template <int n> PS_INLINE I16 i_shl(I16 x) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
template <int n> PS_INLINE I16 i_srl(I16 x) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
template <int n> PS_INLINE I16 i_sra(I16 x) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
PS_INLINE F16 f_from_i(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PS_INLINE I16 i_from_f(F16 x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }  // whole numbers only

PS_INLINE float f_sum(F16 x) {
  __m256 b = _mm256_add_ps(x.a, x.b);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
PS_INLINE float f_hmax(F16 x) {
  __m256 b = _mm256_max_ps(x.a, x.b);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
PS_INLINE int32_t i_hmax(I16 x) {
  int32_t v[16];
  i_store(v, x);
  int32_t m = v[0];
  for (int i = 1; i < 16; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

PS_INLINE F16 f_load_bf16(const uint16_t* p) {
  __m128i lo = _mm_loadu_si128((const __m128i*)p), hi = _mm_loadu_si128((const __m128i*)p + 1);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
}
PS_INLINE F16 f_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
PS_INLINE F16 f_load_i8(const int8_t* p) {
  __m128i b = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
// AVX2 masks neither 16-bit nor 8-bit loads: a tail goes through a small buffer.
PS_INLINE F16 f_load_bf16_n(const uint16_t* p, int n) {
  if (n == 16) return f_load_bf16(p);
  uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_bf16(t);
}
PS_INLINE F16 f_load_f16_n(const uint16_t* p, int n) {
  if (n == 16) return f_load_f16(p);
  uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_f16(t);
}
PS_INLINE F16 f_load_i8_n(const int8_t* p, int n) {
  if (n == 16) return f_load_i8(p);
  if (n == 8)
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))), _mm256_setzero_ps()};
  int8_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return f_load_i8(t);
}
PS_INLINE __m256i bf16_words(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
PS_INLINE void f_store_bf16_n(uint16_t* p, F16 x, int n) {
  __m256i w = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_words(x.a), bf16_words(x.b)), 0xd8);
  if (n == 16) return _mm256_storeu_si256((__m256i*)p, w);
  uint16_t t[16];
  _mm256_storeu_si256((__m256i*)t, w);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
PS_INLINE void f_store_f16_n(uint16_t* p, F16 x, int n) {
  uint16_t t[16];
  _mm_storeu_si128((__m128i*)t, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)t + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  if (n == 16) __builtin_memcpy(p, t, 32);
  else
    for (int i = 0; i < n; ++i) p[i] = t[i];
}
PS_INLINE void f_store_i8_n(int8_t* p, F16 x, int n) {
  I16 q = i_from_f(x);
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xd8);
  __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  if (n == 16) return _mm_storeu_si128((__m128i*)p, b);
  int8_t t[16];
  _mm_storeu_si128((__m128i*)t, b);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
// Rounds half to even; x is at most 127, and those below `least` become it.
PS_INLINE void f_store_round_i8_n(int8_t* p, F16 x, int32_t least, int n) {
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  b = _mm_max_epi8(_mm_shuffle_epi32(b, 0xd8), _mm_set1_epi8(int8_t(least)));
  if (n == 16) return _mm_storeu_si128((__m128i*)p, b);
  if (n == 8) return _mm_storel_epi64((__m128i*)p, b);
  int8_t t[16];
  _mm_storeu_si128((__m128i*)t, b);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
// p[2 * i] = h[i]; the elements between are unchanged.
PS_INLINE void i_store_halves(uint16_t* p, const uint16_t* h, int n) {
  for (int i = 0; i < n; ++i) p[2 * i] = h[i];
}

PS_INLINE __m256i four_bytes(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Forces gcc to add to the sum here.  Otherwise it moves the additions to the end of an unrolled loop and spills every
// product to memory.
PS_INLINE void keep_order(I16& sum) { __asm__("" : "+x"(sum.a), "+x"(sum.b)); }

// |w| * sign(x, w) = w * x, and 2 * 128 * 127 fits 16 bits, for w from -128 and x from -127: no saturation.
struct W8 { __m256i a, b, abs_a, abs_b; };
PS_INLINE I16 w8_start(int32_t) { return i_set(0); }
PS_INLINE W8 w8_load(const uint8_t* p) {
  I16 w = i_load(p);
  return {w.a, w.b, _mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)};
}
PS_INLINE I16 w8_dot(I16 acc, const W8& w, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i q = four_bytes(x);
  __m256i a = _mm256_maddubs_epi16(w.abs_a, _mm256_sign_epi8(q, w.a));
  __m256i b = _mm256_maddubs_epi16(w.abs_b, _mm256_sign_epi8(q, w.b));
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, ones))};
}

PS_INLINE W8 w8_ready(I16 bytes) { return {bytes.a, bytes.b, _mm256_abs_epi8(bytes.a), _mm256_abs_epi8(bytes.b)}; }

// Dot products of conv_int8.  Unsigned activations are 0 to 127: 2 * 127 * 128 fits 16 bits.  With most weights the
// products of two lines fit too, and are added in 16 bits.
template <bool kSigned>
struct Int8Dot {
  static constexpr bool kPairs = true;
  using Weight = I16;
  static PS_INLINE I16 start(const uint8_t*, int64_t) { return i_set(0); }
  static PS_INLINE Weight load(const uint8_t* p) { return i_load(p); }
  static PS_INLINE I16 add(I16 acc, __m256i a, __m256i b) {
    const __m256i ones = _mm256_set1_epi16(1);
    acc = {_mm256_add_epi32(acc.a, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, ones))};
    keep_order(acc);
    return acc;
  }
  // The magnitudes are those of weights, which may be -128; x never is.
  static PS_INLINE __m256i products(__m256i w, __m256i x) {
    return kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(x, w);
  }
  static PS_INLINE I16 dot(I16 acc, const Weight& w, const int8_t* x) {
    const __m256i q = four_bytes(x);
    return add(acc, products(w.a, q), products(w.b, q));
  }
  static PS_INLINE I16 dot_pair(I16 acc, const Weight& w, const Weight& next, const int8_t* x) {
    const __m256i q = four_bytes(x), r = four_bytes(x + 4);
    return add(acc, _mm256_add_epi16(products(w.a, q), products(next.a, r)),
               _mm256_add_epi16(products(w.b, q), products(next.b, r)));
  }
  // Whether, for all pairs of lines 2 i and 2 i + 1, 127 times the magnitudes that a 16-bit lane adds fits.
  static bool fits_pairs(const uint8_t* w, int64_t lines) {
    const __m256i ones = _mm256_set1_epi8(1), limit = _mm256_set1_epi16(32767 / 127);
    __m256i over = _mm256_setzero_si256();
    for (int64_t i = 0; i + 2 <= lines; i += 2, w += 128) {
      for (int half = 0; half < 64; half += 32) {
        const __m256i even = _mm256_abs_epi8(_mm256_loadu_si256((const __m256i*)(w + half)));
        const __m256i odd = _mm256_abs_epi8(_mm256_loadu_si256((const __m256i*)(w + 64 + half)));
        const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(even, ones), _mm256_maddubs_epi16(odd, ones));
        over = _mm256_or_si256(over, _mm256_cmpgt_epi16(sum, limit));
      }
    }
    return _mm256_testz_si256(over, over);
  }
};

// The parameters of a group: the step in both halves of each 32-bit lane, the offset in all four bytes.  A nibble times
// a step fits a byte, so 16-bit products are two byte products.
struct GroupParams { I16 step, offset; };
PS_INLINE GroupParams w4_group_params(I16 params, int group, bool) {
  const __m256i lane = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i step = _mm256_or_si256(lane, _mm256_set1_epi32(int32_t(0x80008000u) + 0x20002 * group));
  const __m256i offset = _mm256_add_epi32(lane, _mm256_set1_epi32(0x01010101 + 0x02020202 * group));
  return {{_mm256_shuffle_epi8(params.a, step), _mm256_shuffle_epi8(params.b, step)},
          {_mm256_shuffle_epi8(params.a, offset), _mm256_shuffle_epi8(params.b, offset)}};
}
PS_INLINE I16 dequantize(I16 nibbles, const GroupParams& group) {
  const __m256i a = _mm256_mullo_epi16(nibbles.a, group.step.a), b = _mm256_mullo_epi16(nibbles.b, group.step.b);
  return {_mm256_add_epi8(a, group.offset.a), _mm256_add_epi8(b, group.offset.b)};
}
PS_INLINE I16 w4_low(I16 bytes, const GroupParams& group) { return dequantize(bytes & i_set(0x0f0f0f0f), group); }
PS_INLINE I16 w4_high(I16 bytes, const GroupParams& group) {
  return dequantize(i_srl<4>(bytes) & i_set(0x0f0f0f0f), group);
}

// A 16-bit lane adds eight products of u4 and s8: 8 * 2 * 15 * 127 = 30480 fits.
struct W4 { __m256i lo_a, lo_b, hi_a, hi_b; };
using G16 = I16;
PS_INLINE W4 w4_load(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi8(15);
  I16 w = i_load(p);
  return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask), _mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}
PS_INLINE G16 w4_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PS_INLINE G16 w4_dot(G16 acc, const W4& w, const int8_t* lo, const int8_t* hi) {
  __m256i l = four_bytes(lo), h = four_bytes(hi);
  __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(w.lo_a, l), _mm256_maddubs_epi16(w.hi_a, h));
  __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(w.lo_b, l), _mm256_maddubs_epi16(w.hi_b, h));
  return {_mm256_add_epi16(acc.a, a), _mm256_add_epi16(acc.b, b)};
}
PS_INLINE I16 w4_sum(G16 acc) {
  const __m256i ones = _mm256_set1_epi16(1);
  return I16{_mm256_madd_epi16(acc.a, ones), _mm256_madd_epi16(acc.b, ones)};
}

// Unsigned weights up to 63: a 16-bit lane takes two products a line, of eight lines up to 15 (8 * 2 * 15 * 127 =
// 30480), of four up to 31 (31496), of two up to 63 (32004).
struct U8 { __m256i a, b; };
using U16 = I16;
PS_INLINE U8 u8_load(const uint8_t* p) {
  const I16 w = i_load(p);
  return {w.a, w.b};
}
PS_INLINE U16 u8_zero() { return w4_zero(); }
PS_INLINE U16 u8_dot(U16 acc, const U8& w, const int8_t* x) {
  const __m256i q = four_bytes(x);
  acc = {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, q)), _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, q))};
  keep_order(acc);
  return acc;
}
PS_INLINE I16 u8_sum(U16 acc) { return w4_sum(acc); }
PS_INLINE I16 i_mul(I16 x, I16 y) { return PS_BOTH(_mm256_mullo_epi32, x, y); }
// The sums times a step stored in both 16-bit halves of a lane.
PS_INLINE I16 u8_times(U16 acc, I16 steps) { return PS_BOTH(_mm256_madd_epi16, acc, steps); }
// Multiplies the two 16-bit halves of each lane by two numbers and adds them.
PS_INLINE I16 i_pairs(I16 halves, const int16_t* x) {
  const __m256i pair = four_bytes((const int8_t*)x);
  return {_mm256_madd_epi16(halves.a, pair), _mm256_madd_epi16(halves.b, pair)};
}

PS_INLINE I16 w4_steps(I16 params, int group) {
  const __m128i shift = _mm_cvtsi32_si128(16 * group);
  return I16{_mm256_srl_epi32(params.a, shift), _mm256_srl_epi32(params.b, shift)} & i_set(255);
}
// Adds the offsets of two groups times the sums of their activations.
PS_INLINE I16 w4_offsets(I16 acc, I16 params, const int16_t* sums) {
  const __m256i pair = four_bytes((const int8_t*)sums);
  return acc + I16{_mm256_madd_epi16(_mm256_srai_epi16(params.a, 8), pair),
                   _mm256_madd_epi16(_mm256_srai_epi16(params.b, 8), pair)};
}

PS_INLINE uint64_t wide_sum(const uint8_t* p, int64_t n) {
  __m256i s[4] = {};
  int64_t i = 0;
  for (; i + 128 <= n; i += 128)
    for (int j = 0; j < 4; ++j) s[j] = _mm256_add_epi64(s[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 2; ++j) s[j] = _mm256_add_epi64(s[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
  uint64_t v[4];
  _mm256_storeu_si256((__m256i*)v, _mm256_add_epi64(_mm256_add_epi64(s[0], s[1]), _mm256_add_epi64(s[2], s[3])));
  return v[0] + v[1] + v[2] + v[3];
}

#undef PS_BOTH

}  // namespace
}  // namespace ps

#endif
