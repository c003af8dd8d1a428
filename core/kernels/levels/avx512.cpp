// The AVX-512 level, with VNNI.
// gcc 12 warns about the deliberately undefined operand inside its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <stddef.h>
#include <stdint.h>

#include "levels/amx.h"
#include "levels/avx512_bf16.h"
#include "base/kernels.h"
#include "penstock_dev.h"

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include "simd/avx512.h"
#include "levels/table.h"

namespace ps {
namespace {
int64_t peak_with_bf16(int32_t dtype, int64_t iterations, float* sink) {
  return dtype == PS_BF16 ? peak_bf16_dot(iterations, sink) : peak(dtype, iterations, sink);
}
void attention_with_dots(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  (a.kv.layout == PS_KV_F32 ? attention : attention_bf16_dot)(a, begin, end, scratch);
}
void attention_part_with_dots(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  (a.kv.layout == PS_KV_F32 ? attention_part : attention_part_bf16_dot)(a, begin, end, scratch);
}
constexpr Bf16Kernels kDots = {
    .linear = kBf16 ? linear_bf16_dot : nullptr,
    .round_rows = kBf16 ? round_rows_bf16_dot : nullptr,
    .element_bytes = 2,
    .peak = kBuildsDev ? peak_with_bf16 : nullptr,
    .attention = kAttention ? attention_with_dots : nullptr,
    .attention_part = kAttention ? attention_part_with_dots : nullptr,
};
constexpr Kernels bf16_table = table_with(kDots), short_prefetch_table = table_with(kDots, true);
#ifdef PENSTOCK_AMX
int64_t peak_with_tiles(int32_t dtype, int64_t iterations, float* sink) {
  return dtype == PS_BF16 || dtype == PS_I8 ? peak_amx(dtype, iterations) : peak(dtype, iterations, sink);
}
constexpr Bf16Kernels kTileHalves = {
    .linear = kBf16 ? linear_bf16_amx : nullptr,
    .round_rows = kBf16 ? round_rows_bf16_amx : nullptr,
    .element_bytes = 2,
    .peak = kBuildsDev ? peak_with_tiles : nullptr,
    .attention = kAttention ? attention : nullptr,
    .attention_part = kAttention ? attention_part : nullptr,
};
constexpr IntegerKernels kTileIntegers = {
    .linear = kInteger ? linear_integer_amx : nullptr,
    .quantize_rows = kInteger ? quantize_rows_amx : nullptr,
    .panel_bytes = linear_panel_bytes_amx,
};
constexpr Kernels amx_table = table_with(kTileHalves, false, kTileIntegers, "amx");
#endif
}  // namespace

void store_bf16_dot(const LinearArgs& a, int64_t row, int64_t tile, int m, int n, float* v) {
  F16* y = (F16*)v;
  if (a.gated) store_gated(a, row, tile, m, n, y, y + 1);
  else store_block(a, row, tile, m, n, y);
}

int64_t prefetch_distance_bf16_dot(const LinearArgs& a, int64_t products, int64_t far) {
  return prefetch_distance(a, products, far);
}

const Kernels* const kernels_avx512 = &table;
const Kernels* const kernels_avx512_bf16 = &bf16_table;
const Kernels* const kernels_avx512_short_prefetch = &short_prefetch_table;
#ifdef PENSTOCK_AMX
const Kernels* const kernels_amx = &amx_table;
#else
const Kernels* const kernels_amx = nullptr;
#endif
}  // namespace ps

#else

namespace ps {
const Kernels* const kernels_avx512 = nullptr;
const Kernels* const kernels_avx512_bf16 = nullptr;
const Kernels* const kernels_avx512_short_prefetch = nullptr;
const Kernels* const kernels_amx = nullptr;
}  // namespace ps

#endif
