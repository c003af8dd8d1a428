// A program: a model with the memory that its steps use.
#ifndef PENSTOCK_PROGRAM_H
#define PENSTOCK_PROGRAM_H

#include <atomic>

#include "base/build.h"
#include "ops/input_sums.h"
#include "program/batch.h"
#include "program/estimate.h"
#include "program/network_memory.h"
#include "program/plan.h"
#include "program/ranks.h"
#include "program/spans.h"

namespace ps {

// The state that the last step leaves (execute.cpp).
struct LastStep {
  int64_t symbols[NUM_ROLES + 1] = {-1, -1, -1, -1, -1};
  bool behind_prefix = false;  // it skipped the encoder's nodes
  int32_t num_rows = -1;       // -1: there is no last step
  uint64_t stamp = 0;          // of the first share of the next step
};

// Everything that depends on a program's limits.  Each part is written by the file that its struct names.
struct ProgramMemory {
  ps_program_options options;
  uint32_t flags = 0;  // PS_PROGRAM_*
  Plan plan;
  Region temporaries, scratch, kv, logits;
  uint8_t *thread_scratch = nullptr, *sample_scratch = nullptr;  // inside scratch (bind.cpp)
  BoundSteps bound;
  StepWork work;
  BatchCopy batch;
  LastStep last;
  StepSpans spans;
  Vec<InputSums> input_sums;  // of each node of the graph, with PS_PROGRAM_INPUT_SUMS
  RankState ranks;
};

}  // namespace ps

// Keeps its model and context alive.
struct ps_program : ps::Held, ps::ProgramMemory {
  ps_model* model = nullptr;
  ps_context* context = nullptr;
  ps::NetworkMemory network;                // of a general network
  mutable std::atomic<bool> in_use{false};  // by a call

  ps_program() = default;
  ps_program(const ps_program&) = delete;
  ps_program& operator=(const ps_program&) = delete;
  ~ps_program() {
    ps::let_go(model);
    ps::let_go(context);
  }
};

namespace ps {

// A build without penstock_dev.h has none of the flags, and the compiler removes their code. has_ranks: the program
// belongs to a rank.
inline bool has_ranks(const ProgramMemory& program) { return kBuildsRanks && program.ranks.exchange.get(); }
inline bool has_flag(const ProgramMemory& program, uint32_t flag) { return kBuildsDev && (program.flags & flag); }
// The number of best tokens per row after a step that computes only best tokens.
inline int32_t best_parts(const ps_context& context) { return context.links ? 1 : context.comm->world; }
// `flags` are PS_PROGRAM_*, as in ps_program_create_flagged.
ps_status create_program(ps_model* model, ps_context* context, const ps_program_options* options, uint32_t flags,
                         ps_program** out);
int64_t max_table_width(const Graph& graph);
ps_status bind_program(ps_program* program);  // after its memory is allocated
// Appends the phases of a node with a bound call to the program's steps.
ps_status push_steps(ps_program* program, const Node& node, bool gated, const Call* call);
// After the last step: sets up shared chunks, and what steps know of each other.
ps_status link_steps(ps_program* program);
// Decides which steps begin with a barrier.
ps_status place_barriers(ps_program* program);
// Returns the failure of an op with its node, if one failed.
ps_status check_failure(const ps_program& program);
// `best_only`: ranks exchange only their best tokens instead of logits.
ps_status run_program(ps_program* program, const ps_batch& batch, bool best_only = false);
// Runs the step of the batch that was taken. `start_ns`: its begin, for the spans.
ps_status run_taken(ps_program* program, const ps_batch& batch, int64_t start_ns);
void walk_steps(void* program, int32_t thread, WalkSlot* slot, int64_t at);
void walk_steps_timed(void* program, int32_t thread, WalkSlot* slot, int64_t at);  // recording spans
ps_span label_span(const ps_program& program, int64_t step, int32_t thread);       // node, phase and thread

}  // namespace ps

#endif
