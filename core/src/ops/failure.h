// Failures that depend on the values of an op's inputs, such as an index out of range.
#ifndef PENSTOCK_OPS_FAILURE_H
#define PENSTOCK_OPS_FAILURE_H

#include "ops/ops.h"

namespace ps {

// Reports a failure from a phase.  Any thread may call it; the first report of a run is kept, and the run then has no
// result.  The phase continues, but must not access memory that is not its own.
void report_failure(const Call& call, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace ps

#endif
