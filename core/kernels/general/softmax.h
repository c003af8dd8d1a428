// Softmax and reductions over the middle of [outer, n, inner].  If inner is 1, a row is summed in 16 lanes, which are
// added at its end; otherwise each column is summed with ascending index.
#ifndef PENSTOCK_KERNELS_GENERAL_SOFTMAX_H
#define PENSTOCK_KERNELS_GENERAL_SOFTMAX_H

namespace ps {
namespace {

__attribute__((noinline)) float log1(float x) {
  float t[16];
  f_store(t, f_log(f_set(x)));
  return t[0];
}

// Like exp_sum, with a separate loop for whole blocks: the same bits.
float softmax_exp(const float* x, float* y, int64_t n, float shift, bool stores) {
  const F16 top = f_set(shift);
  F16 sum = f_set(0.f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16 e = f_exp(f_load(x + i) - top);
    sum = sum + e;
    if (stores) f_store(y + i, e);
  }
  if (i < n) {
    const int k = int(n - i);
    const F16 e = f_exp(f_load_n(x + i, k) - top);
    sum = f_select(m_range(0, k), sum + e, sum);
    if (stores) f_store_n(y + i, e, k);
  }
  return f_sum(sum);
}

void softmax_row(const float* x, float* y, int64_t n, bool log) {
  const float top = row_max(x, n);
  const float sum = softmax_exp(x, y, n, top, !log);
  const F16 shift = f_set(top), rest = f_set(log ? log1(sum) : 1.f / sum);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f_store(y + i, log ? (f_load(x + i) - shift) - rest : f_load(y + i) * rest);
  if (i < n) {
    const int k = int(n - i);
    f_store_n(y + i, log ? (f_load_n(x + i, k) - shift) - rest : f_load_n(y + i, k) * rest, k);
  }
}

template <bool whole>
PS_INLINE F16 load_columns(const float* p, int k) {
  if constexpr (whole) return f_load(p);
  return f_load_n(p, k);
}
template <bool whole>
PS_INLINE void store_columns(float* p, F16 v, int k) {
  if constexpr (whole) return f_store(p, v);
  f_store_n(p, v, k);
}

// k columns, `inner` apart; whole: k is 16.
template <bool whole>
void softmax_columns(const float* x, float* y, int64_t n, int64_t inner, int k, bool log) {
  F16 top = f_set(-kInfinity), sum = f_set(0.f);
  for (int64_t i = 0; i < n; ++i) top = f_max(load_columns<whole>(x + i * inner, k), top);
  for (int64_t i = 0; i < n; ++i) {
    const F16 e = f_exp(load_columns<whole>(x + i * inner, k) - top);
    sum = sum + e;
    if (!log) store_columns<whole>(y + i * inner, e, k);
  }
  const F16 last = log ? f_log(sum) : f_set(1.f) / sum;
  for (int64_t i = 0; i < n; ++i) {
    const F16 v =
        log ? (load_columns<whole>(x + i * inner, k) - top) - last : load_columns<whole>(y + i * inner, k) * last;
    store_columns<whole>(y + i * inner, v, k);
  }
}

void softmax_items(const SoftmaxArgs& a, int64_t begin, int64_t end) {
  const int64_t blocks = (a.inner + kInnerBlock - 1) / kInnerBlock;
  for (int64_t item = begin; item < end; ++item) {
    if (a.inner == 1) {
      softmax_row(a.x + item * a.n, a.y + item * a.n, a.n, a.log);
      continue;
    }
    const int64_t first = item % blocks * kInnerBlock, offset = item / blocks * a.n * a.inner;
    const int64_t last = first + kInnerBlock < a.inner ? first + kInnerBlock : a.inner;
    for (int64_t j = first; j < last; j += 16)
      (last - j >= 16 ? softmax_columns<true> : softmax_columns<false>)(a.x + offset + j, a.y + offset + j, a.n,
                                                                        a.inner, tail(last, j), a.log);
  }
}

PS_INLINE F16 reduce_start(int32_t kind) {
  return f_set(kind == REDUCE_MAX ? -kInfinity : kind == REDUCE_MIN ? kInfinity : kind == REDUCE_PROD ? 1.f : 0.f);
}
// `top`: the maximum for log_sum_exp.
PS_INLINE F16 reduce_step(int32_t kind, F16 acc, F16 v, F16 top) {
  switch (kind) {
    case REDUCE_MAX: return f_max_nan(acc, v);
    case REDUCE_MIN: return f_min_nan(acc, v);
    case REDUCE_PROD: return acc * v;
    case REDUCE_L1: return acc + f_abs(v);
    case REDUCE_L2:
    case REDUCE_SUM_SQUARE: return f_fma(v, v, acc);
    case REDUCE_LOG_SUM_EXP: return acc + f_exp(v - top);
    default: return acc + v;
  }
}
PS_INLINE F16 reduce_end(int32_t kind, F16 acc, int64_t n, F16 top) {
  switch (kind) {
    case REDUCE_MEAN: return acc / f_set(float(n));
    case REDUCE_L2: return f_sqrt(acc);
    case REDUCE_LOG_SUM: return f_log(acc);
    case REDUCE_LOG_SUM_EXP: return f_log(acc) + top;
    default: return acc;
  }
}
// Combines the lanes of a row's accumulator in a fixed order.
PS_INLINE F16 reduce_lanes(int32_t kind, F16 acc) {
  if (kind != REDUCE_MAX && kind != REDUCE_MIN && kind != REDUCE_PROD) return f_set(f_sum(acc));
  float t[16];
  for (int n = 8; n > 0; n >>= 1) {
    f_store(t, acc);
    acc = reduce_step(kind, acc, f_load_n(t + n, n), acc);  // the lanes from n on are not read any more
  }
  f_store(t, acc);
  return f_set(t[0]);
}
// log_sum_exp with an infinite maximum would give inf - inf.
PS_INLINE F16 finite_top(F16 top) { return f_select(m_lt(f_abs(top), f_set(kInfinity)), top, f_set(0.f)); }

template <int32_t kind>
float reduce_row(const float* x, int64_t n) {
  const F16 top = kind == REDUCE_LOG_SUM_EXP ? finite_top(f_set(row_max(x, n))) : f_set(0.f);
  F16 acc = reduce_start(kind);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) acc = reduce_step(kind, acc, f_load(x + i), top);
  if (i < n) {
    const int k = int(n - i);
    acc = f_select(m_range(0, k), reduce_step(kind, acc, f_load_n(x + i, k), top), acc);
  }
  float t[16];
  f_store(t, reduce_end(kind, reduce_lanes(kind, acc), n, top));
  return t[0];
}

// Four columns of 16 at a time, so that each cache line is read once.
template <int32_t kind>
void reduce_columns(const float* x, float* y, int64_t n, int64_t inner, int64_t columns) {
  F16 acc[4], top[4];
  int k[4];
  for (int c = 0; c < 4; ++c) {
    k[c] = columns - 16 * c < 0 ? 0 : columns - 16 * c < 16 ? int(columns - 16 * c) : 16;
    acc[c] = reduce_start(kind);
    top[c] = f_set(kind == REDUCE_LOG_SUM_EXP ? -kInfinity : 0.f);
  }
  if (kind == REDUCE_LOG_SUM_EXP) {
    for (int64_t i = 0; i < n; ++i)
      for (int c = 0; c < 4 && k[c]; ++c) top[c] = f_max(f_load_n(x + i * inner + 16 * c, k[c]), top[c]);
    for (int c = 0; c < 4; ++c) top[c] = finite_top(top[c]);
  }
  if (columns == 64) {
    for (int64_t i = 0; i < n; ++i)
      for (int c = 0; c < 4; ++c) acc[c] = reduce_step(kind, acc[c], f_load(x + i * inner + 16 * c), top[c]);
  } else {
    for (int64_t i = 0; i < n; ++i)
      for (int c = 0; c < 4 && k[c]; ++c)
        acc[c] = reduce_step(kind, acc[c], f_load_n(x + i * inner + 16 * c, k[c]), top[c]);
  }
  for (int c = 0; c < 4 && k[c]; ++c) f_store_n(y + 16 * c, reduce_end(kind, acc[c], n, top[c]), k[c]);
}

template <int32_t kind>
void reduce_items(const ReduceArgs& a, int64_t begin, int64_t end) {
  const int64_t blocks = (a.inner + kInnerBlock - 1) / kInnerBlock;
  for (int64_t item = begin; item < end; ++item) {
    if (a.inner == 1) {
      a.y[item] = reduce_row<kind>(a.x + item * a.n, a.n);
      continue;
    }
    const int64_t first = item % blocks * kInnerBlock, outer = item / blocks;
    const int64_t columns = a.inner - first < kInnerBlock ? a.inner - first : kInnerBlock;
    reduce_columns<kind>(a.x + outer * a.n * a.inner + first, a.y + outer * a.inner + first, a.n, a.inner, columns);
  }
}

void reduce_any(const ReduceArgs& a, int64_t begin, int64_t end) {
  // clang-format off: a kind a line
  switch (a.kind) {
    case REDUCE_SUM: return reduce_items<REDUCE_SUM>(a, begin, end);
    case REDUCE_MEAN: return reduce_items<REDUCE_MEAN>(a, begin, end);
    case REDUCE_MAX: return reduce_items<REDUCE_MAX>(a, begin, end);
    case REDUCE_MIN: return reduce_items<REDUCE_MIN>(a, begin, end);
    case REDUCE_PROD: return reduce_items<REDUCE_PROD>(a, begin, end);
    case REDUCE_L1: return reduce_items<REDUCE_L1>(a, begin, end);
    case REDUCE_L2: return reduce_items<REDUCE_L2>(a, begin, end);
    case REDUCE_SUM_SQUARE: return reduce_items<REDUCE_SUM_SQUARE>(a, begin, end);
    case REDUCE_LOG_SUM: return reduce_items<REDUCE_LOG_SUM>(a, begin, end);
    case REDUCE_LOG_SUM_EXP: return reduce_items<REDUCE_LOG_SUM_EXP>(a, begin, end);
    default: return;
  }
  // clang-format on
}

}  // namespace
}  // namespace ps

#endif
