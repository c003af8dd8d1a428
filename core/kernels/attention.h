// Attention over KV pages.  A block is up to a few tokens of one request with all query heads of one KV head, so
// that a page is loaded once for all of them; each query's arithmetic is as if it were alone (docs/numerics.md).
#ifndef PENSTOCK_KERNELS_ATTENTION_H
#define PENSTOCK_KERNELS_ATTENTION_H

namespace ps {
namespace {

constexpr int kPartitionTokens = kPartitionPages * kPageTokens;
constexpr int kBlockQueries = 32;

struct Query {  // one head of one token
  const float* q;
  float* out;
  int32_t position, first, last;  // valid keys: first..last
  float slope;
  int begin, end;  // valid slots of the partition
  float max, sum;  // of the partition
  float total_max, total_sum;
  float *p, *o, *spare, *total;  // [256] scores, then probabilities; [dim] each of the partition, and in all or null
  float* partials;               // where the results of its partitions go, if they are kept apart
};

// The pages of a partition that some query of the block sees: [begin, end) of kPartitionPages.
struct Partition {
  int32_t start;  // position of its first slot
  int begin, end;
  const uint8_t* heads[kPartitionPages];  // one KV head of each page
  const uint8_t* ahead[kPartitionPages];  // what is read after it, to be asked for early
};

PS_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
PS_INLINE int64_t partial_floats(int64_t dim) { return 16 + padded(dim); }  // maximum, sum, 14 unused, values

PS_INLINE void ask_for(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// p[t] = sum over d of q[d] * k[d][t], a chain in ascending d for each of 32 keys: N queries against P pages.
template <class Kv, int N, int P>
inline void scores(Query* queries, const Partition& part, int page, int64_t dim) {
  F16 s[N][P][2];
  const float* q[N];
  const uint8_t *keys[P], *values[P];
  PS_UNROLL for (int j = 0; j < P; ++j) {
    keys[j] = part.heads[page + j];
    values[j] = Kv::values(keys[j], dim);
  }
  PS_UNROLL for (int i = 0; i < N; ++i) {
    q[i] = queries[i].q;
    PS_UNROLL for (int j = 0; j < P; ++j) s[i][j][0] = s[i][j][1] = f_set(0.f);
  }
  for (int64_t d = 0; d < dim; ++d) {
    PS_UNROLL for (int j = 0; j < P; ++j) {
      F16 k0 = Kv::load(keys[j], d * kPageTokens), k1 = Kv::load(keys[j], d * kPageTokens + 16);
      PS_UNROLL for (int line = 0; line < kPageTokens * Kv::kElement; line += 64)
        ask_for(values[j] + d * kPageTokens * Kv::kElement + line);
      PS_UNROLL for (int i = 0; i < N; ++i) {
        F16 x = f_set(q[i][d]);
        s[i][j][0] = f_fma(x, k0, s[i][j][0]);
        s[i][j][1] = f_fma(x, k1, s[i][j][1]);
      }
    }
  }
  PS_UNROLL for (int i = 0; i < N; ++i)
    PS_UNROLL for (int j = 0; j < P; ++j) {
      f_store(queries[i].p + (page + j) * kPageTokens, s[i][j][0]);
      f_store(queries[i].p + (page + j) * kPageTokens + 16, s[i][j][1]);
    }
}

// Few queries go over several pages at a time, so that enough chains run side by side.
template <class Kv, int N>
void all_scores(Query* queries, int n, const Partition& part, int64_t dim) {
  constexpr int P = kScoreChains / N > 1 ? kScoreChains / N : 1;
  const int whole = n / N * N;
  for (int page = part.begin; page < part.end;) {  // a page serves all queries while it is in the nearest cache
    const bool several = P > 1 && page + P <= part.end;
    for (int i = 0; i < whole; i += N) {
      if (several) scores<Kv, N, P>(queries + i, part, page, dim);
      else scores<Kv, N, 1>(queries + i, part, page, dim);
    }
    page += several ? P : 1;
  }
  if constexpr (N > 1)
    if (n > whole) all_scores<Kv, N / 2>(queries + whole, n - whole, part, dim);
}

// 16 scores from slot t of the partition on, as they enter the softmax.
template <class Kv>
PS_INLINE F16 adjusted(const AttentionArgs& a, const Query& q, int32_t start, int t, const float* key_scales) {
  static const float iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F16 s = f_load(q.p + t);
  if (Kv::kScaled) s = s * f_load(key_scales);
  s = s * f_set(a.scale);
  if (a.softcap != 0.f) s = f_set(a.softcap) * f_tanh(s / f_set(a.softcap));
  if (a.alibi) s = f_fma(f_set(q.slope), f_load(iota) + f_set(float(start + t - q.position)), s);
  if (q.begin <= t && t + 16 <= q.end) return s;
  return f_select(m_range(q.begin - t, q.end - t), s, f_set(-kInfinity));
}

// Scores of a partition to probabilities, in place, and their maximum and sum.
template <class Kv>
inline void softmax(const AttentionArgs& a, Query& q, const Partition& part) {
  const int64_t dim = a.kv.head_dim;
  const int first = q.begin / kPageTokens, last = (q.end - 1) / kPageTokens;
  F16 highest = f_set(-kInfinity), sums = f_set(0.f);
  for (int page = first; page <= last; ++page) {
    const float* key_scales = (const float*)(part.heads[page] + kPageTokens * dim);
    const int t = page * kPageTokens;
    F16 s0 = adjusted<Kv>(a, q, part.start, t, key_scales);
    F16 s1 = adjusted<Kv>(a, q, part.start, t + 16, key_scales + 16);
    f_store(q.p + t, s0);
    f_store(q.p + t + 16, s1);
    highest = f_max(highest, f_max(s0, s1));
  }
  q.max = f_hmax(highest);
  const F16 m = f_set(q.max);
  for (int page = first; page <= last; ++page) {
    float* p = q.p + page * kPageTokens;
    F16 p0 = f_exp_negative(f_load(p) - m), p1 = f_exp_negative(f_load(p + 16) - m);
    sums = (sums + p0) + p1;
    if (Kv::kScaled) {
      const float* value_scales = (const float*)(Kv::values(part.heads[page], dim) + kPageTokens * dim);
      p0 = p0 * f_load(value_scales);
      p1 = p1 * f_load(value_scales + 16);
    }
    f_store(p, p0);
    f_store(p + 16, p1);
  }
  q.sum = f_sum(sums);
}

// o[d] = a chain of p[t] * v[t][d] over the slots [begin, end) of a page, ascending: D vectors of dimensions, the last
// n wide.
template <class Kv, int N, int D>
PS_INLINE void weigh_columns(Query* queries, const Partition& part, int64_t dim, int64_t d, int n, int begin, int end) {
  F16 o[N][D];
  const float* p[N];
  PS_UNROLL for (int i = 0; i < N; ++i) {
    p[i] = queries[i].p;
    PS_UNROLL for (int c = 0; c < D; ++c) o[i][c] = f_load(queries[i].o + d + 16 * c);
  }
  const int page = begin / kPageTokens;
  const uint8_t *values = Kv::values(part.heads[page], dim), *ahead = part.ahead[page];
  int64_t at = (begin - page * kPageTokens) * dim + d;
  for (int t = begin; t < end; ++t, at += dim) {
    F16 v[D];
    PS_UNROLL for (int c = 0; c < D; ++c) v[c] = D > 1 ? Kv::load(values, at + 16 * c) : Kv::load_n(values, at, n);
    PS_UNROLL for (int line = 0; line < 16 * D * Kv::kElement; line += 64) ask_for(ahead + at * Kv::kElement + line);
    PS_UNROLL for (int j = 0; j < N; ++j) {
      F16 x = f_set(p[j][t]);
      PS_UNROLL for (int c = 0; c < D; ++c) o[j][c] = f_fma(x, v[c], o[j][c]);
    }
  }
  PS_UNROLL for (int i = 0; i < N; ++i)
    PS_UNROLL for (int c = 0; c < D; ++c) f_store(queries[i].o + d + 16 * c, o[i][c]);
}

template <class Kv, int N>
inline void weigh(Query* queries, const Partition& part, int64_t dim, int begin, int end) {
  int64_t d = 0;
  if (begin >= end) return;
  if constexpr (kWeighColumns >= 4)
    for (; d + 64 <= dim; d += 64) weigh_columns<Kv, N, 4>(queries, part, dim, d, 16, begin, end);
  for (; d + 32 <= dim; d += 32) weigh_columns<Kv, N, 2>(queries, part, dim, d, 16, begin, end);
  for (; d < dim; d += 16) weigh_columns<Kv, N, 1>(queries, part, dim, d, tail(dim, d), begin, end);
}

// The slots [first, stop) of a page.  Those that all of N queries see go together; what some see before and after
// them, query by query.
template <class Kv, int N>
void weigh_page(Query* queries, int n, const Partition& part, int64_t dim, int first, int stop) {
  for (; n >= N; n -= N, queries += N) {
    int begin = first, end = stop;
    for (int i = 0; i < N; ++i) {
      begin = queries[i].begin > begin ? queries[i].begin : begin;
      end = queries[i].end < end ? queries[i].end : end;
    }
    if (begin >= end) begin = end = first;
    for (int i = 0; N > 1 && i < N; ++i) {
      const int from = queries[i].begin > first ? queries[i].begin : first;
      weigh<Kv, 1>(queries + i, part, dim, from, begin);
    }
    weigh<Kv, N>(queries, part, dim, begin, end);
    for (int i = 0; N > 1 && i < N; ++i) {
      const int from = queries[i].begin > end ? queries[i].begin : end;
      weigh<Kv, 1>(queries + i, part, dim, from, queries[i].end < stop ? queries[i].end : stop);
    }
  }
  if constexpr (N > 1)
    if (n > 0) weigh_page<Kv, N / 2>(queries, n, part, dim, first, stop);
}

inline void add_partition(Query& q, int64_t dim) {
  if (!q.total) {  // the first
    q.total = q.o;
    q.total_max = q.max;
    q.total_sum = q.sum;
    return;
  }
  const float m = q.max > q.total_max ? q.max : q.total_max;
  const F16 old_scale = f_exp_negative(f_set(q.total_max - m)), new_scale = f_exp_negative(f_set(q.max - m));
  float lanes[16];
  f_store(lanes, f_fma(f_set(q.total_sum), old_scale, f_set(q.sum) * new_scale));
  q.total_sum = lanes[0];
  q.total_max = m;
  for (int64_t d = 0; d < dim; d += 16)
    f_store(q.total + d, f_fma(f_load(q.total + d), old_scale, f_load(q.o + d) * new_scale));
}

inline void finish(const Query& q, int64_t dim) {
  const F16 sum = f_set(q.total_sum);
  for (int64_t d = 0; d < dim; d += 16) f_store_n(q.out + d, f_load(q.total + d) / sum, tail(dim, d));
}

// The slots of the partition that a query sees: none where end <= begin.
PS_INLINE void set_slots(Query& q, int32_t start) {
  q.begin = q.first > start ? q.first - start : 0;
  q.end = q.last - start + 1 < kPartitionTokens ? q.last - start + 1 : kPartitionTokens;
}

template <class Kv>
void partition_step(const AttentionArgs& a, Query* queries, int n, const Partition& part) {
  const int64_t dim = a.kv.head_dim;
  all_scores<Kv, kQueries>(queries, n, part, dim);
  for (int i = 0; i < n; ++i) {
    set_slots(queries[i], part.start);
    if (queries[i].end <= queries[i].begin) continue;
    softmax<Kv>(a, queries[i], part);
    for (int64_t d = 0; d < dim; d += 16) f_store(queries[i].o + d, f_set(0.f));
  }
  for (int page = part.begin; page < part.end; ++page)
    weigh_page<Kv, kWeighQueries>(queries, n, part, dim, page * kPageTokens, (page + 1) * kPageTokens);
}

// The partitions [part, part_end) of the queries of a block, as far as they see them.
template <class Kv>
void attend(const AttentionArgs& a, Query* queries, int n, const int32_t* pages, int64_t kv_head, int32_t part,
            int32_t part_end) {
  const int64_t dim = a.kv.head_dim, offset = kv_head * Kv::head_bytes(dim);
  // Positions ascend over the queries, so the first has the earliest valid key and the last the latest.
  const int32_t first_page = queries[0].first / kPageTokens, last_page = queries[n - 1].last / kPageTokens;
  if (part < first_page / kPartitionPages) part = first_page / kPartitionPages;
  for (; part < part_end && part * kPartitionPages <= last_page; ++part) {
    Partition p;
    const int32_t page = part * kPartitionPages;
    p.start = page * kPageTokens;
    p.begin = first_page > page ? first_page - page : 0;
    p.end = last_page - page + 1 < kPartitionPages ? last_page - page + 1 : kPartitionPages;
    for (int i = p.begin; i < p.end; ++i) {
      const int32_t next = page + i + kPartitionPages <= last_page && part + 1 < part_end ? kPartitionPages : 0;
      p.heads[i] = a.kv.data + pages[page + i] * a.kv.page_bytes + offset;
      p.ahead[i] = a.kv.data + pages[page + i + next] * a.kv.page_bytes + offset;
    }
    for (int i = 0; a.partials && i < n; ++i) queries[i].o = queries[i].partials + part * partial_floats(dim) + 16;
    partition_step<Kv>(a, queries, n, p);
    for (int i = 0; i < n; ++i) {
      Query& q = queries[i];
      if (q.end <= q.begin) continue;
      if (a.partials) {
        q.o[-16] = q.max;
        q.o[-15] = q.sum;
      } else {
        add_partition(q, dim);
        if (q.total == q.o) q.o = q.spare;
      }
    }
  }
}

PS_INLINE int64_t block_tokens(int64_t group) { return group >= kBlockQueries ? 1 : kBlockQueries / group; }
PS_INLINE int64_t query_floats(int64_t dim) { return kPartitionTokens + 2 * padded(dim); }

int64_t attention_scratch_bytes(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  int64_t group = num_heads / num_kv_heads, queries = group * block_tokens(group);
  return queries * (int64_t(sizeof(Query)) + 4 * query_floats(head_dim)) + 64;
}

inline void place_query(const AttentionArgs& a, Query& q, int64_t token, int64_t head) {
  const int64_t dim = a.kv.head_dim, request = a.batch.token_request[token];
  q.q = a.q + token * a.q_stride + head * dim;
  q.out = a.out + token * a.out_stride + head * dim;
  q.position = a.batch.positions[token];
  q.last = a.causal ? q.position : a.batch.positions[a.batch.request_starts[request + 1] - 1];
  q.first = a.window > 0 && q.position >= a.window ? q.position - a.window + 1 : 0;
  q.slope = a.alibi ? a.alibi[head] : 0.f;
  q.total = nullptr;
}

inline void start_query(const AttentionArgs& a, Query& q, int64_t token, int64_t head, float* memory) {
  place_query(a, q, token, head);
  q.p = memory;
  q.o = memory + kPartitionTokens;
  q.spare = q.o + padded(a.kv.head_dim);
}

void attend_any(const AttentionArgs& a, Query* queries, int n, int64_t token, int64_t kv_head, int32_t part,
                int32_t part_end) {
  const int32_t* pages = a.batch.page_table + int64_t(a.batch.token_request[token]) * a.batch.page_table_width;
  if (a.kv.layout == PS_KV_INT8) attend<KvInt8>(a, queries, n, pages, kv_head, part, part_end);
  else if (a.kv.layout == PS_KV_BF16) attend<KvBf16>(a, queries, n, pages, kv_head, part, part_end);
  else attend<KvF32>(a, queries, n, pages, kv_head, part, part_end);
}

void attention(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t heads = a.kv.num_kv_heads, group = a.num_heads / heads, limit = block_tokens(group);
  const int64_t dim = a.kv.head_dim, floats = query_floats(dim);
  Query* queries = (Query*)scratch;
  float* memory = (float*)(queries + group * limit);
  const int32_t* request_of = a.batch.token_request;
  for (int64_t token = begin / heads; token * heads < end;) {
    int64_t stop = token + 1;
    while (stop * heads < end && stop - token < limit && request_of[stop] == request_of[token]) ++stop;
    for (int64_t h = 0; h < heads; ++h) {
      int n = 0;
      for (int64_t t = token; t < stop; ++t) {
        if (t * heads + h < begin || t * heads + h >= end) continue;
        for (int64_t g = 0; g < group; ++g, ++n) start_query(a, queries[n], t, h * group + g, memory + n * floats);
      }
      if (n == 0) continue;
      attend_any(a, queries, n, token, h, 0, INT32_MAX);
      for (int i = 0; i < n; ++i) finish(queries[i], dim);
    }
    token = stop;
  }
}

// Where the partitions of a head leave their results.
PS_INLINE float* partials_of(const AttentionArgs& a, int64_t token, int64_t head) {
  return a.partials + (token * a.num_heads + head) * a.num_parts * partial_floats(a.kv.head_dim);
}

void attention_part(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t heads = a.kv.num_kv_heads, group = a.num_heads / heads, floats = query_floats(a.kv.head_dim);
  Query* queries = (Query*)scratch;
  float* memory = (float*)(queries + group);
  for (int64_t item = begin; item < end;) {
    const int64_t part = item % a.num_parts, h = item / a.num_parts % heads, token = item / a.num_parts / heads;
    const int64_t stop = part + end - item < a.num_parts ? part + end - item : a.num_parts;
    for (int64_t g = 0; g < group; ++g) {
      start_query(a, queries[g], token, h * group + g, memory + g * floats);
      queries[g].partials = partials_of(a, token, h * group + g);
    }
    attend_any(a, queries, int(group), token, h, int32_t(part), int32_t(stop));
    item += stop - part;
  }
}

void attention_merge(const AttentionArgs& a, int64_t begin, int64_t end) {
  const int64_t dim = a.kv.head_dim;
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < a.num_heads; ++head) {
      Query q;
      place_query(a, q, token, head);
      for (int32_t part = q.first / kPartitionTokens; part <= q.last / kPartitionTokens; ++part) {
        float* of = partials_of(a, token, head) + part * partial_floats(dim);
        q.max = of[0];
        q.sum = of[1];
        q.o = of + 16;
        add_partition(q, dim);
      }
      finish(q, dim);
    }
}

}  // namespace
}  // namespace ps

#endif
