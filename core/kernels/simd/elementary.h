// exp, tanh and erf over lanes, sin and cos over scalars: polynomials that give the same bits at every level.
#ifndef PENSTOCK_KERNELS_SIMD_ELEMENTARY_H
#define PENSTOCK_KERNELS_SIMD_ELEMENTARY_H

namespace ps {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kRoundMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even

// |x| < 2^22.  Gives +0 for values that round to -0, as every level does.
PS_LONG F16 f_round(F16 x) { return (x + f_set(kRoundMagic)) - f_set(kRoundMagic); }

// 2^n for whole n in [-126, 127]; any finite number for a NaN.
PS_LONG F16 f_pow2(F16 n) {
  I16 i = i_bits(n + f_set(kRoundMagic)) - i_set(0x4b400000 - 127);
  return f_bits(i_shl<23>(i));
}

PS_INLINE F16 f_nan_to_zero(F16 x) { return f_max(x, f_set(0.f)) + f_min(x, f_set(0.f)); }

struct ExpParts {
  F16 mantissa, exponent;  // exp(x) = mantissa * 2^exponent
};
PS_INLINE ExpParts exp_parts(F16 x) {
  F16 n = f_round(x * f_set(1.44269504088896341f));
  F16 r = f_fma(n, f_set(-0.693359375f), x);
  r = f_fma(n, f_set(2.12194440e-4f), r);
  F16 p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  return {f_fma(p, r * r, r) + f_set(1.f), n};
}

// Relative error below 1.5e-7; exp(0) is 1, exp(-inf) is 0, NaN stays NaN.
PS_LONG F16 f_exp(F16 x) {
  const ExpParts e = exp_parts(f_min(f_set(89.f), f_max(f_set(-105.f), x)));  // a NaN second operand stays
  F16 half = f_round(e.exponent * f_set(0.5f));                               // two steps reach subnormals and infinity
  return (e.mantissa * f_pow2(half)) * f_pow2(e.exponent - half);
}

// 1 + exp(x), with the bits of the sum of the two: one step reaches infinity, and a subnormal exp(x) does not change
// it.
PS_LONG F16 f_one_plus_exp(F16 x) {
  const ExpParts e = exp_parts(f_min(f_set(89.f), f_max(f_set(-87.f), x)));  // n from -126 to 128
  return (e.mantissa + e.mantissa) * f_pow2(e.exponent - f_set(1.f)) + f_set(1.f);
}

// 2^x for x <= 0, relative error below 2.5e-7: 2^0 is 1, values below 2^-50 are 0, NaN stays NaN.
PS_LONG F16 f_exp2_negative(F16 x) {
  const F16 shifted = x + f_set(kRoundMagic);
  const F16 f = x - (shifted - f_set(kRoundMagic));
  F16 p = f_set(1.326472731e-3f);
  p = f_fma(p, f, f_set(9.671512991e-3f));
  p = f_fma(p, f, f_set(5.550733581e-2f));
  p = f_fma(p, f, f_set(2.402224243e-1f));
  p = f_fma(p, f, f_set(6.931470037e-1f));
  p = f_fma(p, f, f_set(1.f));
  const F16 scale = f_bits(i_shl<23>(i_bits(shifted)) + i_set(0x3f800000));
  return f_select(m_lt(x, f_set(-50.f)), f_set(0.f), p * scale);
}

PS_LONG F16 f_polynomial(F16 x, const float* c, int n) {
  F16 p = f_set(c[0]);
  for (int i = 1; i < n; ++i) p = f_fma(p, x, f_set(c[i]));
  return p;
}

PS_LONG F16 f_tanh(F16 x) {
  static constexpr float num[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                                  5.12229709037114e-08f,  1.48572235717979e-05f, 6.37261928875436e-04f,
                                  4.89352455891786e-03f};
  static constexpr float den[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                                  4.89352518554385e-03f};
  x = f_min(f_set(7.90531110763549805f), f_max(f_set(-7.90531110763549805f), x));
  F16 s = x * x;
  return (x * f_polynomial(s, num, 7)) / f_polynomial(s, den, 4);
}

PS_LONG F16 f_erf(F16 x) {
  static constexpr float num[] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
                                  -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                                  -1.60960333262415e-02f};
  static constexpr float den[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                                  -7.37332916720468e-03f, -1.42647390514189e-02f};
  x = f_min(f_set(4.f), f_max(f_set(-4.f), x));
  F16 s = x * x;
  return (x * f_polynomial(s, num, 7)) / f_polynomial(s, den, 5);
}

// Accurate for |x| up to about 2^20: pi/2 is subtracted in two parts, the first short enough to multiply exactly.
// Plain double arithmetic.
PS_INLINE void sin_cos(double x, double* sine, double* cosine) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  double shifted = x * 6.36619772367581382433e-01 + magic;
  double n = shifted - magic;
  int64_t quadrant;
  __builtin_memcpy(&quadrant, &shifted, 8);
  double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
  double z = r * r;
  double s = -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10;
  s = -1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 + z * s);
  s = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * s));
  double c = 2.08757232129817482790e-09 + z * -1.13596475577881948265e-11;
  c = 2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07 + z * c);
  c = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * c));
  double a = (quadrant & 1) ? c : s, b = (quadrant & 1) ? s : c;
  *sine = (quadrant & 2) ? -a : a;
  *cosine = ((quadrant + 1) & 2) ? -b : b;
}

}  // namespace
}  // namespace ps

#endif
