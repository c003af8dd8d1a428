// The ops that communicate between ranks.  Each has three phases: every thread writes its rows of the rank's part, one
// thread exchanges the parts, every thread reads its rows of the result.
#include <float.h>
#include <math.h>
#include <stdio.h>

#include "exchange/exchange.h"
#include "ops/layout.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
const int32_t* i32(const Tensor& t) { return reinterpret_cast<const int32_t*>(t.data); }
int64_t slots(const Tensor& t) {
  return t.rank == 3 ? t.dims[1] : 1;
}  // all_gather cuts the columns of each slot of a row
int64_t rows(const Call& c) { return c.in[0].dims[0]; }
int64_t once(const Call& c) { return c.in[0].dims[0] > 0; }
int64_t read_rows(const Call& c) {
  return c.is_head && !c.exchange->on_all && c.exchange->comm->rank != 0 ? 0 : c.in[0].dims[0];
}

ps_status read_attrs(const AttrValue& starts, const AttrValue& rank, Cut* out) {
  if (!read_cut(starts.s, out)) {
    return fail(PS_INVALID_ARGUMENT, "starts: expected 2 to %d ascending numbers from 0, as \"0|64|128\", got \"%.*s\"",
                PS_MAX_RANKS + 1, PS_STR(starts.s));
  }
  if (rank.i >= 0 && rank.i < out->world) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "rank: expected 0 to %d, got %lld", out->world - 1, static_cast<long long>(rank.i));
}

// Returns whether the rank may write its part: not after a failed exchange, because others may still read it.
bool is_alive(const Call& c) { return c.exchange && c.exchange->status == PS_OK; }

Cut cut_of(const Call& c, int32_t op, int32_t* rank) {
  Cut cut;
  const bool gathers = op == OP_ALL_GATHER;
  *rank = static_cast<int32_t>(c.attrs[gathers ? kAllGatherRank : kShardedRank].i);
  read_cut(c.attrs[gathers ? kAllGatherStarts : kShardedStarts].s, &cut);
  return cut;
}

struct Best {
  float value;
  int32_t id;
};

bool sends_best(const Call& c) { return c.is_head && c.exchange->best_only; }

// The first of equal logits is the best, as in sampling.  A row that sampling would refuse gives NaN.
Best best_of(const Call& c, int64_t row, int64_t first_id) {
  const float* x = f32(c.in[0]) + row * c.in[0].row_stride;
  const int64_t n = c.in[0].dims[1];
  int bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(x[i] <= FLT_MAX);
  const int32_t best = c.kernels->argmax(x, n);
  return Best{bad ? NAN : x[best], static_cast<int32_t>(first_id) + best};
}

void run_put(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!is_alive(c)) return;
  if (sends_best(c)) {
    int32_t rank;
    const Cut cut = cut_of(c, OP_ALL_GATHER, &rank);
    Best* best = static_cast<Best*>(c.exchange->comm->part(c.exchange->comm->self));
    for (int64_t i = begin; i < end; ++i) best[i] = best_of(c, i, cut.starts[rank]);
    return;
  }
  const size_t bytes = static_cast<size_t>(row_elements(c.in[0])) * sizeof(float);
  uint8_t* part = static_cast<uint8_t*>(c.exchange->comm->part(c.exchange->comm->self));
  if (part == c.in[0].data) return;  // it was stored in place
  for (int64_t i = begin; i < end; ++i)
    memcpy(part + static_cast<size_t>(i) * bytes, f32(c.in[0]) + i * c.in[0].row_stride, bytes);
}

void run_gather(const Call& c, int64_t, int64_t, int32_t) {
  if (!c.exchange) return;
  int32_t rank;
  const Cut cut = cut_of(c, OP_ALL_GATHER, &rank);
  for (int32_t r = 0; r < cut.world; ++r) {
    const int64_t row_bytes =
        sends_best(c) ? sizeof(Best) : slots(c.in[0]) * cut.size(r) * static_cast<int64_t>(sizeof(float));
    c.exchange->bytes[r] = rows(c) * row_bytes;
  }
  c.exchange->gather(c);
}

