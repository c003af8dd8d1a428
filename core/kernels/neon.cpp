// AArch64 with NEON, which every such processor has.
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "penstock_dev.h"

#if defined(__aarch64__) && defined(PENSTOCK_NEON)

#include <arm_neon.h>

#include "lanes_neon.h"
#include "table.h"

namespace ps {
const Kernels* const kernels_neon = &table;
}

#else

namespace ps {
const Kernels* const kernels_neon = nullptr;
}

#endif
