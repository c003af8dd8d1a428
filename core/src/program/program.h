// A program: a model with the memory that its steps use.
#ifndef PENSTOCK_PROGRAM_H
#define PENSTOCK_PROGRAM_H

#include <atomic>

#include "base/build.h"
#include "ops/loaded.h"
#include "ops/ops.h"
#include "passes/fuse.h"
#include "program/batch.h"
#include "program/estimate.h"
#include "program/model.h"
#include "program/ranks.h"
#include "program/spans.h"
#include "passes/wanted_rows.h"
#include "threads/context.h"

namespace ps {

// The memory plan, made only from limits, before anything is allocated.
struct Plan {
  int64_t symbols[NUM_ROLES + 1];  // the most of each that a step may have; kWantedTokens is the last
  Vec<RunNode> nodes;              // as the program runs them
  Vec<int32_t> order;              // in which it runs them
  WantedSources sources;           // of its wanted-only nodes
  Vec<int64_t> offsets;            // of each value's root in the temporaries; -1: elsewhere
  Vec<int64_t> sizes;              // bytes of each value's root in the temporaries
  int64_t temporary_bytes, logits_bytes, kv_bytes, kv_page_bytes;
  // The parts of the scratch memory, each 64-byte aligned, in this order.
  int64_t shared_scratch, thread_scratch, sample_scratch;  // the latter two once per thread
  int64_t batch_bytes, owner_bytes, slot_bytes;
  int64_t scratch_bytes;
  uint64_t used_groups;        // bit g: page group g has states.  A file has at most 64 groups
  Vec<int32_t> group_pages;    // of each page group
  Vec<int64_t> state_offsets;  // bytes into the KV memory, of each state
};

ps_status make_plan(const ps_model& model, const ps_context& context, const ps_program_options& options, Plan* out);

// A phase of a node, bound to its memory.
struct Step {
  const Call* call;
  void (*run)(const Call&, int64_t begin, int64_t end, int32_t thread);
  int64_t items, grain;
  Split split;
  bool barrier;              // all threads finish what came before
  const uint8_t* weights;    // that the items read in order, else null
  int64_t weight_bytes;      // of the first half when the other is read beside it
  int64_t second_half;       // bytes from the first to it; 0: all is one
  const Step* next_weights;  // the next step, itself included, that has weights
};

// The number of chunks that are taken of one thread's share of a step.  The stamp names the step and only grows: a
// share needs no reset, and a thread that arrives late finds nothing left.
struct alignas(64) Share {
  std::atomic<uint64_t> taken;  // stamp << 16 | chunks
};

struct Patch {  // a size of a step inside a call
  int64_t* target;
  Dim dim;
};

// The plan with addresses (bind.cpp).  A step writes only its sizes into it.
struct BoundSteps {
  Vec<Call> calls;
  Vec<Step> steps;
  Vec<const Phase*> phases;  // of each step
  Vec<Patch> patches;
  Objects<Share> shares;
  Objects<OpFailure> failure;  // of a graph with users' own ops; else none
};

// What the last step leaves (execute.cpp).
struct LastStep {
  int64_t symbols[NUM_ROLES + 1] = {-1, -1, -1, -1, -1};
  bool behind_prefix = false;  // it left out the nodes of the encoder
  int32_t num_rows = -1;       // -1: there is no last step
  uint64_t stamp = 0;          // of the next step's first share
};

// All that depends on a program's limits.  Each part is written by the file that its struct names.
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
  RankState ranks;
};

}  // namespace ps

// Holds the model and the context that it was made of.
struct ps_program : ps::Held, ps::ProgramMemory {
  ps_model* model = nullptr;
  ps_context* context = nullptr;
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

// A build without penstock_dev.h has none of the flags, and the compiler removes their code.  Whether the program is a
// rank's.
inline bool has_ranks(const ProgramMemory& program) { return kBuildsRanks && program.ranks.exchange.get(); }
inline bool has_flag(const ProgramMemory& program, uint32_t flag) { return kBuildsDev && (program.flags & flag); }
// The number of best tokens for each row that a step of only the best tokens leaves.
inline int32_t best_parts(const ps_context& context) { return context.links ? 1 : context.comm->world; }
// `flags` are PS_PROGRAM_*, as ps_program_create_flagged takes them.
ps_status create_program(ps_model* model, ps_context* context, const ps_program_options* options, uint32_t flags,
                         ps_program** out);
int64_t max_table_width(const Graph& graph);
ps_status bind_program(ps_program* program);  // after its memory is there
// Decides which steps begin with a barrier.
ps_status place_barriers(ps_program* program);
// `best_only`: ranks need not bring logits together, only their best tokens.
ps_status run_program(ps_program* program, const ps_batch& batch, bool best_only = false);
// Runs the step of a batch that was taken.  `start_ns`: when it began, for the spans.
ps_status run_taken(ps_program* program, const ps_batch& batch, int64_t start_ns);
void walk_steps(void* program, int32_t thread, WalkSlot* slot, int64_t at);
void walk_steps_timed(void* program, int32_t thread, WalkSlot* slot, int64_t at);  // noting spans
ps_span label_span(const ps_program& program, int64_t step, int32_t thread);       // node, phase and thread

}  // namespace ps

#endif
