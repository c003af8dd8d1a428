// The kinds of elementwise ops by name.
#ifndef PENSTOCK_ARRAYS_KINDS_H
#define PENSTOCK_ARRAYS_KINDS_H

#include "ops/ops.h"

namespace ps {

// -1: no kind has this name
int32_t find_unary_kind(Str name);
int32_t find_binary_kind(Str name);
// Computed by Kernels::map_unary and map_binary.
bool is_lanes_unary(int32_t kind);
bool is_lanes_binary(int32_t kind);
bool is_test(int32_t unary_kind);         // the result is bool
bool is_comparison(int32_t binary_kind);  // the result is bool
bool is_bits(int32_t binary_kind);        // for integers and bool

// Sets act->i to the kind of a fused activation: a kind over lanes, or UNARY_NONE for "none".
ps_status parse_activation(AttrValue* act);

// Applies a kind that is computed one element at a time through double: the same bits on every machine.
void scalar_unary(int32_t kind, const float* x, float* y, int64_t n);
void scalar_binary(int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y, int64_t n);
// Applies any kind to floats.
void float_binary(const Kernels& kernels, int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step,
                  float* y, int64_t n);

}  // namespace ps

#endif
