// All kernels over sixteen virtual lanes, and their table.  Each level includes this once, after its SIMD header.
// Everything has internal linkage, so that each level has its own copy.
#ifndef PENSTOCK_KERNELS_LEVELS_TABLE_H
#define PENSTOCK_KERNELS_LEVELS_TABLE_H

#include "base/build.h"
#include "base/tiles.h"
#include "simd/elementary.h"
#include "rows/norms.h"
#include "rows/activation.h"
#include "general/unary.h"
#include "general/binary.h"
#include "rows/rope.h"
#include "rows/reduce.h"
#include "general/softmax.h"
#include "rows/quantize.h"
#include "rows/hadamard.h"
#include "linear/store_lines.h"
#include "linear/blocks.h"
#include "linear/float32.h"
#include "general/windows.h"
#include "general/conv_int8.h"
#include "general/window_table.h"
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

// The bf16 kernels, which differ between machines of the same level.
struct Bf16Kernels {
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  void (*round_rows)(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out, int64_t begin,
                     int64_t end);
  int64_t element_bytes;
  int64_t (*peak)(int32_t dtype, int64_t iterations, float* sink);
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  void (*attention_part)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
};
constexpr bool kBf16 = builds_scheme("bf16");
// Ops that multiply panels of values.
constexpr bool kPanels = builds_op("matmul") || builds_op("sdpa") || builds_op("lstm") || builds_op("gru");
constexpr bool kRotated = builds_scheme("w8a8_h32") || builds_scheme("w4a8_h32");
constexpr bool kInteger =
    builds_scheme("w8a16") || builds_scheme("w8a8") || builds_scheme("w4a16") || builds_scheme("w4a8") || kRotated;
constexpr bool kAttention = builds_attention();
// Fused activations use the kinds of `unary`.
constexpr bool kActivations = builds_op("unary") || builds_op("chain") || builds_op("conv") || builds_op("conv_int8") ||
                              builds_op("conv_transpose") || builds_op("conv_winograd") || builds_op("sdpa");
#define PS_BLOCKS(id, name, ...) || builds_scheme(#name)
constexpr bool kBlocks = false
#include "base/block_schemes.inc"
    ;
constexpr Bf16Kernels kWidened = {
    .linear = kBf16 ? linear<LinearFloat<WeightBf16>> : nullptr,
    .round_rows = kBf16 ? round_rows_bf16 : nullptr,
    .element_bytes = 4,
    .peak = kBuildsDev ? peak : nullptr,
    .attention = kAttention ? attention : nullptr,
    .attention_part = kAttention ? attention_part : nullptr,
};

// The level's integer kernels; AMX has its own.
struct IntegerKernels {
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout,
                        const QuantizedRows& out, int64_t begin, int64_t end);
  int64_t (*panel_bytes)(int32_t layout, int64_t cols, int64_t m, int32_t planes);
};
constexpr IntegerKernels kVectors = {
    .linear = kInteger ? linear_integer : nullptr,
    .quantize_rows = kInteger ? quantize_rows : nullptr,
    .panel_bytes = linear_panel_bytes,
};

// Null where a build leaves a kernel out (base/build.h).
constexpr Kernels table_with(const Bf16Kernels& bf16, bool short_prefetch = false,
                             const IntegerKernels& integers = kVectors, const char* level = kLevel) {
  Kernels kernels = {
      .level = level,
      .linear = {},  // below
      .quantize_rows = integers.quantize_rows,
      .rotate_row = kRotated ? rotate_row : nullptr,
      .quantize_groups = kBlocks ? quantize_groups : nullptr,
      .linear_panel_bytes = integers.panel_bytes,
      .round_rows_bf16 = bf16.round_rows,
      .bf16_bytes = bf16.element_bytes,
      .short_prefetch = short_prefetch,
      .embedding = builds_op("embedding") || builds_op("sharded_embedding") ? embedding : nullptr,
      .rms_norm = builds_op("rms_norm") || builds_op("add_rms_norm") ? rms_norm : nullptr,
      .layer_norm = builds_op("layer_norm") ? layer_norm : nullptr,
      .rope = builds_op("rope") ? rope : nullptr,
      .rotary_embedding = builds_op("rotary_embedding") ? rotary_embedding : nullptr,
#define PS_UNARY(id, name, ...) .name = builds_op(#name) ? unary<name##_value> : nullptr,
#define PS_BINARY(id, name, ...) .name = builds_op(#name) ? binary<name##_value> : nullptr,
#define PS_SCALED(id, name, ...) .name = builds_op(#name) ? scaled<name##_value> : nullptr,
#include "base/elementwise_ops.inc"
      .gelu = builds_op("gelu") ? gelu : nullptr,
      .clamped_swiglu = builds_op("clamped_swiglu") ? clamped_swiglu : nullptr,
      .scale_channels = builds_op("scale_channels") ? binary<mul_value> : nullptr,
      .scale_all = builds_op("scale_channels") ? scaled<scale_value> : nullptr,
      .match_rms = builds_op("match_rms") ? match_rms : nullptr,
      .gaussian_topk = builds_op("gaussian_topk") ? gaussian_topk : nullptr,
      .kv_append = builds_op("kv_append") ? kv_append : nullptr,
      .attention = bf16.attention,
      .attention_part = bf16.attention_part,
      .attention_merge = kAttention ? attention_merge : nullptr,
      .attention_scratch_bytes = attention_scratch_bytes,
      .short_conv = builds_op("short_conv") ? short_conv : nullptr,
      .gated_delta = builds_op("gated_delta") || builds_op("gated_delta_tiled") ? gated_delta : nullptr,
      .ssm_scan = builds_op("ssm_scan") ? ssm_scan : nullptr,
      .latent_append = builds_op("latent_append") ? latent_append : nullptr,
      .argmax = argmax,
      .max = row_max,
      .exp_sum = exp_sum,
      .map_unary = kActivations ? map_unary : nullptr,
      .map_binary = builds_op("binary") || builds_op("chain") || kPanels ? map_binary : nullptr,
      .softmax = builds_op("softmax") ? softmax_items : nullptr,
      .reduce = builds_op("reduce") ? reduce_any : nullptr,
      .windows = kWindows,
      .pack = kBuildsDev ? pack : nullptr,
      .unpack = kBuildsDev ? unpack : nullptr,
      .read_bytes = kBuildsDev ? read_bytes : nullptr,
      .peak = bf16.peak,
  };
  kernels.linear[LINEAR_F32] = builds_scheme("f32") || kPanels ? linear<LinearFloat<WeightF32>> : nullptr;
  kernels.linear[LINEAR_F16] = builds_scheme("f16") ? linear<LinearFloat<WeightF16>> : nullptr;
  kernels.linear[LINEAR_BF16] = bf16.linear;
  kernels.linear[LINEAR_W8A16] = kernels.linear[LINEAR_W8A8] = integers.linear;
  kernels.linear[LINEAR_W4A16] = kernels.linear[LINEAR_W4A8] = integers.linear;
  kernels.linear[LINEAR_W8A8_H32] = kernels.linear[LINEAR_W4A8_H32] = integers.linear;
#define PS_BLOCKS(id, ...) kernels.linear[LINEAR_##id] = kBlocks ? linear_blocks : nullptr;
#include "base/block_schemes.inc"
  return kernels;
}
constexpr Kernels table = table_with(kWidened);

}  // namespace
}  // namespace ps

#endif
