// The kernels, written over sixteen virtual lanes, and the table of them: included once by each level's
// translation unit, after its lanes.  Everything has internal linkage, so that each level keeps its own copy.
#ifndef PENSTOCK_KERNELS_TABLE_H
#define PENSTOCK_KERNELS_TABLE_H

#include "elementary.h"
#include "norms.h"
#include "activation.h"
#include "rope.h"
#include "reduce.h"
#include "quantize.h"
#include "linear_blocks.h"
#include "linear_float.h"
#include "linear_integer.h"
#include "pairs.h"
#include "kv_pages.h"
#include "attention_partition.h"
#include "attention.h"
#include "pack.h"
#include "embedding.h"
#include "probe.h"

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
constexpr Bf16Kernels kWidened = {linear<LinearFloat<WeightBf16>>, round_rows_bf16, 4, peak, attention, attention_part};

// In the order of LinearScheme, then of Kernels.
constexpr Kernels table_with(const Bf16Kernels& bf16, bool asks_near = false) {
  return {
    kLevel,
    {linear<LinearFloat<WeightF32>>, linear<LinearFloat<WeightF16>>, bf16.linear,
     linear_integer, linear_integer, linear_integer, linear_integer},
    quantize_rows, linear_panel_bytes, bf16.round_rows, bf16.element_bytes, asks_near, embedding, rms_norm, layer_norm, rope,
    rotary_embedding,
    binary<SiluMul>, binary<Add>, binary<Mul>, gelu,
    kv_append, bf16.attention, bf16.attention_part, attention_merge, attention_scratch_bytes,
    argmax, row_max, exp_sum,
    pack, unpack,
    read_bytes, bf16.peak,
  };
}
constexpr Kernels table = table_with(kWidened);

}  // namespace
}  // namespace ps

#endif
