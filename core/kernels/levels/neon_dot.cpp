// The NEON level with byte dot products (FEAT_DotProd, Armv8.2 and later).
#include <stddef.h>
#include <stdint.h>

#include "base/kernels.h"
#include "penstock_dev.h"

#if defined(__aarch64__) && defined(PENSTOCK_NEON_DOT)

#include <arm_neon.h>

#include "simd/neon.h"
#include "levels/table.h"

namespace ps {
const Kernels* const kernels_neon_dot = &table;
}

#else

namespace ps {
const Kernels* const kernels_neon_dot = nullptr;
}

#endif
