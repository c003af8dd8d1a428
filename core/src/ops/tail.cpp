// The phases of argmax and topk over rows of logits, the ops that may end a graph.
// Hot: runs in every step.
#include "ops/ops.h"
#include "ops/top.h"

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

void run_topk(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  Candidate* const best = reinterpret_cast<Candidate*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = f32(c.in[0]) + r * c.in[0].row_stride;
    const int64_t num_best = take_best(x, c.in[0].dims[1], c.attrs[kTopkK].i, best);
    for (int64_t i = 0; i < num_best; ++i) {
      f32(c.out[0])[r * c.out[0].row_stride + i] = x[best[i].id];
      i32(c.out[1])[r * c.out[1].row_stride + i] = best[i].id;
    }
  }
}

constexpr Phase kArgmax = {
    .split = SPLIT_ROWS, .items = rows, .run = run_argmax, .reads_rows = operands(0), .writes_outputs = true};
constexpr Phase kTopk = {
    .split = SPLIT_ROWS, .items = rows, .run = run_topk, .reads_rows = operands(0), .writes_outputs = true};

}  // namespace

Phases argmax_phases(const Call&) { return Phases{&kArgmax, 1}; }
Phases topk_phases(const Call&) { return Phases{&kTopk, 1}; }
ps_status topk_scratch(const Call& c, Scratch* out) {
  out->per_thread = c.attrs[kTopkK].i * static_cast<int64_t>(sizeof(Candidate));  // k is at most the number of columns
  return PS_OK;
}

}  // namespace ps
