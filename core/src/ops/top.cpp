// Selection of the largest elements of a row with a heap.
// Hot: runs in every step.
#include "ops/top.h"

#include <math.h>

#include <algorithm>

namespace ps {

// A min-heap of the `count` best so far.
int64_t take_best(const float* x, int64_t n, int64_t count, Candidate* out) {
  const auto better = [](const Candidate& a, const Candidate& b) { return worse(b, a); };
  const int64_t size = n < count ? n : count;
  if (size <= 0) return 0;
  for (int64_t i = 0; i < size; ++i) out[i] = Candidate{isnan(x[i]) ? -INFINITY : x[i], static_cast<int32_t>(i)};
  std::make_heap(out, out + size, better);
  for (int64_t i = size; i < n; ++i) {
    if (!(x[i] > out[0].value)) continue;  // the earlier of equals stays
    std::pop_heap(out, out + size, better);
    out[size - 1] = Candidate{x[i], static_cast<int32_t>(i)};
    std::push_heap(out, out + size, better);
  }
  std::sort_heap(out, out + size, better);
  return size;
}

}  // namespace ps
