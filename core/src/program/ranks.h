// A step of several ranks: rank 0 sends its batch to the others, and each computes its part.
#ifndef PENSTOCK_PROGRAM_RANKS_H
#define PENSTOCK_PROGRAM_RANKS_H

#include "exchange/exchange.h"
#include "penstock_ranks.h"
#include "program/model.h"

namespace ps {

// A pipeline step that rank 0 has launched but not collected.
struct InFlight {
  int32_t num_tokens, num_requests, num_rows, page_table_width, num_wanted;
  bool has_hidden, best_only;
};

// The state of a program of several ranks between steps. bind.cpp sets up the exchange and the direct parts, and finds
// whether logits are gathered; ranks.cpp writes the rest.
struct RankState {
  Objects<Exchange> exchange;  // empty: the program has no ranks
  Vec<DirectPart> direct_parts;
  bool gathers_head = false;              // logits are gathered from several ranks
  uint64_t steps = 0;                     // that all ranks have run
  bool best_only = false;                 // the last step left best tokens instead of logits (exchange/exchange.h)
  InFlight in_flight[PS_MAX_RANKS] = {};  // oldest first
  int32_t num_in_flight = 0;
};

// Runs a step on this rank and, from rank 0, on the others. `best_only`: ranks exchange only their best tokens instead
// of logits.
ps_status run_on_ranks(ps_program* program, const ps_batch& batch, bool best_only);
// The two parts of a pipeline step.
ps_status launch_program(ps_program* program, const ps_batch& batch, bool best_only);
ps_status collect_program(ps_program* program);
// Computes the next step of rank 0.
ps_status follow_program(ps_program* program);

// Before a step: redirects the operand of the first exchange into its part.
void aim_direct_parts(ps_program* program);
// After a step, and before the next one: a step fails with the first exchange that failed, and so do all later ones.
ps_status check_exchange(ps_program* program);

// The rank that a bundle was cut for, and the maximum bytes of a rank's part of any exchange of its program, batches
// included.  These are the same on every rank.
ps_status describe_rank(const ps_model& model, const ps_program_options& options, ps_rank_info* out);

}  // namespace ps

#endif
