// The batch of a step on its way from rank 0 to the other ranks.
#ifndef PENSTOCK_PROGRAM_RANKS_H
#define PENSTOCK_PROGRAM_RANKS_H

#include "program/program.h"

namespace ps {

// A step begins on rank 0.
ps_status check_first_rank(const ps_program& program);
// On rank 0: sends the batch that the program has taken, and prepares its exchanges.
ps_status send_batch(ps_program* program, const ps_batch& batch);
// Tells the exchanges of the step whether it has hidden rows, and logits or only best tokens.
void note_kinds(ps_program* program);
// On another rank: waits for the next batch, whose arrays lie in the comm's memory until the step's first exchange.
ps_status receive_batch(ps_program* program, ps_batch* batch);
// The same of a step that every rank runs (PS_BATCH_ALL_RANKS): ends the group if the batch of rank 0 is not `own`,
// which the program has taken.
ps_status receive_same_batch(ps_program* program, const ps_batch& own);

// The rank that a bundle was cut for, and the most bytes of a rank's part of any exchange of its program, batches
// included: these are the same on every rank.
ps_status describe_rank(const ps_model& model, const ps_program_options& options, ps_rank_info* out);

}  // namespace ps

#endif
