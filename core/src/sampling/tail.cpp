// Sampling from a graph that ends in argmax or topk: it has chosen already.
#include <math.h>

#include "sampling/sample.h"

namespace ps {
namespace {

struct Greedy {
  const char* name;
  const float* numbers;
  float off;
};

ps_status refuse(const char* name) {
  return fail(PS_UNSUPPORTED, "%s: the graph ends in argmax or topk: it is sampled greedily, and has no logits to give",
              name);
}

}  // namespace

ps_status check_tail(const ps_sampling& s) {
  const Greedy all[] = {{"temperature", s.temperature, 0},
                        {"repetition_penalty", s.repetition_penalty, 1},
                        {"presence_penalty", s.presence_penalty, 0},
                        {"frequency_penalty", s.frequency_penalty, 0}};
  for (const Greedy& one : all) {
    for (int32_t r = 0; one.numbers && r < s.num_rows; ++r) {
      if (one.numbers[r] != one.off) return refuse(one.name);
    }
  }
  if (s.mask) return refuse("mask");
  if (s.bias_starts && s.bias_starts[s.num_rows] > 0) return refuse("bias");
  for (int32_t r = 0; r < s.num_rows; ++r) {
    if (s.target && s.target[r] >= 0) return refuse("target");
    if (s.num_logprobs && s.num_logprobs[r] >= 0) return refuse("num_logprobs");
  }
  return PS_OK;
}

void take_tail(const SampleSource& source, const ps_sampled& out) {
  for (int32_t r = 0; r < source.num_rows; ++r) {
    out.ids[r] = source.ids[static_cast<int64_t>(r) * source.tail_k];
    if (out.logprobs) out.logprobs[r] = NAN;
    if (out.ranks) out.ranks[r] = 0;
    if (out.row_status) out.row_status[r] = PS_ROW_OK;
    for (int32_t i = 0; i < out.num_top; ++i) {
      out.top_ids[static_cast<int64_t>(r) * out.num_top + i] = -1;
      out.top_logprobs[static_cast<int64_t>(r) * out.num_top + i] = NAN;
    }
  }
}

}  // namespace ps
