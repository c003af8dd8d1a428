// Statistics of the inputs of linear and expert_linear nodes, for calibrated quantization.
#ifndef PENSTOCK_OPS_INPUT_SUMS_H
#define PENSTOCK_OPS_INPUT_SUMS_H

#include "ops/ops.h"

namespace ps {

// Where a linear adds its inputs, in the caller's memory: see ps_program_sum_inputs.  Null: off.
struct InputSums {
  double* squares;
  float *maxima, *rows;
  int32_t* experts;  // for expert_linear
};

// These phases run before those of a linear and an expert_linear in a program with PS_PROGRAM_INPUT_SUMS.
extern const Phase kInputSums, kExpertInputSums;

}  // namespace ps

#endif
