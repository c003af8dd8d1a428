// A context: a table of kernels and a thread pool.
#ifndef PENSTOCK_THREADS_CONTEXT_H
#define PENSTOCK_THREADS_CONTEXT_H

#include "base/cpu.h"
#include "base/handles.h"
#include "threads/pool.h"

struct ps_context : ps::Held {
  const ps::Kernels* kernels = nullptr;
  ps::Pool pool;
  const ps_comm* comm = nullptr;   // null: one rank, or one per stage
  const ps_comm* links = nullptr;  // null: no pipeline
  int32_t stage_ranks = 1;         // pipeline only
};

namespace ps {

// The comm of all ranks; null: a single rank.
inline const ps_comm* all_ranks(const ps_context& context) { return context.links ? context.links : context.comm; }

}  // namespace ps

#endif
