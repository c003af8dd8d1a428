// Rotation of rows before rounding: each 32 columns are multiplied by fixed signs and then by Sylvester's Hadamard
// matrix (entries 1 and -1), which spreads a large value over its block (Ashkboos et al., QuaRot, arXiv 2404.00456).
// Packing rotates the weights in the same way and multiplies them by an eighth, so the product is unchanged.
#ifndef PENSTOCK_KERNELS_ROWS_HADAMARD_H
#define PENSTOCK_KERNELS_ROWS_HADAMARD_H

namespace ps {
namespace {

// One butterfly: sums in the lower lanes, differences in the upper, of lanes n apart.  The product with a sign is
// exact, so every level gets the bits of a plain addition.
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
// The signs are a bent sequence, which resembles no row of the matrix: inputs that are all positive do not add up in
// one value.  A quarter is close to 1 / sqrt(32) and exact: rotated values keep about the magnitude of columns that are
// not rotated.
constexpr float kQ = 0.25f;
alignas(64) constexpr float kRotationFactors[16] = {kQ, kQ, kQ, -kQ, kQ,  kQ,  kQ,  -kQ,
                                                    kQ, kQ, kQ, -kQ, -kQ, -kQ, -kQ, kQ};
PS_LONG F16 hadamard_of_lanes(const F16& x) { return butterfly<1>(butterfly<2>(butterfly<4>(butterfly<8>(x)))); }
PS_INLINE F16 butterflies(const F16& x) { return hadamard_of_lanes(x * f_load(kRotationFactors)); }

// y: the rotated blocks of x; columns after the last whole block are copied. y may be x.
void rotate_row(const float* x, float* y, int64_t cols) {
  int64_t i = 0;
  for (; i + kGroupColumns <= cols; i += kGroupColumns) {
    const F16 a = f_load(x + i), b = f_load(x + i + 16);
    f_store(y + i, butterflies(a + b));
    f_store(y + i + 16, butterflies(a - b));
  }
  for (; i < cols; ++i) y[i] = x[i];
}

// The rotation of a head for KV pages of int4: blocks of the largest power of two that is left, at least 16 columns,
// each times signs and the Hadamard matrix of its size, orthonormal.  The fewer than 16 columns that are left stay as
// they are.
PS_INLINE int64_t rotation_block(int64_t cols) {
  int64_t n = 16;
  while (2 * n <= cols) n *= 2;
  return n;
}
// What 16 columns of a block are multiplied by beside kRotationFactors: its signs are a bent sequence too where there
// are 4 or 16 times 16.
PS_INLINE F16 rotation_factor(int64_t n, int64_t i) {
  float factor = kRotationFactors[i / 16 % 16] < 0.f ? -1.f : 1.f;
  for (; n >= 64; n /= 4) factor *= 0.5f;
  return f_set(n == 32 ? factor * 0.707106781f : factor);
}
// Sums and differences of the columns of a block that are 16 or more apart.
inline void add_far_columns(float* y, int64_t n) {
  for (int64_t apart = 16; apart < n; apart *= 2)
    for (int64_t i = 0; i < n; i = (i + 16) & apart ? i + 16 + apart : i + 16) {
      const F16 a = f_load(y + i), b = f_load(y + i + apart);
      f_store(y + i, a + b);
      f_store(y + i + apart, a - b);
    }
}
// y may be x.
inline void rotate_head(const float* x, float* y, int64_t dim) {
  int64_t at = 0;
  for (int64_t n; dim - at >= 16; at += n) {
    n = rotation_block(dim - at);
    for (int64_t i = 0; i < n; i += 16) f_store(y + at + i, butterflies(f_load(x + at + i)) * rotation_factor(n, i));
    add_far_columns(y + at, n);
  }
  for (; at < dim; ++at) y[at] = x[at];
}
inline void restore_head(float* y, int64_t dim) {
  for (int64_t at = 0, n; dim - at >= 16; at += n) {
    n = rotation_block(dim - at);
    add_far_columns(y + at, n);
    for (int64_t i = at; i < at + n; i += 16)
      f_store(y + i, hadamard_of_lanes(f_load(y + i)) * f_load(kRotationFactors) * rotation_factor(n, i - at));
  }
}

}  // namespace
}  // namespace ps

#endif
