// Statistics of the inputs of linear and expert_linear nodes, for calibrated quantization.
// Hot: runs for every token of a calibration.
#include "ops/input_sums.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace ps {
namespace {

constexpr int64_t kColumnsAtOnce = 16;

int64_t columns(const Tensor& x) { return x.dims[x.rank - 1]; }

int64_t sum_blocks(const Call& c) {
  return c.in[0].dims[0] ? (columns(c.in[0]) + kColumnsAtOnce - 1) / kColumnsAtOnce : 0;
}

// Adds the columns from `first` to `last` of a row to the sums that begin at `at`.
void add_row(const InputSums& sums, const float* row, int64_t at, int64_t first, int64_t last) {
  for (int64_t k = first; sums.squares && k < last; ++k) sums.squares[at + k] += double{row[k]} * double{row[k]};
  for (int64_t k = first; sums.maxima && k < last; ++k) {
    const float magnitude = fabsf(row[k]);
    if (!(magnitude <= sums.maxima[at + k])) sums.maxima[at + k] = magnitude;  // NaN propagates
  }
}

// An item has some columns of all rows, so the order of additions does not depend on the number of threads.
void run_sums(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!c.input_sums) return;
  const InputSums& sums = *c.input_sums;
  const Tensor& x = c.in[0];
  const int64_t cols = x.dims[1], first = begin * kColumnsAtOnce;
  const int64_t last = end * kColumnsAtOnce < cols ? end * kColumnsAtOnce : cols;
  for (int64_t t = 0; t < x.dims[0]; ++t) {
    const float* const row = reinterpret_cast<const float*>(x.data) + t * x.row_stride;
    add_row(sums, row, 0, first, last);
    if (sums.rows) memcpy(sums.rows + t * cols + first, row + first, static_cast<size_t>(last - first) * sizeof(float));
  }
}

// Each expert has its own sums. x [T, cols] is the input of all experts of a token; x [T, k, cols] has one per expert.
void run_expert_sums(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!c.input_sums) return;
  const InputSums& sums = *c.input_sums;
  const Tensor& x = c.in[0];
  const int64_t cols = columns(x), slots = c.in[kExpertIds].dims[1], own_rows = x.rank == 3 ? slots : 1;
  const int64_t first = begin * kColumnsAtOnce, last = std::min(end * kColumnsAtOnce, cols);
  const int32_t* const ids = reinterpret_cast<const int32_t*>(c.in[kExpertIds].data);
  if (sums.experts && !begin) memcpy(sums.experts, ids, static_cast<size_t>(x.dims[0] * slots) * sizeof(int32_t));
  for (int64_t i = 0; i < x.dims[0] * slots; ++i) {
    const int64_t own = i % slots % own_rows, token = i / slots;
    const float* const row = reinterpret_cast<const float*>(x.data) + token * x.row_stride + own * cols;
    add_row(sums, row, ids[i] * cols, first, last);
    if (sums.rows && i % slots < own_rows) {
      float* const copy = sums.rows + (token * own_rows + own) * cols;
      memcpy(copy + first, row + first, static_cast<size_t>(last - first) * sizeof(float));
    }
  }
}

}  // namespace

const Phase kInputSums = {.split = SPLIT_ITEMS, .items = sum_blocks, .run = run_sums, .reads_all = operands(0)};
const Phase kExpertInputSums = {
    .split = SPLIT_ITEMS, .items = sum_blocks, .run = run_expert_sums, .reads_all = operands(0, kExpertIds)};

}  // namespace ps
