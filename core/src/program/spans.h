// The times of a step's phases (ps_program_profile).
#ifndef PENSTOCK_PROGRAM_SPANS_H
#define PENSTOCK_PROGRAM_SPANS_H

#include "base/memory.h"
#include "penstock_dev.h"

namespace ps {

// First the whole step, then a row for each thread. walk.cpp writes the times, spans.cpp the rest.
struct StepSpans {
  Region memory;
  int64_t count = 0;  // of the last run
  bool on = false;
  ps_span* whole() { return reinterpret_cast<ps_span*>(memory.data()); }
  ps_span* row(int64_t thread, int64_t num_steps) { return whole() + 1 + thread * num_steps; }
};

// Allocates the spans of later runs; off: frees them.
ps_status profile_program(ps_program* program, bool on);
// Before a step, and after a step that began at `start_ns`.
void clear_spans(ps_program* program);
void gather_spans(ps_program* program, int64_t start_ns);
ps_span label_span(const ps_program& program, int64_t step, int32_t thread);  // node, phase and thread

}  // namespace ps

#endif
