// Rotation of rows before they are rounded: each 32 columns times the Hadamard matrix of Sylvester, of ones and minus
// ones, after fixed signs, so that one large value spreads over its block (Ashkboos et al., QuaRot, arXiv 2404.00456).
// The weights are rotated in the same way and multiplied by an eighth when they are packed, which makes the product
// what it was.
#ifndef PENSTOCK_KERNELS_ROWS_HADAMARD_H
#define PENSTOCK_KERNELS_ROWS_HADAMARD_H

namespace ps {
namespace {

// Sums below, differences above: of lanes that are n apart.  The product with a sign is exact, so every level has the
// bits of an addition.
template <int n>
PS_INLINE F16 butterfly(const F16& x) {
  struct Signs {
    float v[16];
    constexpr Signs() : v() {
      for (int i = 0; i < 16; ++i) v[i] = i & n ? -1.f : 1.f;
    }
  };
  static constexpr Signs signs;
  return f_swap<n>(x) + x * f_load(signs.v);
}
// The signs are a bent sequence, which no row of the matrix resembles: inputs that are all positive do not add up in
// one value.  A quarter is near 1 / sqrt(32), and exact: values keep about their size beside columns that are not
// rotated.
constexpr float kQ = 0.25f;
alignas(64) constexpr float kRotationFactors[16] = {kQ, kQ, kQ, -kQ, kQ,  kQ,  kQ,  -kQ,
                                                    kQ, kQ, kQ, -kQ, -kQ, -kQ, -kQ, kQ};
PS_LONG F16 butterflies(const F16& x) {
  return butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(x * f_load(kRotationFactors)))));
}

// y: the blocks of x, rotated, and the columns after the last whole block as they are.  y may be x.
void rotate_row(const float* x, float* y, int64_t cols) {
  int64_t i = 0;
  for (; i + kGroupColumns <= cols; i += kGroupColumns) {
    const F16 a = f_load(x + i), b = f_load(x + i + 16);
    f_store(y + i, butterflies(a + b));
    f_store(y + i + 16, butterflies(a - b));
  }
  for (; i < cols; ++i) y[i] = x[i];
}

}  // namespace
}  // namespace ps

#endif
