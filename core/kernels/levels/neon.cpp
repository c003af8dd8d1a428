// The NEON level, which runs on every AArch64 processor.
#include <stddef.h>
#include <stdint.h>

#include "base/kernels.h"
#include "penstock_dev.h"

#if defined(__aarch64__) && defined(PENSTOCK_NEON)

#include <arm_neon.h>

#include "simd/neon.h"
#include "levels/table.h"

namespace ps {
const Kernels* const kernels_neon = &table;
}

#else

namespace ps {
const Kernels* const kernels_neon = nullptr;
}

#endif
