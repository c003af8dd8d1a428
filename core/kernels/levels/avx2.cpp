// The AVX2 level, with FMA and F16C.
#include <stddef.h>
#include <stdint.h>

#include "base/kernels.h"
#include "penstock_dev.h"

#ifdef __AVX2__

#include <immintrin.h>

#include "simd/avx2.h"
#include "levels/table.h"

namespace ps {
const Kernels* const kernels_avx2 = &table;
}

#else

namespace ps {
const Kernels* const kernels_avx2 = nullptr;
}

#endif
