// A context: a table of kernels and a thread pool.
#ifndef PENSTOCK_THREADS_CONTEXT_H
#define PENSTOCK_THREADS_CONTEXT_H

#include "base/cpu.h"
#include "base/handles.h"
#include "threads/pool.h"

struct ps_context : ps::Held {
  const ps::Kernels* kernels = nullptr;
  ps::Pool pool;
  const ps_comm* comm = nullptr;  // null: one rank
};

#endif
