#ifndef PENSTOCK_CONTEXT_H
#define PENSTOCK_CONTEXT_H

#include "cpu.h"
#include "handles.h"
#include "threads.h"

struct ps_context : ps::Held {
  const ps::Kernels* kernels = nullptr;
  ps::Pool pool;
};

#endif
