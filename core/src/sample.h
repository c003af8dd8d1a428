// From rows of logits to tokens; docs/numerics.md says how.
#ifndef PENSTOCK_SAMPLE_H
#define PENSTOCK_SAMPLE_H

#include "context.h"
#include "memory.h"

namespace ps {

// Ten rounds of Philox4x32.
void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
// Per thread: probabilities and candidates of one row.
int64_t sample_scratch_bytes(int32_t vocab);
ps_status check_sampling(const ps_sampling& sampling, int32_t num_rows, int32_t num_slots);
// logits [num_rows][vocab]; scratch: sample_scratch_bytes for each thread of the context.
ps_status sample_rows(ps_context* context, const float* logits, int32_t vocab, const ps_sampling& sampling,
                      uint8_t* scratch, int32_t* ids, float* logprobs);

}  // namespace ps

#endif