void run_take(const Call& c, int64_t begin, int64_t end, int32_t) {
  int32_t rank;
  const Cut cut = cut_of(c, OP_ALL_GATHER, &rank);
  if (c.exchange && c.exchange->status != PS_OK) return;
  if (sends_best(c)) {
    const BestTokens out = best_tokens(c.out[0].data, rows(c), cut.world);
    for (int64_t i = begin * cut.world; i < end * cut.world; ++i) {
      const Best& best = static_cast<const Best*>(c.exchange->parts[i % cut.world])[i / cut.world];
      out.values[i] = best.value;
      out.ids[i] = best.id;
    }
    return;
  }
  const int64_t count = slots(c.in[0]);
  for (int64_t i = begin; i < end; ++i) {
    float* y = f32(c.out[0]) + i * c.out[0].row_stride;
    for (int32_t r = 0; r < cut.world; ++r) {
      const int64_t size = cut.size(r);
      const float* x = r == rank ? f32(c.in[0]) + i * c.in[0].row_stride
                                 : static_cast<const float*>(c.exchange->parts[r]) + i * count * size;
      for (int64_t slot = 0; slot < count; ++slot)
        memcpy(y + slot * cut.total() + cut.starts[r], x + slot * size, static_cast<size_t>(size) * sizeof(float));
    }
  }
}

int32_t owner_of(const Cut& cut, int64_t id) {
  int32_t rank = 0;
  while (id >= cut.starts[rank + 1]) ++rank;
  return rank;
}

// Counts the tokens before `end` that each rank owns.
void count_tokens(const Call& c, const Cut& cut, int64_t end, int64_t* counts) {
  for (int32_t r = 0; r < cut.world; ++r) counts[r] = 0;
  for (int64_t t = 0; t < end; ++t) ++counts[owner_of(cut, i32(c.in[0])[t])];
}

void embed_row(const Call& c, const Cut& cut, int32_t rank, int64_t token, float* y) {
  const Tensor& w = c.in[kShardedWeight];
  const int32_t row = static_cast<int32_t>(i32(c.in[0])[token] - cut.starts[rank]);
  c.kernels->embedding(WeightView{w.data, w.layout, w.dims[0], w.dims[1]}, &row, y, c.attrs[kShardedDim].i, 0, 1);
}

// The owner of a token's row writes it: a rank's part holds the rows of its tokens, in order.
void run_put_rows(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!is_alive(c)) return;
  int32_t rank;
  const Cut cut = cut_of(c, OP_SHARDED_EMBEDDING, &rank);
  int64_t counts[PS_MAX_RANKS];
  count_tokens(c, cut, begin, counts);
  float* part = static_cast<float*>(c.exchange->comm->part(c.exchange->comm->self));
  for (int64_t t = begin; t < end; ++t) {
    if (owner_of(cut, i32(c.in[0])[t]) == rank)
      embed_row(c, cut, rank, t, part + counts[rank]++ * c.attrs[kShardedDim].i);
  }
}

void run_gather_tokens(const Call& c, int64_t, int64_t, int32_t) {
  if (!c.exchange) return;
  int32_t rank;
  const Cut cut = cut_of(c, OP_SHARDED_EMBEDDING, &rank);
  count_tokens(c, cut, rows(c), c.exchange->bytes);
  for (int32_t r = 0; r < cut.world; ++r)
    c.exchange->bytes[r] *= c.attrs[kShardedDim].i * static_cast<int64_t>(sizeof(float));
  c.exchange->gather(c);
}

