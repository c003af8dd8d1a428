// A rough estimate of the time of a step: waking other threads does not pay for a short one.
#ifndef PENSTOCK_PROGRAM_ESTIMATE_H
#define PENSTOCK_PROGRAM_ESTIMATE_H

#include "program/program.h"

namespace ps {

ps_status find_attention(const Graph& graph, Vec<AttentionWork>* out);
// Nanoseconds of one thread for the batch that was taken last.
int64_t estimate_step(const ps_program& program, int64_t num_tokens);

}  // namespace ps

#endif
