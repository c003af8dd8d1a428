// A step of several ranks: its batch goes from rank 0 to the others, and each computes its part.
#ifndef PENSTOCK_PROGRAM_RANKS_H
#define PENSTOCK_PROGRAM_RANKS_H

#include "exchange/exchange.h"
#include "penstock_ranks.h"
#include "program/model.h"

namespace ps {

// A step of a pipeline that rank 0 has launched and not collected.
struct InFlight {
  int32_t num_tokens, num_requests, num_rows, page_table_width, num_wanted;
  bool has_hidden, best_only;
};

// What a program of several ranks keeps between steps.  bind.cpp makes the exchange and the direct parts, and finds
// whether logits are gathered; ranks.cpp writes the rest.
struct RankState {
  Objects<Exchange> exchange;  // none: the program has no ranks
  Vec<DirectPart> direct_parts;
  bool gathers_head = false;              // logits are brought together from several ranks
  uint64_t steps = 0;                     // that all ranks have run
  bool best_only = false;                 // the last step left best tokens instead of logits (exchange/exchange.h)
  InFlight in_flight[PS_MAX_RANKS] = {};  // the oldest first
  int32_t num_in_flight = 0;
};

// Runs a step on this rank, and where it is rank 0 on the others.  `best_only`: ranks need not bring logits together,
// only their best tokens.
ps_status run_on_ranks(ps_program* program, const ps_batch& batch, bool best_only);
// The two parts of a step of a pipeline.
ps_status launch_program(ps_program* program, const ps_batch& batch, bool best_only);
ps_status collect_program(ps_program* program);
// Computes the step that rank 0 runs next.
ps_status follow_program(ps_program* program);

// Before a step: nodes store what the first exchange sends straight into its part.
void aim_direct_parts(ps_program* program);
// After a step, and before the next one: a step fails with the first exchange that failed, and so do all later ones.
ps_status check_exchange(ps_program* program);

// The rank that a bundle was cut for, and the most bytes of a rank's part of any exchange of its program, batches
// included: these are the same on every rank.
ps_status describe_rank(const ps_model& model, const ps_program_options& options, ps_rank_info* out);

}  // namespace ps

#endif
