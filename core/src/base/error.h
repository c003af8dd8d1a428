// Errors: functions return a status, and the message is stored for the calling thread.
#ifndef PENSTOCK_BASE_ERROR_H
#define PENSTOCK_BASE_ERROR_H

#include "penstock_dev.h"

namespace ps {

// Bytes without a terminator: a name inside the metadata.
struct Str {
  const char* data;
  uint32_t size;
};
bool equal(Str a, Str b);
bool equal(Str a, const char* b);
#define PS_STR(s) static_cast<int>((s).size), (s).data  // for "%.*s"

// Sets the thread's message and returns the status.
ps_status fail(ps_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Prepends text to the thread's message and returns the status.
ps_status prefix(ps_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* error_message();

// Returns from the function if `expression` fails.
#define PS_TRY(expression)                            \
  do {                                                \
    ps_status ps_try_status = (expression);           \
    if (ps_try_status != PS_OK) return ps_try_status; \
  } while (0)

}  // namespace ps

#endif
