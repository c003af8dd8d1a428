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
#include "kv_pages.h"
#include "attention.h"
#include "pack.h"
#include "embedding.h"
#include "probe.h"

namespace ps {
namespace {

// In the order of LinearScheme, then of Kernels.
const Kernels table = {
    kLevel,
    {linear<LinearFloat<WeightF32>>, linear<LinearFloat<WeightF16>>, linear<LinearFloat<WeightBf16>>,
     linear_integer, linear_integer, linear_integer, linear_integer},
    quantize_rows, linear_panel_bytes, embedding, rms_norm, layer_norm, rope, rotary_embedding,
    binary<SiluMul>, binary<Add>, binary<Mul>, gelu,
    kv_append, attention, attention_scratch_bytes,
    argmax, row_max, exp_sum,
    pack, unpack,
    read_bytes, peak,
};

}  // namespace
}  // namespace ps

#endif
