// AVX2 with FMA and F16C.
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "penstock_dev.h"

#ifdef __AVX2__

#include <immintrin.h>

#include "lanes_avx2.h"
#include "table.h"

namespace ps {
const Kernels* const kernels_avx2 = &table;
}

#else

namespace ps {
const Kernels* const kernels_avx2 = nullptr;
}

#endif
