// Functions of one number over lanes: `unary` of general networks, and the activations fused into other ops.  A fused
// activation has the same bits as the op, because both call unary_value.
#ifndef PENSTOCK_KERNELS_GENERAL_UNARY_H
#define PENSTOCK_KERNELS_GENERAL_UNARY_H

namespace ps {
namespace {

constexpr float kLargest = 3.402823466e+38f;

// Relative error below 2e-7: log(0) is -inf, log of a negative number NaN, NaN stays NaN.
PS_LONG F16 f_log(F16 x) {
  static constexpr float c[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  const F16 one = f_set(1.f), zero = f_set(0.f);
  const M16 tiny = m_lt(x, f_set(1.17549435e-38f));  // below the normal numbers
  const I16 bits = i_bits(f_select(tiny, x * f_set(8388608.f), x));
  F16 e = f_from_i(i_srl<23>(bits) - i_set(126)) - f_select(tiny, f_set(23.f), zero);
  F16 m = f_bits((bits & i_set(0x007fffff)) | i_set(0x3f000000));  // 0.5 <= m < 1
  const M16 low = m_lt(m, f_set(0.707106781186547524f));
  e = e - f_select(low, one, zero);
  m = f_select(low, m + m, m) - one;
  const F16 z = m * m;
  F16 y = f_polynomial(m, c, 9) * m * z;
  y = f_fma(e, f_set(-2.12194440e-4f), y);
  y = f_fma(z, f_set(-0.5f), y);
  F16 r = f_fma(e, f_set(0.693359375f), m + y);
  r = f_select(m_lt(zero, x), r, f_select(m_lt(x, zero), f_set(__builtin_nanf("")), f_set(-kInfinity)));
  return f_select(m_lt(x, f_set(kInfinity)), r, x);
}

PS_INLINE F16 f_copy_sign(F16 x, F16 sign) {
  return f_bits((i_bits(x) & i_set(0x7fffffff)) | (i_bits(sign) & i_set(int32_t(0x80000000u))));
}

// Rounds x to a whole number: nearest with ties to even (0), down (-1), up (1).
PS_INLINE F16 f_whole(F16 x, int direction) {
  const F16 one = f_set(1.f), zero = f_set(0.f);
  F16 r = f_round(x);
  if (direction < 0) r = r - f_select(m_lt(x, r), one, zero);
  if (direction > 0) r = r + f_select(m_lt(r, x), one, zero);
  return f_select(m_lt(f_abs(x), f_set(4194304.f)), f_copy_sign(r, x), x);  // larger ones, infinities and NaN: x
}

PS_INLINE F16 f_whole_to_zero(F16 x) { return f_copy_sign(f_whole(f_abs(x), -1), x); }

PS_INLINE F16 f_sigmoid(F16 x) { return f_set(1.f) / f_one_plus_exp(f_set(0.f) - x); }
PS_INLINE F16 f_hard_sigmoid(F16 x, F16 alpha, F16 beta) {
  return f_min(f_set(1.f), f_max(f_set(0.f), f_fma(alpha, x, beta)));
}
PS_INLINE F16 f_gelu(F16 x) { return (f_set(0.5f) * x) * (f_set(1.f) + f_erf(x * f_set(0.70710678118654752f))); }
PS_INLINE F16 f_gelu_tanh(F16 x) {  // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), which has no cancellation
  const F16 cubic = f_fma(f_set(0.044715f) * x, x * x, x);
  return x / f_one_plus_exp(f_set(-1.5957691216057308f) * cubic);
}
PS_INLINE F16 f_mish(F16 x) {  // tanh(log(1 + e)) = n / (n + 2), where n = e (e + 2)
  const F16 e = f_exp(f_min(f_set(20.f), x)), n = e * (e + f_set(2.f));
  return x * (n / (n + f_set(2.f)));
}
PS_INLINE F16 f_softplus(F16 x) {
  const F16 t = f_exp(f_set(0.f) - f_abs(x));
  const F16 rest = f_select(m_lt(t, f_set(1e-3f)), f_fma(t * t, f_set(-0.5f), t), f_log(f_set(1.f) + t));
  return f_max(f_set(0.f), x) + rest;
}
// A bound of +-FLT_MAX means none, so infinities pass: attributes are finite.
PS_INLINE F16 f_clip(F16 x, F16 low, F16 high) {
  low = f_select(m_lt(f_set(-kLargest), low), low, f_set(-kInfinity));
  high = f_select(m_lt(high, f_set(kLargest)), high, f_set(kInfinity));
  return f_min(high, f_max(low, x));
}

// One kind, known at compile time.
PS_INLINE F16 unary_value(int32_t kind, F16 x, F16 alpha, F16 beta) {
  const F16 zero = f_set(0.f), one = f_set(1.f);
  // clang-format off: a kind a line
  switch (kind) {
    case UNARY_RELU: return f_max(zero, x);
    case UNARY_LEAKY_RELU: return f_select(m_lt(x, zero), alpha * x, x);
    case UNARY_ELU: return f_select(m_lt(x, zero), alpha * (f_exp(x) - one), x);
    case UNARY_SELU: return beta * f_select(m_lt(x, zero), alpha * (f_exp(x) - one), x);
    case UNARY_CELU: return f_select(m_lt(x, zero), alpha * (f_exp(x / alpha) - one), x);
    case UNARY_SIGMOID: return f_sigmoid(x);
    case UNARY_HARD_SIGMOID: return f_hard_sigmoid(x, alpha, beta);
    case UNARY_HARD_SWISH: return x * f_hard_sigmoid(x, f_set(1.f / 6.f), f_set(0.5f));
    case UNARY_SILU: return x / f_one_plus_exp(zero - x);
    case UNARY_MISH: return f_mish(x);
    case UNARY_TANH: return f_tanh(x);
    case UNARY_GELU: return f_gelu(x);
    case UNARY_GELU_TANH: return f_gelu_tanh(x);
    case UNARY_SOFTPLUS: return f_softplus(x);
    case UNARY_SOFTSIGN: return x / (one + f_abs(x));
    case UNARY_THRESHOLDED_RELU: return f_select(m_lt(alpha, x), x, zero);
    case UNARY_ERF: return f_erf(x);
    case UNARY_EXP: return f_exp(x);
    case UNARY_LOG: return f_log(x);
    case UNARY_SQRT: return f_sqrt(x);
    case UNARY_RSQRT: return one / f_sqrt(x);
    case UNARY_RECIPROCAL: return one / x;
    case UNARY_NEG: return f_bits(i_bits(x) + i_set(int32_t(0x80000000u)));
    case UNARY_ABS: return f_abs(x);
    case UNARY_FLOOR: return f_whole(x, -1);
    case UNARY_CEIL: return f_whole(x, 1);
    case UNARY_ROUND: return f_whole(x, 0);
    case UNARY_TRUNC: return f_whole_to_zero(x);
    case UNARY_SIGN: return f_select(m_lt(zero, x), one, f_select(m_lt(x, zero), f_set(-1.f), zero));
    case UNARY_SQUARE: return x * x;
    case UNARY_CLIP: return f_clip(x, alpha, beta);
    default: return x;
  }
  // clang-format on
}

template <int32_t kind>
void map_kind(float alpha, float beta, const float* x, float* y, int64_t n) {
  const F16 a = f_set(alpha), b = f_set(beta);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f_store(y + i, unary_value(kind, f_load(x + i), a, b));
  if (i < n) f_store_n(y + i, unary_value(kind, f_load_n(x + i, int(n - i)), a, b), int(n - i));
}

// y[i] = kind(x[i]).  y may be x.
void map_unary(int32_t kind, float alpha, float beta, const float* x, float* y, int64_t n) {
  switch (kind) {
#define PS_LANES(id, name) \
  case UNARY_##id: return map_kind<UNARY_##id>(alpha, beta, x, y, n);
#define PS_SCALAR(id, name)
#define PS_TEST(id, name)
#include "base/unary_kinds.inc"
    default: return;
  }
}

}  // namespace
}  // namespace ps

#endif
