// A program: a model with the memory that its steps use.
#ifndef PENSTOCK_PROGRAM_H
#define PENSTOCK_PROGRAM_H

#include <atomic>

#include "base/build.h"
#include "exchange/exchange.h"
#include "ops/ops.h"
#include "program/fuse.h"
#include "program/model.h"
#include "program/pages.h"
#include "program/wanted_rows.h"
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

// How many chunks of one thread's share of a step are taken.  The stamp, ever growing, says of which step, so that a
// share needs no reset and a thread that comes late finds nothing left.
struct alignas(64) Share {
  std::atomic<uint64_t> taken;  // stamp << 16 | chunks
};

struct Patch {  // a size of a step inside a call
  int64_t* target;
  Dim dim;
};

// Attention nodes whose queries see equally many keys.
struct AttentionWork {
  int32_t window;    // 0: all
  bool wanted_only;  // only wanted tokens have queries
  double products;   // multiplications for a query and a key, over all these nodes
};

// A step of a pipeline that rank 0 has launched and not collected.
struct InFlight {
  int32_t num_tokens, num_requests, num_rows, page_table_width, num_wanted;
  bool has_hidden, best_only;
};

// All that depends on a program's limits.
struct ProgramMemory {
  ps_program_options options;
  uint32_t flags = 0;  // PS_PROGRAM_*
  Plan plan;
  Region temporaries, scratch, kv, logits;
  Vec<Call> calls;
  Vec<Step> steps;
  Vec<const Phase*> phases;  // of each step
  Vec<Patch> patches;
  Region shares, spans;
  Region failure;   // OpFailure, of a graph with users' own ops; else empty
  Region exchange;  // Exchange, of a program of several ranks; else empty
  Vec<DirectPart> direct_parts;
  InFlight in_flight[PS_MAX_RANKS] = {};  // the oldest first
  int32_t num_in_flight = 0;
  uint64_t rank_step = 0;     // steps that all ranks have run
  bool gathers_head = false;  // logits are brought together from several ranks
  bool best_only = false;     // the last step left best tokens instead of logits (exchange/exchange.h)
  uint64_t stamp = 0;         // of the next run's first step
  int64_t num_spans = 0;      // of the last run
  bool profiling = false;
  int64_t symbols[NUM_ROLES + 1] = {-1, -1, -1, -1, -1};  // of the last step
  bool behind_prefix = false;                             // likewise: it left out the nodes of the encoder
  int32_t num_rows = -1;                                  // of the last step; -1: none yet
  int32_t num_wanted = 0;                                 // tokens of its wanted-only nodes
  bool has_hidden = false;                                // the last step has its hidden rows
  int64_t token_bytes = 0;                                // of weights, that one token reads
  Vec<AttentionWork> attention;
  uint32_t step_number = 0;
  // The batch's private copies, inside the scratch memory.
  int32_t *token_ids = nullptr, *positions = nullptr, *request_starts = nullptr, *page_tables = nullptr,
          *output_rows = nullptr, *token_request = nullptr, *slots = nullptr;
  int32_t* failed_rows = nullptr;  // [num_rows]: whether the row's request follows a row that failed
  bool has_failed = false;         // the step reads a slot whose row failed
  int32_t *wanted_rows = nullptr, *wanted_positions = nullptr, *wanted_request = nullptr;  // of wanted tokens
  PageOwner* owners = nullptr;
  uint8_t *thread_scratch = nullptr, *sample_scratch = nullptr;
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

// A build without penstock_dev.h has none of the flags, nor what they would do.
// Whether the program is a rank's.
inline bool has_ranks(const ProgramMemory& program) { return kBuildsRanks && program.exchange.data(); }
inline bool has_flag(const ProgramMemory& program, uint32_t flag) { return kBuildsDev && (program.flags & flag); }
// How many best tokens of a row a step of the best tokens only leaves.
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
// The two parts of a step of a pipeline.
ps_status launch_program(ps_program* program, const ps_batch& batch, bool best_only);
ps_status collect_program(ps_program* program);
// Computes the step that rank 0 runs next.
ps_status follow_program(ps_program* program);
// Makes room for the spans of later runs; off: gives it back.
ps_status profile_program(ps_program* program, bool on);
inline ps_span* spans_of(ps_program* program) { return reinterpret_cast<ps_span*>(program->spans.data()); }
void walk_steps(void* program, int32_t thread, WalkSlot* slot, int64_t at);
void walk_steps_timed(void* program, int32_t thread, WalkSlot* slot, int64_t at);  // noting spans
ps_span label_span(const ps_program& program, int64_t step, int32_t thread);       // node, phase and thread

}  // namespace ps

#endif
