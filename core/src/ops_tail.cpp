// What may end a graph: argmax and topk over rows of logits.
#include "ops.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
int32_t* i32(const Tensor& t) { return reinterpret_cast<int32_t*>(t.data); }
int64_t rows(const Call& c) { return c.in[0].dims[0]; }

void run_argmax(const Call& c, int64_t begin, int64_t end, int32_t) {
  for (int64_t r = begin; r < end; ++r) {
    i32(c.out[0])[r] = c.kernels->argmax(f32(c.in[0]) + r * c.in[0].row_stride, c.in[0].dims[1]);
  }
}

// By insertion, best first, the smaller index first among equals.
void top_of_row(const float* x, int64_t n, int64_t k, float* values, int32_t* indices) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (found == k && !(x[i] > values[k - 1])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && x[i] > values[at - 1]; --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = x[i];
    indices[at] = static_cast<int32_t>(i);
  }
}

void run_topk(const Call& c, int64_t begin, int64_t end, int32_t) {
  for (int64_t r = begin; r < end; ++r) {
    top_of_row(f32(c.in[0]) + r * c.in[0].row_stride, c.in[0].dims[1], c.attrs[0].i,
               f32(c.out[0]) + r * c.out[0].row_stride, i32(c.out[1]) + r * c.out[1].row_stride);
  }
}

constexpr Phase kArgmax = {SPLIT_ROWS, rows, run_argmax, 1, 0, true, false, false, false, false};
constexpr Phase kTopk = {SPLIT_ROWS, rows, run_topk, 1, 0, true, false, false, false, false};

}  // namespace

Phases argmax_phases(const Call&) { return Phases{&kArgmax, 1}; }
Phases topk_phases(const Call&) { return Phases{&kTopk, 1}; }

}  // namespace ps
