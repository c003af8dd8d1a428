// The plan of a program's memory, and the plan with addresses, which the threads run.
#ifndef PENSTOCK_PROGRAM_PLAN_H
#define PENSTOCK_PROGRAM_PLAN_H

#include <atomic>

#include "ops/loaded.h"
#include "ops/ops.h"
#include "passes/fuse.h"
#include "passes/wanted_rows.h"
#include "program/model.h"
#include "threads/context.h"

namespace ps {

// The memory plan.  It depends only on limits, and is made before anything is allocated.
struct Plan {
  int64_t symbols[NUM_ROLES + 1];  // the maximum of each in a step; kWantedTokens is the last
  Vec<RunNode> nodes;              // after fusion
  Vec<int32_t> order;              // execution order
  WantedSources sources;           // for wanted-only nodes
  Vec<int64_t> offsets;            // of each value's root in the temporaries; -1: elsewhere
  Vec<int64_t> sizes;              // bytes of each value's root in the temporaries
  int64_t temporary_bytes, logits_bytes, kv_bytes, kv_page_bytes;
  // The parts of the scratch memory, each 64-byte aligned, in this order.
  int64_t shared_scratch, thread_scratch, sample_scratch;  // the latter two are per thread
  int64_t batch_bytes, owner_bytes, slot_bytes;
  int64_t scratch_bytes;
  uint64_t used_groups;        // bit g: page group g has states.  A file has at most 64 groups
  Vec<int32_t> group_pages;    // of each page group
  Vec<int64_t> state_offsets;  // bytes into the KV memory, of each state
};

ps_status make_plan(const ps_model& model, const ps_context& context, const ps_program_options& options, Plan* out);

struct Block {
  int32_t value, first, last;  // lifetime, from node to node in execution order
  int64_t bytes, offset;
};

// Sets the offsets so that blocks that are alive at the same time do not overlap, and sorts the blocks by size. *bytes
// is the end of the last one. `limit` names the limit to blame if that does not fit in 63 bits.
ps_status place_blocks(Vec<Block>* blocks, const char* limit, int64_t* bytes);
ps_status too_large(const char* limit);

// A phase of a node, with addresses.
struct Step {
  const Call* call;
  void (*run)(const Call&, int64_t begin, int64_t end, int32_t thread);
  int64_t items, grain;
  Split split;
  bool barrier;              // wait until all threads have finished what came before
  const uint8_t* weights;    // that the items read in order, or null
  int64_t weight_bytes;      // of the first half if there are two
  int64_t second_half;       // distance from the first half to the second, which is read alongside; 0: one run
  const Step* next_weights;  // the next step with weights, possibly this one
};

// The number of chunks taken from one thread's share of a step.  The stamp identifies the step and only increases: a
// share needs no reset, and a thread that arrives late finds nothing left.
struct alignas(64) Share {
  std::atomic<uint64_t> taken;  // stamp << 16 | chunks
};

struct Patch {  // a size of a step inside a call
  int64_t* target;
  Dim dim;
};

// The plan with addresses (bind.cpp).  A step only updates its sizes.
struct BoundSteps {
  Vec<Call> calls;
  Vec<Step> steps;
  Vec<const Phase*> phases;  // of each step
  Vec<Patch> patches;
  Objects<Share> shares;
  Objects<OpFailure> failure;  // for graphs with custom ops or index checks; otherwise empty
};

}  // namespace ps

#endif
