// All kernels over sixteen virtual lanes, and their table.  Each level includes this once, after its SIMD header.
// Everything has internal linkage, so that each level has its own copy.
#ifndef PENSTOCK_KERNELS_LEVELS_TABLE_H
#define PENSTOCK_KERNELS_LEVELS_TABLE_H

#include "base/build.h"
#include "base/tiles.h"
#include "simd/elementary.h"
#include "rows/norms.h"
#include "rows/activation.h"
#include "rows/rope.h"
#include "rows/reduce.h"
#include "rows/quantize.h"
#include "linear/store_lines.h"
#include "linear/blocks.h"
#include "linear/float32.h"
#include "linear/integer.h"
#include "simd/bf16_pairs.h"
#include "attention/kv_pages.h"
#include "attention/short_conv.h"
#include "attention/gated_delta.h"
#include "attention/ssm_scan.h"
#include "attention/partition.h"
#include "attention/attention.h"
#include "linear/pack.h"
#include "linear/blocks_gguf.h"
#include "linear/blocks_rows.h"
#include "linear/embedding.h"
#include "levels/probe.h"

namespace ps {
namespace {

// What a level does with bf16, which not every machine of the level does alike.
struct Bf16Kernels {
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  void (*round_rows)(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out, int64_t begin,
                     int64_t end);
  int64_t element_bytes;
  int64_t (*peak)(int32_t dtype, int64_t iterations, float* sink);
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  void (*attention_part)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
};
constexpr bool kBf16 = builds_scheme("bf16"), kAttention = builds_op("attention") || builds_op("sink_attention") ||
                                                           builds_op("latent_attention") ||
                                                           builds_op("relative_attention");
constexpr bool kInteger =
    builds_scheme("w8a16") || builds_scheme("w8a8") || builds_scheme("w4a16") || builds_scheme("w4a8");
#define PS_BLOCKS(id, name, ...) || builds_scheme(#name)
constexpr bool kBlocks = false
#include "base/block_schemes.inc"
    ;
constexpr Bf16Kernels kWidened = {kBf16 ? linear<LinearFloat<WeightBf16>> : nullptr,
                                  kBf16 ? round_rows_bf16 : nullptr,
                                  4,
                                  kBuildsDev ? peak : nullptr,
                                  kAttention ? attention : nullptr,
                                  kAttention ? attention_part : nullptr};

// And with integers.
struct IntegerKernels {
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout,
                        const QuantizedRows& out, int64_t begin, int64_t end);
  int64_t (*panel_bytes)(int32_t layout, int64_t cols, int64_t m, int32_t planes);
};
constexpr IntegerKernels kVectors = {kInteger ? linear_integer : nullptr, kInteger ? quantize_rows : nullptr,
                                     linear_panel_bytes};

// In the order of LinearScheme, then of Kernels; null where a build leaves it out (base/build.h).
constexpr Kernels table_with(const Bf16Kernels& bf16, bool short_prefetch = false,
                             const IntegerKernels& integers = kVectors, const char* level = kLevel) {
  return {
      level,
      {
          builds_scheme("f32") ? linear<LinearFloat<WeightF32>> : nullptr,
          builds_scheme("f16") ? linear<LinearFloat<WeightF16>> : nullptr,
          bf16.linear,
          integers.linear,
          integers.linear,
          integers.linear,
          integers.linear,
#define PS_BLOCKS(...) kBlocks ? linear_blocks : nullptr,
#include "base/block_schemes.inc"
      },
      integers.quantize_rows,
      kBlocks ? quantize_groups : nullptr,
      integers.panel_bytes,
      bf16.round_rows,
      bf16.element_bytes,
      short_prefetch,
      builds_op("embedding") ? embedding : nullptr,
      builds_op("rms_norm") || builds_op("add_rms_norm") ? rms_norm : nullptr,
      builds_op("layer_norm") ? layer_norm : nullptr,
      builds_op("rope") ? rope : nullptr,
      builds_op("rotary_embedding") ? rotary_embedding : nullptr,
#define PS_UNARY(id, name, ...) builds_op(#name) ? unary<name##_value> : nullptr,
#define PS_BINARY(id, name, ...) builds_op(#name) ? binary<name##_value> : nullptr,
#define PS_SCALED(id, name, ...) builds_op(#name) ? scaled<name##_value> : nullptr,
#include "base/elementwise_ops.inc"
      builds_op("gelu") ? gelu : nullptr,
      builds_op("clamped_swiglu") ? clamped_swiglu : nullptr,
      builds_op("scale_channels") ? binary<mul_value> : nullptr,
      builds_op("scale_channels") ? scaled<scale_value> : nullptr,
      builds_op("match_rms") ? match_rms : nullptr,
      builds_op("gaussian_topk") ? gaussian_topk : nullptr,
      builds_op("kv_append") ? kv_append : nullptr,
      bf16.attention,
      bf16.attention_part,
      kAttention ? attention_merge : nullptr,
      attention_scratch_bytes,
      builds_op("short_conv") ? short_conv : nullptr,
      builds_op("gated_delta") ? gated_delta : nullptr,
      builds_op("ssm_scan") ? ssm_scan : nullptr,
      builds_op("latent_append") ? latent_append : nullptr,
      argmax,
      row_max,
      exp_sum,
      kBuildsDev ? pack : nullptr,
      kBuildsDev ? unpack : nullptr,
      kBuildsDev ? read_bytes : nullptr,
      bf16.peak,
  };
}
constexpr Kernels table = table_with(kWidened);

}  // namespace
}  // namespace ps

#endif
