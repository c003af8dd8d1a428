// The random number generator of the fuzzers.  It is the same on every machine, so that a seed reproduces a case.
#ifndef PENSTOCK_TOOLS_RANDOM_H
#define PENSTOCK_TOOLS_RANDOM_H

#include <stdint.h>

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return n ? next() % n : 0; }
  int32_t index(int64_t n) { return n > 0 ? static_cast<int32_t>(below(static_cast<uint64_t>(n))) : 0; }
  float unit() { return static_cast<float>(next() >> 40) * (1.0f / 16777216.0f); }
};

#endif
