// The level that runs everywhere: plain C++.
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "penstock_dev.h"

#ifdef PENSTOCK_GENERIC

#define PS_GENERIC
#include "lanes_generic.h"
#include "table.h"

namespace ps {
const Kernels* const kernels_generic = &table;
}

#else

namespace ps {
const Kernels* const kernels_generic = nullptr;
}

#endif
