// rms_norm and layer_norm, optionally with the sum of input and residual.
#ifndef PENSTOCK_KERNELS_ROWS_NORMS_H
#define PENSTOCK_KERNELS_ROWS_NORMS_H

namespace ps {
namespace {

PS_INLINE int tail(int64_t n, int64_t i) { return n - i < 16 ? int(n - i) : 16; }

// Prefetches a whole row, because the lines of a row that other threads wrote would otherwise arrive one by one.
PS_INLINE void prefetch_row(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(x + i, 0, 3);
}

// Stores x + residual in sum; returns the input of the norm.
inline const float* add_residual(const NormArgs& a, int64_t row, int64_t offset) {
  const float* x = a.x + row * a.x_stride + offset;
  if (!a.residual) return x;
  const float* residual = a.residual + row * a.residual_stride + offset;
  float* sum = a.sum + row * a.sum_stride + offset;
  for (int64_t i = 0; i < a.dim; i += 16) {
    int n = tail(a.dim, i);
    f_store_n(sum + i, f_load_n(x + i, n) + f_load_n(residual + i, n), n);
  }
  return sum;
}

void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t item = begin * a.groups; item < end * a.groups; ++item) {
    int64_t row = item / a.groups, offset = item % a.groups * a.dim;
    const float* weight = a.weight + item % a.groups * a.weight_stride;
    const float* x = add_residual(a, row, offset);
    float* y = a.y + row * a.y_stride + offset;
    prefetch_row(x, a.dim);
    F16 sum = f_set(0.f);
    int64_t i = 0;
    for (; i + 16 <= a.dim; i += 16) {
      F16 v = f_load(x + i);
      sum = f_fma(v, v, sum);
    }
    if (i < a.dim) {
      F16 v = f_load_n(x + i, int(a.dim - i));
      sum = f_select(m_range(0, int(a.dim - i)), f_fma(v, v, sum), sum);
    }
    float scale = 1.f / __builtin_sqrtf(f_sum(sum) / float(a.dim) + a.eps);
    F16 r = f_set(scale);
    for (i = 0; i < a.dim; i += 16) {
      int n = tail(a.dim, i);
      f_store_n(y + i, (f_load_n(x + i, n) * r) * f_load_n(weight + i, n), n);
    }
  }
}

void layer_norm(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t item = begin * a.groups; item < end * a.groups; ++item) {
    int64_t row = item / a.groups, offset = item % a.groups * a.dim;
    const float* x = add_residual(a, row, offset);
    float* y = a.y + row * a.y_stride + offset;
    F16 sum = f_set(0.f), squares = f_set(0.f);
    for (int64_t i = 0; i < a.dim; i += 16) {
      int n = tail(a.dim, i);
      sum = f_select(m_range(0, n), sum + f_load_n(x + i, n), sum);
    }
    F16 mean = f_set(f_sum(sum) / float(a.dim));
    for (int64_t i = 0; i < a.dim; i += 16) {
      int n = tail(a.dim, i);
      F16 v = f_load_n(x + i, n) - mean;
      squares = f_select(m_range(0, n), f_fma(v, v, squares), squares);
    }
    F16 r = f_set(1.f / __builtin_sqrtf(f_sum(squares) / float(a.dim) + a.eps));
    for (int64_t i = 0; i < a.dim; i += 16) {
      int n = tail(a.dim, i);
      F16 v = ((f_load_n(x + i, n) - mean) * r) * f_load_n(a.weight + i, n);
      if (a.bias) v = v + f_load_n(a.bias + i, n);
      f_store_n(y + i, v, n);
    }
  }
}

}  // namespace
}  // namespace ps

#endif
