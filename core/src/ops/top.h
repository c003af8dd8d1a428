// The largest elements of a row: for sampling, for log-probabilities and for the op topk.
#ifndef PENSTOCK_OPS_TOP_H
#define PENSTOCK_OPS_TOP_H

#include <stdint.h>

namespace ps {

struct Candidate {
  float value;
  int32_t id;
};

// Order of a heap: the greatest value, then the smaller id, is on top.
inline bool worse(const Candidate& a, const Candidate& b) {
  return a.value < b.value || (a.value == b.value && a.id > b.id);
}

// The `count` greatest of x [n] in descending order, the smaller index first among equals; a NaN counts as minus
// infinity.  Returns the number found, min(n, count). out [count].
int64_t take_best(const float* x, int64_t n, int64_t count, Candidate* out);

}  // namespace ps

#endif
