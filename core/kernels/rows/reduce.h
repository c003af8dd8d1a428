// Reductions over a row of logits for sampling: argmax, maximum, and the sum of exponentials.
#ifndef PENSTOCK_KERNELS_ROWS_REDUCE_H
#define PENSTOCK_KERNELS_ROWS_REDUCE_H

namespace ps {
namespace {

float row_max(const float* x, int64_t n) {
  F16 m = f_set(-kInfinity);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) m = f_max(f_load(x + i), m);
  if (i < n) {
    int rest = int(n - i);
    m = f_max(f_select(m_range(0, rest), f_load_n(x + i, rest), m), m);
  }
  return f_hmax(m);
}

// Returns the first of equal maxima.  NaNs are ignored; a row of only NaNs gives 0.
int32_t argmax(const float* x, int64_t n) {
  float m = row_max(x, n);
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == m) return int32_t(i);
  return 0;
}

float exp_sum(const float* x, int64_t n, float shift, float factor, float* y) {
  F16 sum = f_set(0.f);
  for (int64_t i = 0; i < n; i += 16) {
    int rest = tail(n, i);
    F16 e = f_exp((f_load_n(x + i, rest) - f_set(shift)) * f_set(factor));
    sum = f_select(m_range(0, rest), sum + e, sum);
    if (y) f_store_n(y + i, e, rest);
  }
  return f_sum(sum);
}

}  // namespace
}  // namespace ps

#endif
