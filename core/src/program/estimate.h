// A rough estimate of the time of a step: waking other threads does not pay for a short one.
#ifndef PENSTOCK_PROGRAM_ESTIMATE_H
#define PENSTOCK_PROGRAM_ESTIMATE_H

#include "ops/graph.h"
#include "penstock.h"

namespace ps {

// Attention nodes whose queries see equally many keys.
struct AttentionWork {
  int32_t window;    // 0: all
  bool wanted_only;  // only wanted tokens have queries
  double products;   // multiplications for a query and a key, over all these nodes
};

// What a program's steps do, found when it is made.
struct StepWork {
  int64_t token_bytes = 0;  // of weights, that one token reads
  Vec<AttentionWork> attention;
};

ps_status find_work(const ps_model& model, StepWork* out);
// Nanoseconds of one thread for the batch that was taken last.
int64_t estimate_step(const ps_program& program, int64_t num_tokens);

}  // namespace ps

#endif