void run_take_rows(const Call& c, int64_t begin, int64_t end, int32_t) {
  int32_t rank;
  const Cut cut = cut_of(c, OP_SHARDED_EMBEDDING, &rank);
  const int64_t dim = c.attrs[kShardedDim].i;
  if (c.exchange && c.exchange->status != PS_OK) return;
  int64_t counts[PS_MAX_RANKS];
  count_tokens(c, cut, begin, counts);
  for (int64_t t = begin; t < end; ++t) {
    float* y = f32(c.out[0]) + t * c.out[0].row_stride;
    const int32_t owner = owner_of(cut, i32(c.in[0])[t]);
    if (!c.exchange) {
      embed_row(c, cut, rank, t, y);
      continue;
    }
    memcpy(y, static_cast<const float*>(c.exchange->parts[owner]) + counts[owner]++ * dim,
           static_cast<size_t>(dim) * sizeof(float));
  }
}

size_t row_bytes(const Call& c) { return static_cast<size_t>(c.out[0].dims[1]) * sizeof(float); }

void run_copy(const Call& c, int64_t begin, int64_t end, int32_t) {
  for (int64_t i = begin; i < end; ++i)
    memcpy(f32(c.out[0]) + i * c.out[0].row_stride, f32(c.in[0]) + i * c.in[0].row_stride, row_bytes(c));
}

bool is_root(const Call& c) { return c.attrs[kBroadcastRoot].i == c.attrs[rank_at(OP_BROADCAST)].i; }

void run_put_root(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  if (is_root(c)) run_put(c, begin, end, thread);
}

void run_broadcast(const Call& c, int64_t, int64_t, int32_t) {
  if (!is_alive(c)) return;
  Exchange* e = c.exchange;
  const int64_t bytes = rows(c) * static_cast<int64_t>(row_bytes(c));
  e->keep(e->comm->broadcast(e->comm->self, e->tag++, static_cast<int32_t>(c.attrs[kBroadcastRoot].i), bytes, 0,
                             &e->parts[0]));
}

void run_take_root(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  if (!c.exchange || is_root(c)) return run_copy(c, begin, end, thread);
  if (!is_alive(c)) return;
  const uint8_t* data = static_cast<const uint8_t*>(c.exchange->parts[0]);
  for (int64_t i = begin; i < end; ++i)
    memcpy(f32(c.out[0]) + i * c.out[0].row_stride, data + static_cast<size_t>(i) * row_bytes(c), row_bytes(c));
}

void run_barrier(const Call& c, int64_t, int64_t, int32_t) {
  if (is_alive(c)) c.exchange->keep(c.exchange->comm->barrier(c.exchange->comm->self, c.exchange->tag++));
}

// The bytes that a step of send and recv transfers.
int64_t moved_bytes(const Call& c) {
  if (c.is_hidden && !c.exchange->has_hidden) return 0;
  return rows(c) * static_cast<int64_t>(sends_best(c) ? sizeof(Best) : row_bytes(c));
}

// The best token of a row of logits: of the whole row, or of the ranks' best tokens of their parts.
Best best_of_row(const Call& c, int64_t row) {
  const int64_t parts = c.exchange->comm ? c.exchange->comm->world : 1;
  if (parts == 1) return best_of(c, row, 0);
  const BestTokens found = best_tokens(c.in[0].data, rows(c), static_cast<int32_t>(parts));
  const float* values = found.values + row * parts;
  int64_t best = 0;
  for (int64_t r = 0; r < parts; ++r) {
    if (!(values[r] <= FLT_MAX)) return Best{NAN, 0};
    if (values[r] > values[best]) best = r;
  }
  return Best{values[best], found.ids[row * parts + best]};
}

void run_put_sent(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  if (!c.exchange || !sends_best(c)) return run_copy(c, begin, end, thread);
  const BestTokens out = best_tokens(c.out[0].data, rows(c), 1);
  for (int64_t i = begin; i < end; ++i) {
    const Best best = best_of_row(c, i);
    out.values[i] = best.value;
    out.ids[i] = best.id;
  }
}

