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

}  // namespace ps

#endif
