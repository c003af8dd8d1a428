// Attention over KV pages.  A block is a few tokens of one request with all query heads of one KV head, so that each
// page is loaded once for all of them.  The arithmetic of a query does not depend on the others
// (docs/explanation/numerics.md).
#ifndef PENSTOCK_KERNELS_ATTENTION_H
#define PENSTOCK_KERNELS_ATTENTION_H

namespace ps {
namespace {

constexpr int kBlockQueries = 32;

// The pages that the next block reads first, which are prefetched.
struct Next {
  const int32_t* pages;
  int32_t count;
  int64_t kv_head;
};

inline void add_partition(Query& q, int64_t dim) {
  if (!q.total) {  // the first partition
    q.total = q.o;
    q.total_max = q.max;
    q.total_sum = q.sum;
    return;
  }
  const float m = q.max > q.total_max ? q.max : q.total_max;
  const F16 old_scale = f_exp2_negative(f_set(q.total_max - m)), new_scale = f_exp2_negative(f_set(q.max - m));
  float lanes[16];
  f_store(lanes, f_fma(f_set(q.total_sum), old_scale, f_set(q.sum) * new_scale));
  q.total_sum = lanes[0];
  q.total_max = m;
  for (int64_t d = 0; d < dim; d += 16)
    f_store(q.total + d, f_fma(f_load(q.total + d), old_scale, f_load(q.o + d) * new_scale));
}

// Adds the sink once, after the last partition.  Its exponential is part of the sum; it has no value.
inline void finish_with_sink(const Query& q, int64_t dim) {
  const float sink = *q.sink * kLog2E, m = q.total_max > sink ? q.total_max : sink;
  const F16 scale = f_exp2_negative(f_set(q.total_max - m));
  const F16 sum = f_fma(f_set(q.total_sum), scale, f_exp2_negative(f_set(sink - m)));
  for (int64_t d = 0; d < dim; d += 16) f_store_n(q.out + d, (f_load(q.total + d) * scale) / sum, tail(dim, d));
}

PS_INLINE bool has_int4(const KvView& kv) { return kBuildsInt4 && kv.layout == PS_KV_INT4; }

inline void finish(const AttentionArgs& a, const Query& q, int64_t dim) {
  if (q.sink) {
    finish_with_sink(q, dim);
  } else {
    const F16 sum = f_set(q.total_sum);
    for (int64_t d = 0; d < dim; d += 16) f_store_n(q.out + d, f_load(q.total + d) / sum, tail(dim, d));
  }
  if (has_int4(a.kv)) restore_head(q.out, dim);
}

// Converts the query to the type of the dot product.
template <class Kv>
PS_INLINE void set_factors(Query& q, const KvView& kv) {
  typename Kv::Element* x = (typename Kv::Element*)q.memory;
  const int64_t first = value_dim(kv), rest = kv.head_dim - first;
  q.x = q.q;
  if (Kv::kStep == 1 && rest == 0) return;
  q.x = x;
  if (Kv::kScaled && has_int4(kv)) {  // int4 pages hold no latents
    rotate_head(q.q, q.spare, first);
    for (int64_t d = 0; d < first; d += 16) Kv::put(x + d, f_load_n(q.spare + d, tail(first, d)));
    return;
  }
  for (int64_t d = 0; d < first; d += 16) Kv::put(x + d, f_load_n(q.q + d, tail(first, d)));
  for (int64_t d = 0; d < rest; d += 16) Kv::put(x + first + d, f_load_n(q.q_rope + d, tail(rest, d)));
}

// The pages that at least one query of a block sees.  With prefixes, an earlier token may see more keys than a later
// one.
struct PageRange { int32_t first, last; };
PS_INLINE PageRange pages_seen(const Query* queries, int n) {
  int32_t first = queries[0].first, last = queries[0].last;
  for (int i = 1; i < n; ++i) {
    first = queries[i].first < first ? queries[i].first : first;
    last = queries[i].last > last ? queries[i].last : last;
  }
  return {first / kPageTokens, last / kPageTokens};
}

// Computes those of the partitions [part, part_end) that the queries of a block see.
template <class Kv>
void attend(const AttentionArgs& a, Query* queries, int n, const int32_t* pages, int64_t kv_head, int32_t part,
            int32_t part_end, const Next& after) {
  const bool widens = Kv::kScaled && has_int4(a.kv);
  const int64_t dim = a.kv.head_dim, head_bytes = widens ? KvInt4::head_bytes(dim) : Kv::head_bytes(dim);
  const int64_t offset = kv_head * head_bytes, values = value_dim(a.kv);
  for (int i = 0; i < n; ++i) set_factors<Kv>(queries[i], a.kv);
  const PageRange seen = pages_seen(queries, n);
  const int32_t first_page = seen.first, last_page = seen.last;
  if (part < first_page / kPartitionPages) part = first_page / kPartitionPages;
  for (; part < part_end && part * kPartitionPages <= last_page; ++part) {
    Partition p;
    const int32_t page = part * kPartitionPages;
    p.start = page * kPageTokens;
    p.begin = first_page > page ? first_page - page : 0;
    p.end = last_page - page + 1 < kPartitionPages ? last_page - page + 1 : kPartitionPages;
    if (pages[page + p.begin] < 0) continue;  // another rank computes it
    const bool more = part + 1 < part_end && page + kPartitionPages <= last_page;
    for (int i = p.begin; i < p.end; ++i) {
      const int32_t next = page + kPartitionPages + i;
      p.heads[i] = a.kv.data + pages[page + i] * a.kv.page_bytes + offset;
      p.ahead[i] = p.heads[i];
      if (widens) {
        uint8_t* const widened = queries[0].values + i * Kv::head_bytes(dim);
        widen_head(p.heads[i], dim, widened);
        p.heads[i] = widened;
      }
      p.values[i] = a.kv.latent_dim ? queries[0].values : Kv::values(p.heads[i], dim);
      if (more && next <= last_page && pages[next] >= 0)
        p.ahead[i] = a.kv.data + pages[next] * a.kv.page_bytes + offset;
      if (!more && i - p.begin < after.count)
        p.ahead[i] = a.kv.data + after.pages[i - p.begin] * a.kv.page_bytes + after.kv_head * head_bytes;
    }
    const int32_t slot = a.num_ranks > 1 ? part / a.num_ranks : part;
    for (int i = 0; a.partials && i < n; ++i) queries[i].o = queries[i].partials + slot * partial_floats(values) + 16;
    partition_step<Kv>(a, queries, n, p);
    for (int i = 0; i < n; ++i) {
      Query& q = queries[i];
      if (q.end <= q.begin) continue;
      if (a.partials) {
        q.o[-16] = q.max;
        q.o[-15] = q.sum;
      } else {
        add_partition(q, values);
        if (q.total == q.o) q.o = q.spare;
      }
    }
  }
}

PS_INLINE int64_t block_tokens(int64_t group) { return group >= kBlockQueries ? 1 : kBlockQueries / group; }
// 16 more than the parts: the second part of a query is stored in whole vectors from an unaligned start.
PS_INLINE int64_t query_floats(const KvView& kv) {
  return kPartitionTokens + 2 * padded(value_dim(kv)) + padded(kv.head_dim) + 16;
}
// Memory for the values of a page of latents, or for the pages of a partition of int4.
PS_INLINE int64_t values_bytes(const KvView& kv) {
  return has_int4(kv) ? kPartitionPages * KvInt8::head_bytes(kv.head_dim) : 4 * kPageTokens * kv.latent_dim;
}

int64_t attention_scratch_bytes(int32_t num_heads, const KvView& kv) {
  int64_t group = num_heads / kv.num_kv_heads, queries = group * block_tokens(group);
  return queries * (int64_t(sizeof(Query)) + 4 * query_floats(kv)) + values_bytes(kv) + 64;
}

// The scratch memory of a thread: values_bytes, then the queries, then the vectors of each query.
struct Memory {
  Query* queries;
  float* vectors;
  int64_t each;
};
PS_INLINE Memory memory_of(const AttentionArgs& a, void* scratch, int64_t queries) {
  uint8_t* after_values = (uint8_t*)scratch + values_bytes(a.kv);
  return {(Query*)after_values, (float*)((Query*)after_values + queries), query_floats(a.kv)};
}

inline void place_query(const AttentionArgs& a, Query& q, int64_t token, int64_t head) {
  const int64_t dim = value_dim(a.kv), request = a.batch.token_request[token];
  q.q = a.q + token * a.q_stride + head * dim;
  q.q_rope = a.q_rope ? a.q_rope + token * a.q_rope_stride + head * (a.kv.head_dim - dim) : nullptr;
  q.out = a.out + token * a.out_stride + head * dim;
  q.position = a.batch.positions[token];
  const int32_t newest = a.batch.positions[a.batch.request_starts[request + 1] - 1];
  q.last = a.causal ? q.position : newest;
  q.first = a.window > 0 && q.position >= a.window ? q.position - a.window + 1 : 0;
  if (a.window > 0 && q.last - q.position >= a.window)  // bidirectional
    q.last = q.position + a.window - 1;
  if (a.keys != KEYS_ALL) {
    const int32_t prefix = a.prefix[token] < 1 ? 1 : a.prefix[token];
    if (a.keys == KEYS_PREFIX && prefix <= q.last) q.last = prefix - 1;
    if (a.keys == KEYS_REST && prefix <= q.position) q.first = prefix;
    if (a.keys == KEYS_SPAN && prefix > q.last) q.last = prefix <= newest ? prefix - 1 : newest;
  }
  q.bias = a.bias ? a.bias + head * (2 * a.bias_reach + 1) + a.bias_reach : nullptr;
  q.c2p = a.c2p ? a.c2p + token * a.c2p_stride + head * a.num_buckets : nullptr;
  q.p2c = a.p2c ? a.p2c + a.batch.request_starts[request] * a.p2c_stride + head * a.num_buckets : nullptr;
  q.slope = a.alibi ? a.alibi[head] : 0.f;
  q.sink = a.sinks ? a.sinks + head : nullptr;
  q.total = nullptr;
  q.next_q = q.next_out = nullptr;
  q.total_max = q.total_sum = 0.f;
}

inline void start_query(const AttentionArgs& a, const Memory& memory, int64_t index, int64_t token, int64_t head) {
  Query& q = memory.queries[index];
  place_query(a, q, token, head);
  q.p = memory.vectors + index * memory.each;
  q.o = q.p + kPartitionTokens;
  q.spare = q.o + padded(value_dim(a.kv));
  q.memory = q.spare + padded(value_dim(a.kv));
  q.values = (uint8_t*)memory.queries - values_bytes(a.kv);
}

PS_INLINE const int32_t* pages_of(const AttentionArgs& a, int64_t token) {
  return a.batch.page_table + int64_t(a.batch.token_request[token]) * a.batch.page_table_width;
}

// Returns the pages of the block that begins with this token and head.
PS_INLINE Next next_of(const AttentionArgs& a, int64_t token, int64_t kv_head) {
  Query q;
  place_query(a, q, token, 0);
  const int32_t first = q.first / kPageTokens;
  return {pages_of(a, token) + first, q.last / kPageTokens + 1 - first, kv_head};
}

// Sets the queries of the next block.  One is prefetched with each current query, because prefetching all of them at
// once would stall.
inline void set_next(const AttentionArgs& a, Query* queries, int n, int64_t token, int64_t stop, int64_t kv_head) {
  const int64_t group = a.num_heads / a.kv.num_kv_heads;
  for (int i = 0; i < n; ++i) {
    const int64_t t = token + i / group, offset = (kv_head * group + i % group) * value_dim(a.kv);
    if (t >= stop) return;
    queries[i].next_q = a.q + t * a.q_stride + offset;
    queries[i].next_out = a.out + t * a.out_stride + offset;
  }
}

// The translation unit for the bf16 dot product leaves out float32 pages, which gain nothing from it.
#ifdef __AVX512BF16__
constexpr bool kFloatPages = false;
#else
constexpr bool kFloatPages = builds_kv(PS_KV_F32);
#endif

void attend_any(const AttentionArgs& a, Query* queries, int n, int64_t token, int64_t kv_head, int32_t part,
                int32_t part_end, const Next& after) {
  const int32_t* pages = pages_of(a, token);
  if constexpr (kBuildsInt8) {
    if (a.kv.layout == PS_KV_INT8 || has_int4(a.kv))
      return attend<KvInt8>(a, queries, n, pages, kv_head, part, part_end, after);
  }
  if constexpr (builds_kv(PS_KV_BF16)) {
    if (a.kv.layout == PS_KV_BF16) return attend<KvBf16>(a, queries, n, pages, kv_head, part, part_end, after);
  }
  if constexpr (kFloatPages) return attend<KvF32>(a, queries, n, pages, kv_head, part, part_end, after);
}

// Returns the offset of the partial results of a head.
PS_INLINE int64_t partials_at(const AttentionArgs& a, int64_t token, int64_t head) {
  return ((token - a.first_token) * a.num_heads + head) * a.num_parts * partial_floats(value_dim(a.kv));
}

void attention(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t heads = a.kv.num_kv_heads, group = a.num_heads / heads, limit = block_tokens(group);
  const int64_t dim = value_dim(a.kv);
  const Memory memory = memory_of(a, scratch, group * limit);
  Query* queries = memory.queries;
  const int32_t* request_of = a.batch.token_request;
  for (int64_t token = begin / heads; token * heads < end;) {
    int64_t stop = token + 1;
    while (stop * heads < end && stop - token < limit && request_of[stop] == request_of[token]) ++stop;
    for (int64_t h = 0; h < heads; ++h) {
      int n = 0;
      for (int64_t t = token; t < stop; ++t) {
        if (t * heads + h < begin || t * heads + h >= end) continue;
        for (int64_t g = 0; g < group; ++g, ++n) {
          start_query(a, memory, n, t, h * group + g);
          if (a.partials) queries[n].partials = a.partials + partials_at(a, t, h * group + g);
        }
      }
      if (n == 0) continue;
      const int64_t next_token = h + 1 < heads ? token : stop;
      Next after = {nullptr, 0, 0};
      if (next_token * heads < end) {
        after = next_of(a, next_token, h + 1 < heads ? h + 1 : 0);
        set_next(a, queries, n, next_token, (end + heads - 1) / heads, after.kv_head);
      }
      attend_any(a, queries, n, token, h, 0, INT32_MAX, after);
      for (int i = 0; !a.partials && i < n; ++i) finish(a, queries[i], dim);
    }
    token = stop;
  }
}

void attention_part(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  const int64_t heads = a.kv.num_kv_heads, group = a.num_heads / heads;
  const Memory memory = memory_of(a, scratch, group);
  Query* queries = memory.queries;
  for (int64_t item = begin; item < end;) {
    const int64_t part = item % a.num_parts, h = item / a.num_parts % heads, token = item / a.num_parts / heads;
    const int64_t stop = part + end - item < a.num_parts ? part + end - item : a.num_parts;
    for (int64_t g = 0; g < group; ++g) {
      start_query(a, memory, g, token, h * group + g);
      queries[g].partials = a.partials + partials_at(a, token, h * group + g);
    }
    attend_any(a, queries, int(group), token, h, int32_t(part), int32_t(stop), Next{nullptr, 0, 0});
    item += stop - part;
  }
}

// The partial result of one partition of a query, in the memory of the rank that computed it.
inline float* partial_of(const AttentionArgs& a, const Query& q, int64_t token, int64_t head, int32_t part) {
  const int64_t at = partials_at(a, token, head), floats = partial_floats(value_dim(a.kv));
  if (a.num_ranks <= 1) return a.partials + at + part * floats;
  const int32_t first = q.first / kPageTokens, page = part * kPartitionPages;
  const int32_t entry = pages_of(a, token)[page > first ? page : first];
  return (float*)a.rank_partials[entry < 0 ? -2 - entry : a.rank] + at + part / a.num_ranks * floats;
}

void attention_merge(const AttentionArgs& a, int64_t begin, int64_t end) {
  const int64_t dim = value_dim(a.kv);
  float total[kMaxHeadDim];
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < a.num_heads; ++head) {
      Query q;
      place_query(a, q, token, head);
      for (int32_t part = q.first / kPartitionTokens; part <= q.last / kPartitionTokens; ++part) {
        float* of = partial_of(a, q, token, head, part);
        q.max = of[0];
        q.sum = of[1];
        q.o = of + 16;
        if (a.num_ranks > 1 && !q.total) {  // other ranks read this memory: the sum goes elsewhere
          for (int64_t d = 0; d < dim; d += 16) f_store(total + d, f_load(q.o + d));
          q.o = total;
        }
        add_partition(q, dim);
      }
      finish(a, q, dim);
    }
}

}  // namespace
}  // namespace ps

#endif
