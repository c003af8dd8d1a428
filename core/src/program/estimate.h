// A rough estimate of a step's time: waking other threads does not pay for a short step.
#ifndef PENSTOCK_PROGRAM_ESTIMATE_H
#define PENSTOCK_PROGRAM_ESTIMATE_H

#include "ops/graph.h"
#include "penstock.h"

namespace ps {

// Attention nodes whose queries see equally many keys.
struct AttentionWork {
  int32_t window;    // 0: all
  bool wanted_only;  // only wanted tokens have queries
  double products;   // multiplications per query and key, over all these nodes
};

// The work of a program's steps, computed when it is created.
struct StepWork {
  int64_t token_bytes = 0;  // bytes of weights that one token reads
  Vec<AttentionWork> attention;
};

ps_status find_work(const ps_model& model, StepWork* out);
// Nanoseconds that one thread would take for the last batch.
int64_t estimate_step(const ps_program& program, int64_t num_tokens);

}  // namespace ps

#endif
