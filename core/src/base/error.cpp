// The error message of each thread.
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace ps {
namespace {

constexpr size_t kMessageBytes = 2048;
thread_local char message[kMessageBytes] = "no error";

}  // namespace

bool equal(Str a, Str b) { return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0); }

bool equal(Str a, const char* b) { return strlen(b) == a.size && (a.size == 0 || memcmp(a.data, b, a.size) == 0); }

ps_status fail(ps_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, kMessageBytes, format, arguments);
  va_end(arguments);
  return status;
}

ps_status prefix(ps_status status, const char* format, ...) {
  char old[kMessageBytes];
  memcpy(old, message, kMessageBytes);
  va_list arguments;
  va_start(arguments, format);
  int used = vsnprintf(message, kMessageBytes, format, arguments);
  va_end(arguments);
  if (used < 0) used = 0;
  if (static_cast<size_t>(used) < kMessageBytes) {
    snprintf(message + used, kMessageBytes - static_cast<size_t>(used), "%s", old);
  }
  return status;
}

const char* error_message() { return message; }

}  // namespace ps
