// Pairs of bf16 numbers and their dot product, with the same bits at every level: acc = fma(a.high, b.high, acc), then
// acc = fma(a.low, b.low, acc).  That is the order of vdpbf16ps.  The instruction also flushes subnormal operands and
// results to zero, so none may occur: rounding here flushes values below 2^-50.  Every rounded value is then a multiple
// of 2^-57, and every product and sum a multiple of 2^-114 or coarser.
#ifndef PENSTOCK_KERNELS_SIMD_BF16_PAIRS_H
#define PENSTOCK_KERNELS_SIMD_BF16_PAIRS_H

namespace ps {
namespace {

constexpr float kMinHalf = 8.8817841970012523e-16f;  // 2^-50

#ifdef __AVX512BF16__

using Half = uint16_t;  // the stored form of a rounded number, for pair_at

// Stores x rounded and returns what it stored.
PS_INLINE F16 put_half(Half* p, F16 x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(kMinHalf), _CMP_NLT_UQ);
  const __m256i h = _mm256_maskz_mov_epi16(kept, (__m256i)_mm512_cvtneps_pbh(x.v));
  _mm256_storeu_si256((__m256i*)p, h);
  return widen_bf16(h);
}

// The same for x that is 0 or at least 2^-50.
PS_INLINE F16 put_probability(Half* p, F16 x) {
  const __m256i h = (__m256i)_mm512_cvtneps_pbh(x.v);
  _mm256_storeu_si256((__m256i*)p, h);
  return widen_bf16(h);
}

struct Pair { __m512i v; };   // one pair in all lanes
struct Pairs { __m512i v; };  // a pair in each lane

PS_INLINE Pair pair_at(const Half* p) { return {four_bytes((const int8_t*)p)}; }
PS_INLINE Pairs pairs_load(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
// For numbers that are already bf16.
PS_INLINE Pairs pairs_of(F16 low, F16 high) {
  const __m512i top = _mm512_set1_epi32(int32_t(0xffff0000u)), l = _mm512_castps_si512(low.v);
  return {_mm512_ternarylogic_epi32(top, _mm512_castps_si512(high.v), _mm512_srli_epi32(l, 16), 0xca)};
}
PS_INLINE Pairs only_low(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
PS_INLINE Pairs only_high(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(int32_t(0xffff0000u)))}; }
PS_INLINE F16 f_dot(Pairs a, Pair b, F16 acc) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }

#else

using Half = float;

PS_LONG F16 put_half(Half* p, F16 x) {
  const I16 u = i_bits(x), top = i_set(int32_t(0xffff0000u));
  const I16 nearest = (u + ((i_srl<16>(u) & i_set(1)) + i_set(0x7fff))) & top;
  const F16 magnitude = f_abs(x);
  // Doubling keeps infinities and NaNs, and makes NaNs quiet.
  F16 h = f_select(m_lt(magnitude, f_set(kInfinity)), f_bits(nearest), f_bits(i_bits(x + x) & top));
  h = f_select(m_lt(magnitude, f_set(kMinHalf)), f_set(0.f), h);
  f_store(p, h);
  return h;
}

PS_INLINE F16 put_probability(Half* p, F16 x) { return put_half(p, x); }

struct Pair { F16 low, high; };
struct Pairs { F16 low, high; };

PS_INLINE Pair pair_at(const Half* p) { return {f_set(p[0]), f_set(p[1])}; }
PS_INLINE Pairs pairs_load(const uint16_t* p) {
  const I16 words = i_load(p);
  return {f_bits(i_shl<16>(words)), f_bits(words & i_set(int32_t(0xffff0000u)))};
}
PS_INLINE Pairs pairs_of(F16 low, F16 high) { return {low, high}; }
PS_INLINE Pairs only_low(Pairs a) { return {a.low, f_set(0.f)}; }
PS_INLINE Pairs only_high(Pairs a) { return {f_set(0.f), a.high}; }
PS_INLINE F16 f_dot(const Pairs& a, const Pair& b, F16 acc) { return f_fma(a.low, b.low, f_fma(a.high, b.high, acc)); }

#endif

PS_INLINE Pairs pairs_load_n(const uint16_t* p, int n) {
  if (n == 16) return pairs_load(p);
  uint16_t all[32] = {};
  __builtin_memcpy(all, p, size_t(4 * n));
  return pairs_load(all);
}

// Rounds x to bf16 as attention stores keys and values: zero below 2^-50.
PS_LONG F16 f_flush_small(F16 x) { return f_select(m_lt(f_abs(x), f_set(kMinHalf)), f_set(0.f), x); }

}  // namespace
}  // namespace ps

#endif