// Outputs are contiguous.
void run_send(const Call& c, int64_t, int64_t, int32_t) {
  const int64_t target = c.attrs[kSendTarget].i;
  if (!is_alive(c) || target == c.attrs[rank_at(OP_SEND)].i) return;
  const ps_comm* links = c.exchange->links;
  c.exchange->keep(links->send(links->self, static_cast<int32_t>(target), c.out[0].data, moved_bytes(c)));
}

void run_receive(const Call& c, int64_t, int64_t, int32_t thread) {
  const int64_t source = c.attrs[kRecvSource].i;
  if (source == c.attrs[rank_at(OP_RECV)].i) return run_copy(c, 0, rows(c), thread);
  if (!is_alive(c)) return;
  const ps_comm* links = c.exchange->links;
  c.exchange->keep(links->recv(links->self, static_cast<int32_t>(source), c.out[0].data, moved_bytes(c)));
}

ps_status check_peer(const char* name, const AttrValue& peer, const AttrValue& world) {
  if (peer.i >= 0 && peer.i < world.i) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected 0 to %lld, got %lld", name, static_cast<long long>(world.i - 1),
              static_cast<long long>(peer.i));
}

ps_status copy_rows(const Spec& x, Spec* out) {
  if (x.dtype != PS_F32 || x.rank != 2)
    return fail(PS_INVALID_ARGUMENT, "x: expected f32 with two dims, got %s", describe(x).text);
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {x.dims[0], x.dims[1]}, 0, -1, constant(0)};
  return PS_OK;
}

constexpr Phase kBroadcast[] = {
    {.split = SPLIT_ROWS, .items = rows, .run = run_put_root, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_ITEMS, .items = once, .run = run_broadcast, .reads_scratch = true, .writes_scratch = true},
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_take_root,
     .reads_rows = operands(0),
     .writes_outputs = true,
     .reads_scratch = true},
};
// The second phase is declared to write the outputs, so that it finishes before others read or reuse them.
constexpr Phase kSend[] = {
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_put_sent,
     .reads_rows = operands(0),
     .writes_outputs = true,
     .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = once,
     .run = run_send,
     .writes_outputs = true,
     .reads_scratch = true,
     .writes_scratch = true},
};
constexpr Phase kBarrier[] = {
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_copy,
     .reads_rows = operands(0),
     .writes_outputs = true,
     .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = once,
     .run = run_barrier,
     .writes_outputs = true,
     .reads_scratch = true,
     .writes_scratch = true},
};
constexpr Phase kRecv[] = {{.split = SPLIT_ITEMS,
                            .items = once,
                            .run = run_receive,
                            .reads_all = operands(0),
                            .writes_outputs = true,
                            .writes_scratch = true}};
constexpr Phase kAllGather[] = {
    {.split = SPLIT_ROWS, .items = rows, .run = run_put, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_ITEMS, .items = once, .run = run_gather, .reads_scratch = true, .writes_scratch = true},
    {.split = SPLIT_ROWS,
     .items = read_rows,
     .run = run_take,
     .reads_rows = operands(0),
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kShardedEmbedding[] = {
    {.split = SPLIT_ROWS, .items = rows, .run = run_put_rows, .reads_all = operands(0), .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = once,
     .run = run_gather_tokens,
     .reads_all = operands(0),
     .reads_scratch = true,
     .writes_scratch = true},
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_take_rows,
     .reads_all = operands(0),
     .writes_outputs = true,
     .reads_scratch = true},
};

}  // namespace

ps_status check_membership(const AttrValue& world, const AttrValue& rank) {
  if (world.i < 1 || world.i > PS_MAX_RANKS)
    return fail(PS_INVALID_ARGUMENT, "world: expected 1 to %d, got %lld", PS_MAX_RANKS,
                static_cast<long long>(world.i));
  if (rank.i >= 0 && rank.i < world.i) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "rank: expected 0 to %lld, got %lld", static_cast<long long>(world.i - 1),
              static_cast<long long>(rank.i));
}

