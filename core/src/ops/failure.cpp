// The report of a failure from a phase of an op.
#include "ops/failure.h"

#include <stdarg.h>
#include <stdio.h>

#include "ops/loaded.h"

namespace ps {

void report_failure(const Call& call, const char* format, ...) {
  OpFailure* const failure = call.failure;
  if (!failure || failure->claimed.exchange(1, std::memory_order_acq_rel)) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure->error.text, sizeof(failure->error.text), format, arguments);
  va_end(arguments);
  failure->status = PS_INVALID_ARGUMENT;
  failure->call = &call;
}

}  // namespace ps
