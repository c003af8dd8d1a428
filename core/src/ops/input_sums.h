// Sums over the inputs of linear nodes, for quantization with data.
#ifndef PENSTOCK_OPS_INPUT_SUMS_H
#define PENSTOCK_OPS_INPUT_SUMS_H

#include "ops/ops.h"

namespace ps {

// Where a linear adds its inputs, in the caller's memory: ps_program_sum_inputs.  Null: nowhere.
struct InputSums {
  double* squares;
  float *maxima, *rows;
};

// Runs before the phases of a linear in a program with PS_PROGRAM_INPUT_SUMS.
extern const Phase kInputSums;

}  // namespace ps

#endif