bool read_cut(Str text, Cut* out) {
  int32_t count = 0;
  int64_t number = -1;
  for (uint32_t i = 0; i <= text.size; ++i) {
    const char c = i < text.size ? text.data[i] : '|';
    if (c >= '0' && c <= '9') {
      number = (number < 0 ? 0 : number) * 10 + (c - '0');
      if (number > kMaxDim) return false;
    } else if (c == '|' && number >= 0 && count <= PS_MAX_RANKS &&
               (count ? number > out->starts[count - 1] : number == 0)) {
      out->starts[count++] = number;
      number = -1;
    } else {
      return false;
    }
  }
  out->world = count - 1;
  return count >= 2;
}

Membership membership_of(int32_t op, const AttrValue* attrs) {
  int32_t starts = -1, world = -1, rank = -1;
  if (op == OP_ALL_GATHER || op == OP_ALL_GATHER_ROUNDED) starts = kAllGatherStarts, rank = kAllGatherRank;
  if (op == OP_SHARDED_EMBEDDING) starts = kShardedStarts, rank = kShardedRank;
  if (op == OP_BROADCAST) world = world_at(OP_BROADCAST), rank = rank_at(OP_BROADCAST);
  if (op == OP_SEND) world = world_at(OP_SEND), rank = rank_at(OP_SEND);
  if (op == OP_RECV) world = world_at(OP_RECV), rank = rank_at(OP_RECV);
  if (op == OP_BARRIER) world = world_at(OP_BARRIER), rank = rank_at(OP_BARRIER);
  if (op == OP_CONTEXT_ATTENTION) world = world_at(OP_CONTEXT_ATTENTION), rank = rank_at(OP_CONTEXT_ATTENTION);
  if (rank < 0) return Membership{0, 0, false};
  Cut cut{};
  if (starts >= 0) read_cut(attrs[starts].s, &cut);
  return Membership{static_cast<int32_t>(attrs[rank].i), starts >= 0 ? cut.world : static_cast<int32_t>(attrs[world].i),
                    op == OP_CONTEXT_ATTENTION};
}

ps_status no_links(const Membership& member) {
  return fail(PS_UNSUPPORTED, "pipeline_parallel_size: expected 1 without links, got rank %d of a pipeline of %d ranks",
              member.rank, member.world);
}

int64_t part_bytes(int32_t op, const Call& c) {
  if (op == OP_CONTEXT_ATTENTION) return context_part_bytes(c);
  int64_t columns = 0;
  if (op == OP_ALL_GATHER || op == OP_ALL_GATHER_ROUNDED || op == OP_BROADCAST) columns = row_elements(c.in[0]);
  if (op == OP_SHARDED_EMBEDDING) columns = c.attrs[kShardedDim].i;
  int64_t bytes;
  if (checked_mul(c.in[0].dims[0], columns, &bytes) && checked_mul(bytes, 4, &bytes)) return bytes;
  return INT64_MAX;
}

// Nodes store what the next exchange sends into its part, unless the transport has only one buffer, which threads may
// still be reading.
void Exchange::gather(const Call& call) {
  const uint64_t now = tag++;
  if (status != PS_OK) return;
  const void* before = comm->part(comm->self);
  keep(comm->all_gather(comm->self, now, bytes, parts));
  if (!call.next) return;
  void* part = status == PS_OK ? comm->part(comm->self) : nullptr;
  call.next->aim(part == before ? nullptr : part);
}

ps_status Exchange::keep(ps_status found) {
  if (status == PS_OK && found != PS_OK) snprintf(message, sizeof(message), "%s", error_message());
  if (status == PS_OK) status = found;
  return found;
}

