// Checks of linear on AMX tile registers, on machines that have them.
#ifndef PENSTOCK_KERNEL_CHECK_TILES_H
#define PENSTOCK_KERNEL_CHECK_TILES_H

#include "kernel_check_linear.h"

namespace check {

// bf16 on tile registers: the even and the odd ones of each 32 columns are summed in chains that start at zero, and
// their sum is added (docs/explanation/numerics.md).
inline void check_bf16_tiles(Random& random) {
  const int64_t rows = 21, cols = 103;
  const int32_t m = 19;
  Source s = make_source(PS_BF16, random.normals(rows * cols));
  const Scheme* scheme = kSchemes;
  while (scheme->index != ps::LINEAR_BF16) ++scheme;
  const LinearCase c = {*scheme, rows, cols, pack_rows(ps::kernels_generic, scheme->layout, rows, cols, s, 0), {}};
  const Floats x = random.normals(m * cols);
  for (const ps::Kernels* k : levels()) {
    if (k != ps::kernels_amx) continue;
    const Floats y = run_linear(k, c, x, cols, 0, m, 1000);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t n = 0; n < rows; ++n) {
        float sum = 0.f;
        for (int64_t j = 0; j < cols; j += 32) {
          float chains[2] = {0.f, 0.f};
          for (int64_t e = j; e < j + 32 && e < cols; ++e)
            chains[e % 2] =
                std::fmaf(round_bf16(x[size_t(i * cols + e)]), s.values[size_t(n * cols + e)], chains[e % 2]);
          sum = sum + (chains[0] + chains[1]);
        }
        if (!same_bits(y[size_t(i * (rows + 3) + n)], sum))
          return fail("bf16 on tiles", k->level, "token " + std::to_string(i));
      }
  }
}

// More rows than fit in the L2 cache, which tile registers process in another order: the bits must equal those of
// vectors or, for bf16, which vectors round differently, those of a few rows.
inline void check_many_rows(Random& random) {
  const std::vector<const ps::Kernels*> known = levels();
  if (std::find(known.begin(), known.end(), ps::kernels_amx) == known.end()) return;
  const int64_t rows = 384, cols = 2817;
  const int32_t most = 401;
  for (const Scheme& scheme : kSchemes) {
    if (!scheme.planes && scheme.index != ps::LINEAR_BF16) continue;
    const std::string what = std::string("linear of many rows ") + scheme.name;
    Source s = make_source(PS_F32, random.normals(rows * cols, 0.05f));
    const LinearCase c = {scheme, rows, cols, pack_rows(ps::kernels_generic, scheme.layout, rows, cols, s, 0), {}};
    const Floats x = random.normals(most * cols);
    for (const ps::Kernels* k : levels()) {
      if (k != ps::kernels_amx) continue;
      const Floats all = run_linear(k, c, x, cols, 0, most, 1000);
      if (scheme.planes) expect_same(run_linear(ps::kernels_avx512, c, x, cols, 0, most, 1000), all, what, k->level);
      expect_same(run_linear(k, c, x, cols, 0, most, 7), all, what + " split", k->level);
      const Floats none, gated = run_linear(k, c, x, cols, 0, most, 1000, &none);
      if (scheme.planes)
        expect_same(run_linear(ps::kernels_avx512, c, x, cols, 0, most, 1000, &none), gated, what + " gated", k->level);
      expect_same(run_linear(k, c, x, cols, 0, most, 7, &none), gated, what + " gated, split", k->level);
      for (int64_t i : {0, 211, 400})
        expect_same(run_linear(k, c, x, cols, i, 1, 1000),
                    Floats(all.begin() + i * (rows + 3), all.begin() + i * (rows + 3) + rows), what + " alone",
                    k->level);
    }
  }
}

inline void check_tiles() {
  Random random = {3};
  check_many_rows(random);
  check_bf16_tiles(random);
}

}  // namespace check

#endif
