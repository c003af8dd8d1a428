// The memory of a program of a general network: a plan for each of the last sets of input shapes, in one arena.
#ifndef PENSTOCK_PROGRAM_NETWORK_MEMORY_H
#define PENSTOCK_PROGRAM_NETWORK_MEMORY_H

#include "program/plan.h"

namespace ps {

constexpr int32_t kKeptPlans = 4;

// An input of the network as an operand of a call.
struct InputUse { int32_t node, operand, input; };
// An output: copied after the run if its value is not in the temporaries.
struct NetworkOutput {
  int64_t offset, bytes;  // in the arena
  int32_t rank, copied;   // value; -1: none
  int64_t dims[kMaxRank];
};

// The part of a plan that only general networks have.
struct NetworkShape {
  Vec<int64_t> dims;   // of all inputs, one after another
  Vec<int64_t> lists;  // numbers that attributes point to
  Vec<InputUse> uses;
  Vec<NetworkOutput> outputs;
  int64_t arena_bytes = 0;
  int64_t nanoseconds = 0;   // an estimate for one thread
  uint8_t* arena = nullptr;  // the base of the calls' addresses
};
struct NetworkPlan {
  NetworkShape shape;
  Plan plan;
  BoundSteps bound;
  uint64_t used = 0;  // time of last use; larger is later
};

// `plan` and `bound` of the current plan are in the program.
struct NetworkMemory {
  NetworkPlan plans[kKeptPlans];
  int32_t current = -1;
  uint64_t num_uses = 0;
  bool has_outputs = false;  // of a run with the current plan
  Region staging;            // copies of inputs that cannot be read in place
  Vec<const uint8_t*> inputs;
};

}  // namespace ps

#endif
