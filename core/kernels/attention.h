// Attention over KV pages.  A block is up to a few tokens of one request with all query heads of one KV head, so
// that a page is loaded once for all of them; each query's arithmetic is as if it were alone (docs/numerics.md).
#ifndef PENSTOCK_KERNELS_ATTENTION_H
#define PENSTOCK_KERNELS_ATTENTION_H

namespace ps {
namespace {

constexpr int kPartitionPages = 8, kBlockQueries = 32;

struct Query {  // one head of one token
  const float* q;
  float* out;
  int32_t position, first, last;  // valid keys: first..last
  float slope, max, rescale;      // of the partition; rescale: what the tile multiplies older sums by
  float total_max, total_sum;
  float *p, *lanes, *o, *total;   // [32] probabilities, [16] sums, [dim] of the partition and in all
};

struct PageRange {
  int begin, end;  // valid slots of a page for a query
};

PS_INLINE PageRange valid_slots(const Query& q, int32_t start) {
  int begin = q.first > start ? q.first - start : 0;
  int end = q.last - start + 1 < kPageTokens ? q.last - start + 1 : kPageTokens;
  return {begin, end};
}

// p[t] = sum over d of q[d] * k[d][t], a chain in ascending d for each of 32 keys.
template <class Kv, int N>
inline void scores(Query* queries, const uint8_t* keys, int64_t dim) {
  F16 s[N][2];
  const float* q[N];
  PS_UNROLL for (int i = 0; i < N; ++i) {
    q[i] = queries[i].q;
    s[i][0] = s[i][1] = f_set(0.f);
  }
  for (int64_t d = 0; d < dim; ++d) {
    F16 k0 = Kv::load(keys, d * kPageTokens), k1 = Kv::load(keys, d * kPageTokens + 16);
    PS_UNROLL for (int i = 0; i < N; ++i) {
      F16 x = f_set(q[i][d]);
      s[i][0] = f_fma(x, k0, s[i][0]);
      s[i][1] = f_fma(x, k1, s[i][1]);
    }
  }
  PS_UNROLL for (int i = 0; i < N; ++i) {
    f_store(queries[i].p, s[i][0]);
    f_store(queries[i].p + 16, s[i][1]);
  }
}

template <class Kv>
PS_INLINE F16 adjusted(const AttentionArgs& a, const Query& q, int32_t start, const float* key_scales, int half) {
  static const float iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F16 s = f_load(q.p + 16 * half);
  if (Kv::kScaled) s = s * f_load(key_scales + 16 * half);
  s = s * f_set(a.scale);
  if (a.softcap != 0.f) s = f_set(a.softcap) * f_tanh(s / f_set(a.softcap));
  if (a.alibi) s = f_fma(f_set(q.slope), f_load(iota) + f_set(float(start + 16 * half - q.position)), s);
  PageRange r = valid_slots(q, start);
  return f_select(m_range(r.begin - 16 * half, r.end - 16 * half), s, f_set(-kInfinity));
}

// Scores of one page to probabilities, in place; the running maximum and the lane sums move on.
template <class Kv>
inline void softmax_step(const AttentionArgs& a, Query& q, int32_t start, const float* key_scales,
                         const float* value_scales) {
  F16 s0 = adjusted<Kv>(a, q, start, key_scales, 0), s1 = adjusted<Kv>(a, q, start, key_scales, 1);
  float highest = f_hmax(f_max(s0, s1));
  float m = highest > q.max ? highest : q.max;
  F16 rescale = f_exp(f_set(q.max - m));
  F16 p0 = f_exp(s0 - f_set(m)), p1 = f_exp(s1 - f_set(m));
  f_store(q.lanes, f_fma(f_load(q.lanes), rescale, p0) + p1);
  if (Kv::kScaled) {
    p0 = p0 * f_load(value_scales);
    p1 = p1 * f_load(value_scales + 16);
  }
  f_store(q.p, p0);
  f_store(q.p + 16, p1);
  float first[16];
  f_store(first, rescale);
  q.rescale = first[0];
  q.max = m;
}

// o[d] = o[d] * rescale, then a chain of p[t] * v[t][d] over t ascending: D vectors of dimensions, the last n wide.
template <class Kv, int N, int D>
PS_INLINE void weigh_columns(Query* queries, const uint8_t* values, int64_t dim, int64_t d, int n, PageRange r) {
  F16 o[N][D];
  PS_UNROLL for (int i = 0; i < N; ++i)
    PS_UNROLL for (int c = 0; c < D; ++c) o[i][c] = f_load(queries[i].o + d + 16 * c) * f_set(queries[i].rescale);
  for (int t = r.begin; t < r.end; ++t) {
    F16 v[D];
    PS_UNROLL for (int c = 0; c < D; ++c)
      v[c] = D > 1 ? Kv::load(values, t * dim + d + 16 * c) : Kv::load_n(values, t * dim + d, n);
    PS_UNROLL for (int i = 0; i < N; ++i) {
      F16 p = f_set(queries[i].p[t]);
      PS_UNROLL for (int c = 0; c < D; ++c) o[i][c] = f_fma(p, v[c], o[i][c]);
    }
  }
  PS_UNROLL for (int i = 0; i < N; ++i)
    PS_UNROLL for (int c = 0; c < D; ++c) f_store(queries[i].o + d + 16 * c, o[i][c]);
}

template <class Kv, int N>
inline void weigh(Query* queries, const uint8_t* values, int64_t dim, PageRange r) {
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) weigh_columns<Kv, N, 2>(queries, values, dim, d, 16, r);
  for (; d < dim; d += 16) weigh_columns<Kv, N, 1>(queries, values, dim, d, tail(dim, d), r);
}

// One page for n queries that all have a valid key in it.
template <class Kv, int N>
void page_step(const AttentionArgs& a, Query* queries, int n, const uint8_t* head, int32_t start) {
  const int64_t dim = a.kv.head_dim;
  const uint8_t* values = Kv::values(head, dim);
  const float* key_scales = (const float*)(head + kPageTokens * dim);
  const float* value_scales = (const float*)(values + kPageTokens * dim);
  for (; n >= N; n -= N, queries += N) {
    scores<Kv, N>(queries, head, dim);
    PageRange r = valid_slots(queries[0], start);
    bool same = true;
    for (int i = 0; i < N; ++i) {
      PageRange s = valid_slots(queries[i], start);
      same = same && s.begin == r.begin && s.end == r.end;
      softmax_step<Kv>(a, queries[i], start, key_scales, value_scales);
    }
    if (same) weigh<Kv, N>(queries, values, dim, r);
    else
      for (int i = 0; i < N; ++i) weigh<Kv, 1>(queries + i, values, dim, valid_slots(queries[i], start));
  }
  if constexpr (N > 1)
    if (n > 0) page_step<Kv, N / 2>(a, queries, n, head, start);
}

// The scalar exponential is the lanes' own.
PS_INLINE float exp1(float x) {
  float lanes[16];
  f_store(lanes, f_exp(f_set(x)));
  return lanes[0];
}

inline void merge_partition(Query& q, int64_t dim) {
  float m = q.max > q.total_max ? q.max : q.total_max;
  float old_scale = exp1(q.total_max - m), new_scale = exp1(q.max - m);
  float products[16];
  f_store(products, f_fma(f_set(q.total_sum), f_set(old_scale), f_set(f_sum(f_load(q.lanes)) * new_scale)));
  q.total_sum = products[0];
  q.total_max = m;
  for (int64_t d = 0; d < dim; d += 16)
    f_store(q.total + d, f_fma(f_load(q.total + d), f_set(old_scale), f_load(q.o + d) * f_set(new_scale)));
}

inline void start_partition(Query& q, int64_t dim) {
  q.max = -kInfinity;
  f_store(q.lanes, f_set(0.f));
  for (int64_t d = 0; d < dim; d += 16) f_store(q.o + d, f_set(0.f));
}

template <class Kv>
void attend(const AttentionArgs& a, Query* queries, int n, const int32_t* pages, int64_t kv_head) {
  const int64_t dim = a.kv.head_dim, offset = kv_head * Kv::head_bytes(dim);
  // Positions ascend over the queries, so the first has the earliest valid key and the last the latest.
  const int32_t first_page = queries[0].first / kPageTokens, last_page = queries[n - 1].last / kPageTokens;
  for (int32_t part = first_page / kPartitionPages; part <= last_page / kPartitionPages; ++part) {
    for (int i = 0; i < n; ++i) start_partition(queries[i], dim);
    const int32_t part_start = part * kPartitionPages, part_end = part_start + kPartitionPages;
    int32_t page = first_page > part_start ? first_page : part_start;
    for (; page < part_end && page <= last_page; ++page) {
      const int32_t start = page * kPageTokens;
      int from = 0, to = n;
      while (from < n && queries[from].last < start) ++from;
      while (to > from && queries[to - 1].first >= start + kPageTokens) --to;
      if (from == to) continue;
      page_step<Kv, kQueries>(a, queries + from, to - from, a.kv.data + pages[page] * a.kv.page_bytes + offset, start);
    }
    for (int i = 0; i < n; ++i)
      if (queries[i].first < part_end * kPageTokens && queries[i].last >= part_start * kPageTokens)
        merge_partition(queries[i], dim);
  }
  for (int i = 0; i < n; ++i) {
    F16 sum = f_set(queries[i].total_sum);
    for (int64_t d = 0; d < dim; d += 16)
      f_store_n(queries[i].out + d, f_load(queries[i].total + d) / sum, tail(dim, d));
  }
}

PS_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
PS_INLINE int64_t block_tokens(int64_t group) { return group >= kBlockQueries ? 1 : kBlockQueries / group; }

int64_t attention_scratch_bytes(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  int64_t group = num_heads / num_kv_heads, queries = group * block_tokens(group);
  return queries * (int64_t(sizeof(Query)) + 4 * (48 + 2 * padded(head_dim))) + 64;
}

inline void start_query(const AttentionArgs& a, Query& q, int64_t token, int64_t head, float* memory) {
  const int64_t dim = a.kv.head_dim, request = a.batch.token_request[token];
  q.q = a.q + token * a.q_stride + head * dim;
  q.out = a.out + token * a.out_stride + head * dim;
  q.position = a.batch.positions[token];
  q.last = a.causal ? q.position : a.batch.positions[a.batch.request_starts[request + 1] - 1];
  q.first = a.window > 0 && q.position >= a.window ? q.position - a.window + 1 : 0;
  q.slope = a.alibi ? a.alibi[head] : 0.f;
  q.p = memory;
  q.lanes = memory + 32;
  q.o = memory + 48;
  q.total = q.o + padded(dim);
  q.total_max = -kInfinity;
  q.total_sum = 0.f;
  for (int64_t d = 0; d < dim; d += 16) f_store(q.total + d, f_set(0.f));
}

void attention(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t heads = a.kv.num_kv_heads, group = a.num_heads / heads, limit = block_tokens(group);
  Query* queries = (Query*)scratch;
  float* memory = (float*)(queries + group * limit);
  const int64_t floats = 48 + 2 * padded(a.kv.head_dim);
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
      const int32_t* pages = a.batch.page_table + int64_t(request_of[token]) * a.batch.page_table_width;
      if (a.kv.layout == PS_KV_INT8) attend<KvInt8>(a, queries, n, pages, h);
      else if (a.kv.layout == PS_KV_BF16) attend<KvBf16>(a, queries, n, pages, h);
      else attend<KvF32>(a, queries, n, pages, h);
    }
    token = stop;
  }
}

}  // namespace
}  // namespace ps

#endif
