// Attention of a block of queries over one partition of the context: scores, softmax and weighted values.
#ifndef PENSTOCK_KERNELS_ATTENTION_PARTITION_H
#define PENSTOCK_KERNELS_ATTENTION_PARTITION_H

namespace ps {
namespace {

constexpr int kPartitionTokens = kPartitionPages * kPageTokens;

// One head of one token.
struct Query {
  const float *q, *q_rope;  // q_rope: null except with latents
  const void* x;            // q in the type of the dot product
  float* out;
  int32_t position, first, last;  // valid keys: first..last
  float slope;
  const float* sink;       // null: none
  const float* bias;       // the bias at distance 0, or null
  const float *c2p, *p2c;  // the query's row of c2p, and the row of p2c of the request's first key; or null
  int begin, end;          // valid slots of the partition
  float max, sum;          // of the current partition
  float total_max, total_sum;
  float* p;                        // [256] scores, then probabilities in the type of the dot product
  float *o, *spare, *total;        // [dim] each: this partition, scratch, and all partitions so far or null
  float* memory;                   // [dim] for x
  uint8_t* values;                 // memory for the values of a page of latents, or for widened pages
  const float *next_q, *next_out;  // rows to prefetch, or null
  float* partials;                 // memory for the results of partitions that another phase merges, or null
};

// The pages of a partition that at least one query of the block sees: [begin, end) of kPartitionPages.
struct Partition {
  int32_t start;  // position of its first slot
  int begin, end;
  const uint8_t* heads[kPartitionPages];  // one KV head of each page
  const uint8_t* ahead[kPartitionPages];  // the page to prefetch meanwhile
  const uint8_t* values[kPartitionPages];
};

PS_INLINE int64_t value_dim(const KvView& kv) { return kv.latent_dim ? kv.latent_dim : kv.head_dim; }
PS_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
PS_INLINE int64_t partial_floats(int64_t dim) { return 16 + padded(dim); }  // maximum, sum, 14 unused, values

PS_INLINE void prefetch_l2(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// One step of the scores of N queries against 32 keys of each of P pages.  kLast: a last step of fewer dimensions.
template <class Kv, int N, int P, bool kLast>
PS_INLINE void score_step(F16 (&s)[N][P][2], const typename Kv::Element* const (&q)[N], const uint8_t* const (&keys)[P],
                          int64_t step) {
  PS_UNROLL for (int j = 0; j < P; ++j) {
    const auto k0 = kLast ? Kv::last_key(keys[j], step, 0) : Kv::key(keys[j], step, 0);
    const auto k1 = kLast ? Kv::last_key(keys[j], step, 1) : Kv::key(keys[j], step, 1);
    PS_UNROLL for (int i = 0; i < N; ++i) {
      const auto x = Kv::at(q[i], step);
      s[i][j][0] = Kv::dot(k0, x, s[i][j][0]);
      s[i][j][1] = Kv::dot(k1, x, s[i][j][1]);
    }
  }
}

// p[t] = sum over d of q[d] * k[d][t], in order of d for each of 32 keys: N queries against P pages.  kPrefetch:
// prefetches the values of these pages, once for all queries of a block.
template <class Kv, int N, int P, bool kPrefetch>
inline void scores(Query* queries, const Partition& part, int page, int64_t dim) {
  constexpr int kStepBytes = Kv::kStep * kPageTokens * Kv::kElement;
  F16 s[N][P][2];
  const typename Kv::Element* q[N];
  const uint8_t *keys[P], *values[P];
  PS_UNROLL for (int j = 0; j < P; ++j) {
    keys[j] = part.heads[page + j];
    values[j] = part.values[page + j];
  }
  PS_UNROLL for (int i = 0; i < N; ++i) {
    q[i] = (const typename Kv::Element*)queries[i].x;
    PS_UNROLL for (int j = 0; j < P; ++j) s[i][j][0] = s[i][j][1] = f_set(0.f);
  }
  const int64_t steps = dim / Kv::kStep;
  for (int64_t step = 0; step < steps; ++step) {
    PS_UNROLL for (int j = 0; kPrefetch && j < P; ++j) PS_UNROLL for (int line = 0; line < kStepBytes; line += 64)
        prefetch_l2(values[j] + step * kStepBytes + line);
    score_step<Kv, N, P, false>(s, q, keys, step);
  }
  if (dim % Kv::kStep) score_step<Kv, N, P, true>(s, q, keys, steps);
  PS_UNROLL for (int i = 0; i < N; ++i) PS_UNROLL for (int j = 0; j < P; ++j) {
    f_store(queries[i].p + (page + j) * kPageTokens, s[i][j][0]);
    f_store(queries[i].p + (page + j) * kPageTokens + 16, s[i][j][1]);
  }
}

// Few queries take several pages at a time, so that enough independent sums hide the latency of an addition.
template <class Kv, int N>
void all_scores(Query* queries, int n, const Partition& part, int64_t dim, bool prefetch) {
  constexpr int P = kScoreChains / N > 1 ? kScoreChains / N : 1;
  const int whole = n / N * N;
  for (int page = part.begin; page < part.end;) {  // pages outside: all queries read a page from L1
    const bool several = P > 1 && page + P <= part.end;
    for (int i = 0; i < whole; i += N) {
      if (several) scores<Kv, N, P, true>(queries + i, part, page, dim);
      else if (N < kQueries || (prefetch && i == 0)) scores<Kv, N, 1, true>(queries + i, part, page, dim);
      else scores<Kv, N, 1, false>(queries + i, part, page, dim);
    }
    page += several ? P : 1;
  }
  if constexpr (N > 1)
    if (n > whole) all_scores<Kv, N / 2>(queries + whole, n - whole, part, dim, whole == 0);
}

// Returns x for those of the 16 slots from t that the query sees, and `otherwise` for the rest.
PS_INLINE F16 seen(const Query& q, int t, F16 x, float otherwise) {
  if (q.begin <= t && t + 16 <= q.end) return x;
  return f_select(m_range(q.begin - t, q.end - t), x, f_set(otherwise));
}

constexpr float kLog2E = 1.44269504088896341f;

// Returns the biases of 16 keys, the first of which lies `distance` after the query.
inline __attribute__((noinline)) F16 bias_from(const float* bias, int64_t distance, int64_t reach) {
  if (distance >= -reach && distance + 15 <= reach) return f_load(bias + distance);
  float each[16];
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t d = distance + i;
    each[i] = bias[d < -reach ? -reach : d > reach ? reach : d];
  }
  return f_load(each);
}

// Returns the 16 scores from slot t of the partition as the softmax takes them, times log2(e).
template <class Kv>
PS_INLINE F16 adjusted(const AttentionArgs& a, const Query& q, int32_t start, int t, const float* key_scales) {
  static const float iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F16 s = f_load(q.p + t);
  if (Kv::kScaled && !a.buckets) s = s * f_load(key_scales);
  if (a.softcap != 0.f) s = f_set(a.softcap * kLog2E) * f_tanh((s * f_set(a.scale)) / f_set(a.softcap));
  else s = s * f_set(a.scale * kLog2E);
  if (a.alibi) s = f_fma(f_set(q.slope * kLog2E), f_load(iota) + f_set(float(start + t - q.position)), s);
  if (a.bias) s = f_fma(bias_from(q.bias, start + t - q.position, a.bias_reach), f_set(kLog2E), s);
  return seen(q, t, s, -kInfinity);
}

// Scales, biases and masks the scores of the pages [first, stop) in place.  Returns the maximum of each lane and
// `highest`.
template <class Kv>
PS_INLINE F16 adjust(const AttentionArgs& a, const Query& q, const Partition& part, int first, int stop, F16 highest) {
  const F16 factor = f_set(a.scale * kLog2E);
  const bool plain = !Kv::kScaled && a.softcap == 0.f && !a.alibi && !a.bias;
  for (int page = first; page < stop; ++page) {
    const float* key_scales = (const float*)(part.heads[page] + kPageTokens * a.kv.head_dim);
    const int t = page * kPageTokens;
    F16 s0, s1;
    if (plain && q.begin <= t && t + kPageTokens <= q.end) {
      s0 = f_load(q.p + t) * factor;
      s1 = f_load(q.p + t + 16) * factor;
    } else {
      s0 = adjusted<Kv>(a, q, part.start, t, key_scales);
      s1 = adjusted<Kv>(a, q, part.start, t + 16, key_scales + 16);
    }
    f_store(q.p + t, s0);
    f_store(q.p + t + 16, s1);
    highest = f_max(highest, f_max(s0, s1));
  }
  return highest;
}

// Turns the scores of a partition into probabilities in place, and sets the query's maximum and sum.
template <class Kv>
inline void softmax(const AttentionArgs& a, Query& q, const Partition& part) {
  const int64_t dim = a.kv.head_dim;
  const int first = q.begin / kPageTokens, stop = (q.end - 1) / kPageTokens + 1;
  q.max = f_hmax(adjust<Kv>(a, q, part, first, stop, f_set(-kInfinity)));
  const F16 m = f_set(q.max);
  F16 sums = f_set(0.f);
  typename Kv::Element* rounded = (typename Kv::Element*)q.p;  // never overtakes the scores, which are wider
  for (int page = first; page < stop; ++page) {
    const int t = page * kPageTokens;
    F16 p0 = f_exp2_negative(f_load(q.p + t) - m), p1 = f_exp2_negative(f_load(q.p + t + 16) - m);
    if (Kv::kScaled) {
      sums = (sums + p0) + p1;
      const uint8_t* scaled = a.kv.latent_dim ? part.heads[page] : part.values[page];
      const float* value_scales = (const float*)(scaled + kPageTokens * dim);
      Kv::put_probability(rounded + t, seen(q, t, p0 * f_load(value_scales), 0.f));
      Kv::put_probability(rounded + t + 16, seen(q, t + 16, p1 * f_load(value_scales + 16), 0.f));
    } else {
      p0 = Kv::put_probability(rounded + t, p0);
      p1 = Kv::put_probability(rounded + t + 16, p1);
      sums = (sums + p0) + p1;
    }
  }
  q.sum = f_sum(sums);
}

// o[d] += p[t] * v[t][d] over the steps [begin, end) of a page, in ascending order: D vectors of dimensions, the last
// of which has n.  kPrefetch: prefetches the page that is read next.
template <class Kv, int N, int D, bool kPrefetch>
PS_INLINE void weigh_columns(Query* queries, const Partition& part, int64_t dim, int64_t d, int n, int begin, int end) {
  constexpr int kStepsOfPage = kPageTokens / Kv::kStep, kBytes = Kv::kStep * Kv::kElement;
  F16 o[N][D];
  const typename Kv::Element* p[N];
  PS_UNROLL for (int i = 0; i < N; ++i) {
    p[i] = (const typename Kv::Element*)queries[i].p;
    PS_UNROLL for (int c = 0; c < D; ++c) o[i][c] = f_load(queries[i].o + d + 16 * c);
  }
  const int page = begin / kStepsOfPage;
  const uint8_t *values = part.values[page], *ahead = part.ahead[page] + d * kBytes;
  for (int step = begin; step < end; ++step) {
    const int64_t at = step - page * kStepsOfPage;
    decltype(Kv::value(values, 0, 0, 0)) v[D];
    PS_UNROLL for (int c = 0; c < D; ++c) {
      v[c] = D > 1 ? Kv::value(values, at, dim, d + 16 * c) : Kv::value(values, at, dim, d, n);
    }
    PS_UNROLL for (int line = 0; kPrefetch && line < 16 * D * kBytes; line += 64)
        prefetch_l2(ahead + at * dim * kBytes + line);
    PS_UNROLL for (int j = 0; j < N; ++j) {
      const auto x = Kv::at(p[j], step);
      PS_UNROLL for (int c = 0; c < D; ++c) o[j][c] = Kv::dot(v[c], x, o[j][c]);
    }
  }
  PS_UNROLL for (int i = 0; i < N; ++i) PS_UNROLL for (int c = 0; c < D; ++c)
      f_store(queries[i].o + d + 16 * c, o[i][c]);
}

// All dimensions of the steps [begin, end) of a page.
template <class Kv, int N, bool kPrefetch>
inline void weigh(Query* queries, const Partition& part, int64_t dim, int begin, int end) {
  int64_t d = 0;
  if (begin >= end) return;
  if constexpr (kWeighColumns >= 4)
    for (; d + 64 <= dim; d += 64) weigh_columns<Kv, N, 4, kPrefetch>(queries, part, dim, d, 16, begin, end);
  for (; d + 32 <= dim; d += 32) weigh_columns<Kv, N, 2, kPrefetch>(queries, part, dim, d, 16, begin, end);
  for (; d < dim; d += 16) weigh_columns<Kv, N, 1, kPrefetch>(queries, part, dim, d, tail(dim, d), begin, end);
}

// One slot of a step whose other slot the query does not see.  The other slot's value is not multiplied, because it may
// be NaN.
template <class Kv>
inline void weigh_slot(Query& q, const Partition& part, int64_t dim, int t) {
  const uint8_t* values = part.values[t / kPageTokens];
  const auto x = Kv::at((const typename Kv::Element*)q.p, t / Kv::kStep);
  for (int64_t d = 0; d < dim; d += 16) {
    const auto v = Kv::single_value(values, t % kPageTokens, dim, d, tail(dim, d));
    f_store(q.o + d, Kv::dot(v, x, f_load(q.o + d)));
  }
}

// Slots [begin, end) of a page, for one query.  They begin or end within a step only where the query's keys do.
template <class Kv>
void weigh_one(Query& q, const Partition& part, int64_t dim, int begin, int end) {
  if (begin >= end) return;
  if (begin % Kv::kStep) weigh_slot<Kv>(q, part, dim, begin++);
  weigh<Kv, 1, true>(&q, part, dim, begin / Kv::kStep, end / Kv::kStep);
  if (end % Kv::kStep) weigh_slot<Kv>(q, part, dim, end - 1);
}

// The slots [first, stop) of a page.  Steps that all of N queries see are computed for N queries at a time, the steps
// before and after them query by query.
template <class Kv, int N>
void weigh_page(Query* queries, int n, const Partition& part, int64_t dim, int first, int stop) {
  bool prefetch = true;
  for (; n >= N; n -= N, queries += N, prefetch = false) {
    int begin = first, end = N > 1 ? stop : first;
    for (int i = 0; N > 1 && i < N; ++i) {
      const int from = (queries[i].begin + Kv::kStep - 1) / Kv::kStep * Kv::kStep,
                to = queries[i].end / Kv::kStep * Kv::kStep;
      begin = from > begin ? from : begin;
      end = to < end ? to : end;
    }
    if (begin >= end) begin = end = first;
    for (int i = 0; N > 1 && i < N; ++i)
      weigh_one<Kv>(queries[i], part, dim, queries[i].begin > first ? queries[i].begin : first, begin);
    if constexpr (N > 1) {
      if (N < kWeighQueries || prefetch) weigh<Kv, N, true>(queries, part, dim, begin / Kv::kStep, end / Kv::kStep);
      else weigh<Kv, N, false>(queries, part, dim, begin / Kv::kStep, end / Kv::kStep);
    }
    for (int i = 0; i < N; ++i) {
      const int from = queries[i].begin > end ? queries[i].begin : end;
      weigh_one<Kv>(queries[i], part, dim, from, queries[i].end < stop ? queries[i].end : stop);
    }
  }
  if constexpr (N > 1)
    if (n > 0) weigh_page<Kv, N / 2>(queries, n, part, dim, first, stop);
}

// Sets the slots of the partition that a query sees; none if end <= begin.
PS_INLINE void set_slots(Query& q, int32_t start) {
  q.begin = q.first > start ? q.first - start : 0;
  q.end = q.last - start + 1 < kPartitionTokens ? q.last - start + 1 : kPartitionTokens;
}

PS_INLINE void prefetch_next(Query& q, int64_t dim) {
  if (!q.next_q) return;
  for (int64_t d = 0; d < dim; d += 16) {
    __builtin_prefetch(q.next_q + d, 0, 2);
    __builtin_prefetch(q.next_out + d, 1, 2);
  }
  q.next_q = nullptr;
}

// Adds the disentangled scores by distance.  Keys are outside, because the queries of a block read neighbouring columns
// of a key's row of p2c.
template <class Kv>
inline __attribute__((noinline)) void add_distances(const AttentionArgs& a, Query* queries, int n,
                                                    const Partition& part) {
  const int64_t reach = a.bucket_reach, last = a.num_buckets - 1;
  for (int t = part.begin * kPageTokens; t < part.end * kPageTokens; ++t) {
    const int64_t key = part.start + t;
    const float* key_scales = (const float*)(part.heads[t / kPageTokens] + kPageTokens * a.kv.head_dim);
    for (int i = 0; i < n; ++i) {
      const Query& q = queries[i];
      if (key < q.first || key > q.last) continue;
      const int64_t d = key - q.position;
      const float at = a.buckets[reach + (d < -reach ? -reach : d > reach ? reach : d)];
      const int64_t column = at > 0.f ? at < float(last) ? int64_t(at) : last : 0;
      const float s = Kv::kScaled ? q.p[t] * key_scales[t % kPageTokens] : q.p[t];
      q.p[t] = s + ((q.c2p ? q.c2p[column] : 0.f) + (q.p2c ? q.p2c[key * a.p2c_stride + column] : 0.f));
    }
  }
}

template <class Kv>
void partition_step(const AttentionArgs& a, Query* queries, int n, const Partition& part) {
  const int64_t dim = a.kv.head_dim, values = value_dim(a.kv);
  all_scores<Kv, kQueries>(queries, n, part, dim, true);
  if (a.buckets) add_distances<Kv>(a, queries, n, part);
  for (int i = 0; i < n; ++i) {
    set_slots(queries[i], part.start);
    if (queries[i].end <= queries[i].begin) continue;
    prefetch_next(queries[i], values);
    softmax<Kv>(a, queries[i], part);
    for (int64_t d = 0; d < values; d += 16) f_store(queries[i].o + d, f_set(0.f));
  }
  for (int page = part.begin; page < part.end; ++page) {
    if (a.kv.latent_dim) Kv::order_values(part.heads[page], values, queries[0].values);
    weigh_page<Kv, kWeighQueries>(queries, n, part, values, page * kPageTokens, (page + 1) * kPageTokens);
  }
}

}  // namespace
}  // namespace ps

#endif
