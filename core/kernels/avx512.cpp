// AVX-512 with VNNI.
// gcc 12 takes the deliberately undefined operand inside its own intrinsics for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"
#include "penstock.h"

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include "lanes_avx512.h"
#include "table.h"

namespace ps {
const Kernels* const kernels_avx512 = &table;
}

#else

namespace ps {
const Kernels* const kernels_avx512 = nullptr;
}

#endif
