// What a program of a general network keeps: a plan for each set of input shapes, the last ones, in one arena.
#ifndef PENSTOCK_PROGRAM_NETWORK_MEMORY_H
#define PENSTOCK_PROGRAM_NETWORK_MEMORY_H

#include "program/plan.h"

namespace ps {

constexpr int32_t kKeptPlans = 4;

// An input of the network as an operand of a call.
struct InputUse { int32_t node, operand, input; };
// An output, and what is copied into it after the run, as its value lies in no temporaries.
struct NetworkOutput {
  int64_t offset, bytes;  // in the arena
  int32_t rank, copied;   // value; -1: none
  int64_t dims[kMaxRank];
};

// The part of a plan that other programs do not have.
struct NetworkShape {
  Vec<int64_t> dims;   // of all inputs, one after another
  Vec<int64_t> lists;  // numbers that attributes point to
  Vec<InputUse> uses;
  Vec<NetworkOutput> outputs;
  int64_t arena_bytes = 0;
  int64_t nanoseconds = 0;   // an estimate for one thread
  uint8_t* arena = nullptr;  // where the calls' addresses point
};
struct NetworkPlan {
  NetworkShape shape;
  Plan plan;
  BoundSteps bound;
  uint64_t used = 0;  // larger: later
};

// Of the plan in use, `plan` and `bound` are the program's own.
struct NetworkMemory {
  NetworkPlan plans[kKeptPlans];
  int32_t current = -1;
  uint64_t num_uses = 0;
  bool has_outputs = false;  // of a run with the current plan
  Region staging;            // inputs that cannot be read where the caller has them
  Vec<const uint8_t*> inputs;
};

}  // namespace ps

#endif