ps_status infer_all_gather(const Spec* in, AttrValue* attrs, Spec* out) {
  Cut cut;
  PS_TRY(read_attrs(attrs[kAllGatherStarts], attrs[kAllGatherRank], &cut));
  const int64_t size = cut.size(static_cast<int32_t>(attrs[kAllGatherRank].i));
  const int32_t last = in[0].rank - 1;
  if (in[0].dtype != PS_F32 || (last != 1 && last != 2) || !equal(in[0].dims[last], constant(size))) {
    return fail(PS_INVALID_ARGUMENT, "x: expected f32 rows of %lld, the columns of its rank, got %s",
                static_cast<long long>(size), describe(in[0]).text);
  }
  *out = Spec{OPERAND_VALUE, PS_F32, in[0].rank, {in[0].dims[0], in[0].dims[1]}, 0, -1, constant(0)};
  out->dims[last] = constant(cut.total());
  return PS_OK;
}

ps_status infer_sharded_embedding(const Spec* in, AttrValue* attrs, Spec* out) {
  Cut cut;
  PS_TRY(read_attrs(attrs[kShardedStarts], attrs[kShardedRank], &cut));
  const int64_t size = cut.size(static_cast<int32_t>(attrs[kShardedRank].i));
  if (in[kShardedWeight].dims[0].offset != size) {
    return fail(PS_INVALID_ARGUMENT, "weight: expected %lld rows, those of its rank, got %lld",
                static_cast<long long>(size), static_cast<long long>(in[kShardedWeight].dims[0].offset));
  }
  Spec whole[2] = {in[kShardedIds], in[kShardedWeight]};
  whole[1].dims[0] = constant(cut.total());
  return infer_embedding(whole, attrs, out);
}

ps_status infer_broadcast(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(check_membership(attrs[world_at(OP_BROADCAST)], attrs[rank_at(OP_BROADCAST)]));
  PS_TRY(check_peer("root", attrs[kBroadcastRoot], attrs[world_at(OP_BROADCAST)]));
  return copy_rows(in[0], out);
}

ps_status infer_send(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(check_membership(attrs[world_at(OP_SEND)], attrs[rank_at(OP_SEND)]));
  PS_TRY(check_peer("target", attrs[kSendTarget], attrs[world_at(OP_SEND)]));
  return copy_rows(in[0], out);
}

ps_status infer_recv(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(check_membership(attrs[world_at(OP_RECV)], attrs[rank_at(OP_RECV)]));
  PS_TRY(check_peer("source", attrs[kRecvSource], attrs[world_at(OP_RECV)]));
  const int64_t width = attrs[kRecvWidth].i;
  if (width < 1 || width > kMaxDim)
    return fail(PS_INVALID_ARGUMENT, "width: expected 1 to 2^31, got %lld", static_cast<long long>(width));
  const bool is_own = attrs[kRecvSource].i == attrs[rank_at(OP_RECV)].i;
  if (is_own && (in[0].dtype != PS_F32 || in[0].rank != 2 || !equal(in[0].dims[1], constant(width)))) {
    return fail(PS_INVALID_ARGUMENT, "rows: expected f32 rows of %lld from the rank itself, got %s",
                static_cast<long long>(width), describe(in[0]).text);
  }
  if (in[0].rank > 2) return fail(PS_INVALID_ARGUMENT, "rows: expected one or two dims, got %s", describe(in[0]).text);
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], constant(width)}, 0, -1, constant(0)};
  return PS_OK;
}

ps_status infer_barrier(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(check_membership(attrs[world_at(OP_BARRIER)], attrs[rank_at(OP_BARRIER)]));
  return copy_rows(in[0], out);
}

Phases broadcast_phases(const Call&) { return Phases{kBroadcast, 3}; }
Phases send_phases(const Call&) { return Phases{kSend, 2}; }
Phases recv_phases(const Call&) { return Phases{kRecv, 1}; }
Phases barrier_phases(const Call&) { return Phases{kBarrier, 2}; }
Phases all_gather_phases(const Call&) { return Phases{kAllGather, 3}; }
Phases sharded_embedding_phases(const Call&) { return Phases{kShardedEmbedding, 3}; }

}  // namespace ps
