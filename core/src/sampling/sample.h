// Sampling: rows of logits to tokens and log-probabilities, as docs/explanation/numerics.md specifies.
#ifndef PENSTOCK_SAMPLING_SAMPLE_H
#define PENSTOCK_SAMPLING_SAMPLE_H

#include "base/memory.h"
#include "threads/context.h"

namespace ps {

// The value of a slot without a token: nothing was sampled in it, or its row failed.
constexpr int32_t kEmptySlot = -1, kFailedSlot = -2;

// The logits or ids to sample from.
struct SampleSource {
  const float* logits;  // [num_rows][vocab]
  int32_t num_rows, vocab;
  const int32_t* slots;  // [num_slots]: the token last sampled in each, kEmptySlot or kFailedSlot
  int32_t num_slots;
  const int32_t* ids;  // [num_rows][tail_k]: output of a graph that ends in argmax or topk; null: it ends in logits
  int32_t tail_k;
};

// Ten rounds of Philox4x32.
void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
// Per thread; zero before the first use.
int64_t sample_scratch_bytes(int32_t vocab);
// Checks every number in the arrays, but not the logits.
ps_status check_sampling(const ps_sampling& sampling, const SampleSource& source);
ps_status check_sampled(const ps_sampling& sampling, const ps_sampled& out, const SampleSource& source);
// For a graph that ends in argmax or topk: refuses everything but greedy sampling by name.
ps_status check_tail(const ps_sampling& sampling);
// Takes the ids that such a graph computed.
void take_tail(const SampleSource& source, const ps_sampled& out);
// Call after both checks. scratch: sample_scratch_bytes for each thread of the context.
ps_status sample_rows(ps_context* context, const SampleSource& source, const ps_sampling& sampling, uint8_t* scratch,
                      const ps_sampled& out);

}  // namespace ps

#endif
