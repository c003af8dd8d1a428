// Functions of two numbers over lanes: `binary` of general networks.
#ifndef PENSTOCK_KERNELS_GENERAL_BINARY_H
#define PENSTOCK_KERNELS_GENERAL_BINARY_H

namespace ps {
namespace {

// `a` where it is NaN, else r.
PS_INLINE F16 nan_or(F16 a, F16 r) { return f_select(m_lt(a, f_set(1.f)), r, f_select(m_lt(f_set(0.f), a), r, a)); }

// NaN if either is, as torch's and numpy's minimum and maximum.
PS_INLINE F16 f_max_nan(F16 a, F16 b) {
  return nan_or(a, f_max(a, b));  // f_max gives b where either is NaN
}
PS_INLINE F16 f_min_nan(F16 a, F16 b) { return nan_or(a, f_min(a, b)); }

PS_INLINE F16 binary_value(int32_t kind, F16 a, F16 b) {
  // clang-format off: a kind a line
  switch (kind) {
    case BINARY_ADD: return a + b;
    case BINARY_SUB: return a - b;
    case BINARY_MUL: return a * b;
    case BINARY_DIV: return a / b;
    case BINARY_MIN: return f_min_nan(a, b);
    case BINARY_MAX: return f_max_nan(a, b);
    default: return f_select(m_lt(a, f_set(0.f)), a * b, a);  // prelu
  }
  // clang-format on
}

template <int32_t kind>
void map_pairs(const float* a, int64_t a_step, const float* b, int64_t b_step, float* y, int64_t n) {
  int64_t i = 0;
  if (a_step && b_step) {
    for (; i + 16 <= n; i += 16) f_store(y + i, binary_value(kind, f_load(a + i), f_load(b + i)));
    if (i < n)
      f_store_n(y + i, binary_value(kind, f_load_n(a + i, int(n - i)), f_load_n(b + i, int(n - i))), int(n - i));
  } else if (a_step) {
    const F16 all = f_set(*b);
    for (; i + 16 <= n; i += 16) f_store(y + i, binary_value(kind, f_load(a + i), all));
    if (i < n) f_store_n(y + i, binary_value(kind, f_load_n(a + i, int(n - i)), all), int(n - i));
  } else {
    const F16 all = f_set(*a);
    if (!b_step) {
      const F16 r = binary_value(kind, all, f_set(*b));
      for (; i < n; i += 16) f_store_n(y + i, r, tail(n, i));
      return;
    }
    for (; i + 16 <= n; i += 16) f_store(y + i, binary_value(kind, all, f_load(b + i)));
    if (i < n) f_store_n(y + i, binary_value(kind, all, f_load_n(b + i, int(n - i))), int(n - i));
  }
}

void map_binary(int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y, int64_t n) {
  switch (kind) {
#define PS_LANES(id, name) \
  case BINARY_##id: return map_pairs<BINARY_##id>(a, a_step, b, b_step, y, n);
#define PS_SCALAR(id, name)
#define PS_COMPARE(id, name)
#define PS_BITS(id, name)
#include "base/binary_kinds.inc"
    default: return;
  }
}

}  // namespace
}  // namespace ps

#endif
