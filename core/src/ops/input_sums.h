// Sums over the inputs of linear and expert_linear nodes, for quantization with data.
#ifndef PENSTOCK_OPS_INPUT_SUMS_H
#define PENSTOCK_OPS_INPUT_SUMS_H

#include "ops/ops.h"

namespace ps {

// Where a linear adds its inputs, in the caller's memory: ps_program_sum_inputs.  Null: nowhere.
struct InputSums {
  double* squares;
  float *maxima, *rows;
  int32_t* experts;  // of expert_linear
};

// They run before the phases of a linear, and of an expert_linear, in a program with PS_PROGRAM_INPUT_SUMS.
extern const Phase kInputSums, kExpertInputSums;

}  // namespace ps

#endif
