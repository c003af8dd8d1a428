#ifndef PENSTOCK_CONTEXT_H
#define PENSTOCK_CONTEXT_H

#include "cpu.h"
#include "threads.h"

struct ps_context {
  const ps::Kernels* kernels = nullptr;
  ps::Pool pool;
};

#endif
