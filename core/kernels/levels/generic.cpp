// The generic level in plain C++, which runs on every processor.
#include <stddef.h>
#include <stdint.h>

#include "base/kernels.h"
#include "penstock_dev.h"

#ifdef PENSTOCK_GENERIC

#define PS_GENERIC
#include "simd/generic.h"
#include "levels/table.h"

namespace ps {
const Kernels* const kernels_generic = &table;
}

#else

namespace ps {
const Kernels* const kernels_generic = nullptr;
}

#endif
