// Sums over the inputs of linear nodes, for quantization with data.
// Hot: runs for every token of a calibration.
#include "ops/input_sums.h"

#include <math.h>
#include <string.h>

namespace ps {
namespace {

constexpr int64_t kColumnsAtOnce = 16;

int64_t sum_blocks(const Call& c) {
  return c.in[0].dims[0] ? (c.in[0].dims[1] + kColumnsAtOnce - 1) / kColumnsAtOnce : 0;
}

// An item has some columns of all rows, so each sum has one order of additions on any number of threads.
void run_sums(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!c.input_sums) return;
  const InputSums& sums = *c.input_sums;
  const Tensor& x = c.in[0];
  const int64_t cols = x.dims[1], first = begin * kColumnsAtOnce;
  const int64_t last = end * kColumnsAtOnce < cols ? end * kColumnsAtOnce : cols;
  for (int64_t t = 0; t < x.dims[0]; ++t) {
    const float* const row = reinterpret_cast<const float*>(x.data) + t * x.row_stride;
    for (int64_t k = first; sums.squares && k < last; ++k) sums.squares[k] += double{row[k]} * double{row[k]};
    for (int64_t k = first; sums.maxima && k < last; ++k) {
      const float magnitude = fabsf(row[k]);
      if (!(magnitude <= sums.maxima[k])) sums.maxima[k] = magnitude;  // a NaN stays
    }
    if (sums.rows) memcpy(sums.rows + t * cols + first, row + first, static_cast<size_t>(last - first) * sizeof(float));
  }
}

}  // namespace

const Phase kInputSums = {.split = SPLIT_ITEMS, .items = sum_blocks, .run = run_sums, .reads_all = operands(0)};

}  // namespace ps
