// Monotonic time and the CPU time of the calling thread, in nanoseconds.
#ifndef PENSTOCK_BASE_CLOCK_H
#define PENSTOCK_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

namespace ps {

// Nanoseconds of a clock that never goes back.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// CPU time of the calling thread in nanoseconds.
inline int64_t thread_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace ps

#endif
