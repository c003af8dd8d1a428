// The plan of a program's memory, and the plan with addresses: what the walk runs.
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

struct Block {
  int32_t value, first, last;  // alive from node to node, in the program's order
  int64_t bytes, offset;
};

// Fills the offsets, so that blocks that are alive at the same time do not overlap, and sorts the blocks by size.
// *bytes is where the last one ends.  `limit` names what is too large where that does not fit in 63 bits.
ps_status place_blocks(Vec<Block>* blocks, const char* limit, int64_t* bytes);
ps_status too_large(const char* limit);

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

}  // namespace ps

#endif
