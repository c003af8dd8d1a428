// Sending and receiving a batch.  Rank 0 samples, so it replaces slots by token ids before it sends.
#include "program/ranks.h"

#include <stdio.h>

#include <algorithm>

#include "bundle/validate.h"
#include "base/clock.h"
#include "program/program.h"

namespace ps {
namespace {

constexpr uint64_t kFirstTag = 0x62617463685f3031u, kSecondTag = kFirstTag + 1;

// Every rank counts its steps, so a rank that is out of step sees a number other than its own.
struct Message {
  uint64_t step, hash;  // of all that follows
  int32_t num_tokens, num_requests, num_rows, page_table_width;
  uint32_t flags, reserved;
};
constexpr uint32_t kBestOnly = 1u << 31;  // in addition to PS_BATCH_*
constexpr int64_t kShortBytes = 4096;     // sent in one message; a longer batch is sent again as a whole

int64_t num_integers(const ps_program& p, const Message& m) {
  const int64_t tables = p.model->graph.page_groups.size() * m.num_requests * m.page_table_width;
  return 2 * int64_t{m.num_tokens} + m.num_requests + 1 + m.num_rows + tables;
}

int64_t message_bytes(const ps_program& p, const Message& m) {
  return static_cast<int64_t>(sizeof(Message)) + num_integers(p, m) * 4;
}

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 32;
}

uint64_t hash_of(const ps_program& p, const Message& m, const int32_t* integers) {
  uint64_t hash =
      mix(m.step, uint64_t{static_cast<uint32_t>(m.num_tokens)} << 32 | static_cast<uint32_t>(m.num_requests));
  hash = mix(hash, uint64_t{static_cast<uint32_t>(m.num_rows)} << 32 | static_cast<uint32_t>(m.page_table_width));
  hash = mix(hash, m.flags);
  const int64_t count = num_integers(p, m);
  for (int64_t i = 0; i < count; ++i) hash = mix(hash, static_cast<uint32_t>(integers[i]));
  return hash;
}

ps_status check_fits(const ps_program& p, int64_t bytes) {
  const ps_comm& comm = *all_ranks(*p.context);
  if (bytes <= comm.part_bytes && kShortBytes <= comm.part_bytes) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "part_bytes: expected a comm of at least %lld for the batch, got %lld",
              static_cast<long long>(bytes < kShortBytes ? kShortBytes : bytes),
              static_cast<long long>(comm.part_bytes));
}

ps_status end_group(const ps_program& p, const char* what, uint64_t expected, uint64_t found) {
  const ps_comm& comm = *all_ranks(*p.context);
  char reason[192];
  snprintf(reason, sizeof(reason), "rank %d expected %s %llx from rank 0, got %llx", comm.rank, what,
           static_cast<unsigned long long>(expected), static_cast<unsigned long long>(found));
  comm.abort(comm.self, reason);
  return fail(PS_ABORTED, "ranks: %s", reason);
}

Exchange& exchange_of(ps_program* p) { return *p->ranks.exchange.get(); }

// In a pipeline each rank receives rank 0's data from the stage before, and forwards it before it computes.
ps_status pass_on(ps_program* p, const uint8_t* data, int64_t bytes) {
  const ps_comm& links = *p->context->links;
  const int32_t stage_ranks = p->context->stage_ranks, first = links.rank ? links.rank + stage_ranks : 1;
  const int32_t count = links.rank ? 1 : stage_ranks;
  for (int32_t r = first; r < first + count && r < links.world; ++r)
    PS_TRY(exchange_of(p).keep(links.send(links.self, r, data, bytes)));
  return PS_OK;
}

ps_status take_passed(ps_program* p, uint8_t* data, int64_t bytes, bool forever) {
  const ps_comm& links = *p->context->links;
  const int32_t from = links.rank > p->context->stage_ranks ? links.rank - p->context->stage_ranks : 0;
  if (forever && links.await) PS_TRY(exchange_of(p).keep(links.await(links.self, from)));
  return exchange_of(p).keep(links.recv(links.self, from, data, bytes));
}

// Rank 0's data.
ps_status broadcast(ps_program* p, uint64_t tag, int64_t bytes, bool forever, const void** data) {
  if (const ps_comm* links = p->context->links) {
    uint8_t* part = static_cast<uint8_t*>(links->part(links->self));
    if (links->rank) PS_TRY(take_passed(p, part, bytes, forever));
    *data = part;
    return pass_on(p, part, bytes);
  }
  const ps_comm& comm = *p->context->comm;
  return exchange_of(p).keep(comm.broadcast(comm.self, tag, 0, bytes, forever, data));
}

}  // namespace

static ps_status check_first_rank(const ps_program& p) {
  if (all_ranks(*p.context)->rank == 0) return PS_OK;
  return fail(PS_INVALID_ARGUMENT,
              "program: expected rank 0, which begins every step, got rank %d; it follows with ps_program_follow",
              all_ranks(*p.context)->rank);
}

static void note_kinds(ps_program* p) {
  exchange_of(p).best_only = p->ranks.best_only;
  exchange_of(p).has_hidden = p->batch.has_hidden;
}

static ps_status send_batch(ps_program* p, const ps_batch& b) {
  const ps_comm& comm = *all_ranks(*p->context);
  Message m{.step = p->ranks.steps,
            .hash = 0,  // below
            .num_tokens = b.num_tokens,
            .num_requests = b.num_requests,
            .num_rows = b.num_rows,
            .page_table_width = table_width(*p, b),
            .flags = b.flags | (p->ranks.best_only ? kBestOnly : 0),
            .reserved = 0};
  const int64_t bytes = message_bytes(*p, m);
  PS_TRY(check_fits(*p, bytes));
  const void* data;
  for (int32_t sending = 0; sending < (bytes > kShortBytes ? 2 : 1); ++sending) {
    uint8_t* part = static_cast<uint8_t*>(comm.part(comm.self));
    int32_t* const first = reinterpret_cast<int32_t*>(part + sizeof(Message));
    int32_t* at = first;
    const auto put = [&](const int32_t* from, int64_t count) {
      if (count > 0) memcpy(at, from, static_cast<size_t>(count) * 4);  // the pointer of an empty array may be null
      at += count;
    };
    if (bytes <= kShortBytes || sending) {
      put(p->batch.token_ids, b.num_tokens);
      put(p->batch.positions, b.num_tokens);
      put(p->batch.request_starts, int64_t{b.num_requests} + 1);
      put(b.output_rows, b.num_rows);
      put(p->batch.page_tables, p->model->graph.page_groups.size() * m.num_requests * m.page_table_width);
      m.hash = hash_of(*p, m, first);
    }
    memcpy(part, &m, sizeof(m));
    PS_TRY(broadcast(p, sending ? kSecondTag : kFirstTag, sending ? bytes : kShortBytes, false, &data));
  }
  ++p->ranks.steps;
  exchange_of(p).tag = m.hash;
  note_kinds(p);
  exchange_of(p).on_all = b.flags & PS_BATCH_ALL_RANKS;
  return PS_OK;
}

static ps_status receive_batch(ps_program* p, ps_batch* b) {
  PS_TRY(check_fits(*p, kShortBytes));
  const void* data;
  Message m;
  PS_TRY(broadcast(p, kFirstTag, kShortBytes, true, &data));
  memcpy(&m, data, sizeof(m));
  if (m.step != p->ranks.steps) return end_group(*p, "step", p->ranks.steps, m.step);
  const ps_program_options& o = p->options;
  const bool within = m.num_tokens > 0 && m.num_tokens <= o.max_tokens && m.num_requests > 0 &&
                      m.num_requests <= o.max_requests && m.num_rows >= 0 && m.num_rows <= o.max_rows &&
                      m.page_table_width >= 0 && m.page_table_width <= p->plan.symbols[ROLE_PAGES];
  if (!within)
    return end_group(*p, "a batch of at most so many tokens:", static_cast<uint64_t>(o.max_tokens),
                     static_cast<uint64_t>(m.num_tokens));
  const int64_t bytes = message_bytes(*p, m);
  if (bytes > kShortBytes) {
    PS_TRY(check_fits(*p, bytes));
    PS_TRY(broadcast(p, kSecondTag, bytes, false, &data));
    memcpy(&m.hash, static_cast<const uint8_t*>(data) + 8, 8);
  }
  const int32_t* at = reinterpret_cast<const int32_t*>(static_cast<const uint8_t*>(data) + sizeof(Message));
  const uint64_t hash = hash_of(*p, m, at);
  if (hash != m.hash) return end_group(*p, "a batch of the hash", hash, m.hash);
  const auto take = [&](int64_t count) {
    const int32_t* from = at;
    at += count;
    return from;
  };
  b->struct_size = sizeof(ps_batch);
  b->num_tokens = m.num_tokens;
  b->num_requests = m.num_requests;
  b->num_rows = m.num_rows;
  b->page_table_width = m.page_table_width;
  b->flags = m.flags & ~kBestOnly;
  p->ranks.best_only = m.flags & kBestOnly;
  b->token_ids = take(m.num_tokens);
  b->positions = take(m.num_tokens);
  b->request_starts = take(int64_t{m.num_requests} + 1);
  b->output_rows = take(m.num_rows);
  b->page_tables = take(p->model->graph.page_groups.size() * m.num_requests * m.page_table_width);
  ++p->ranks.steps;
  exchange_of(p).tag = hash;
  exchange_of(p).best_only = p->ranks.best_only;
  exchange_of(p).has_hidden = m.flags & PS_BATCH_HIDDEN;
  exchange_of(p).on_all = m.flags & PS_BATCH_ALL_RANKS;
  return PS_OK;
}

static ps_status receive_same_batch(ps_program* p, const ps_batch& own) {
  ps_batch first{};
  PS_TRY(receive_batch(p, &first));
  const int64_t width = table_width(*p, own);
  const auto equal = [](const int32_t* a, const int32_t* b, int64_t count) {
    return count == 0 || memcmp(a, b, static_cast<size_t>(count) * 4) == 0;
  };
  const bool same_sizes = own.num_tokens == first.num_tokens && own.num_requests == first.num_requests &&
                          own.num_rows == first.num_rows && width == first.page_table_width;
  const int64_t tables = p->model->graph.page_groups.size() * own.num_requests * width;
  const char* what = own.flags != first.flags                                      ? "flags"
                     : !same_sizes                                                 ? "sizes"
                     : !equal(p->batch.token_ids, first.token_ids, own.num_tokens) ? "token_ids"
                     : !equal(own.positions, first.positions, own.num_tokens)      ? "positions"
                     : !equal(own.request_starts, first.request_starts, int64_t{own.num_requests} + 1)
                         ? "request_starts"
                     : !equal(own.output_rows, first.output_rows, own.num_rows) ? "output_rows"
                     : !equal(p->batch.page_tables, first.page_tables, tables)  ? "page_tables"
                                                                                : nullptr;
  if (!what) return PS_OK;
  const ps_comm& comm = *p->context->comm;
  const ps_status status =
      fail(PS_INVALID_ARGUMENT, "batch: expected equal batches on all ranks, got other %s on rank %d than on rank 0",
           what, comm.rank);
  comm.abort(comm.self, error_message());
  return status;
}

void aim_direct_parts(ps_program* p) {
  for (const DirectPart& part : p->ranks.direct_parts) part.aim(nullptr);
  const Exchange& exchange = exchange_of(p);
  if (exchange.first) exchange.first->aim(exchange.comm->part(exchange.comm->self));
}

// A step of several ranks fails with the first exchange that failed, and so do all later steps.
ps_status check_exchange(ps_program* p) {
  const Exchange* const exchange = p->ranks.exchange.get();
  if (exchange->status == PS_OK) return PS_OK;
  p->last.num_rows = -1;
  return fail(exchange->status, "%s", exchange->message);
}

// With the context split over ranks, rewrites the page tables to this rank's pages.
static ps_status take_own_pages(ps_program* p, const ps_batch& b) {
  const Graph& graph = p->model->graph;
  if (graph.context_world == 1) return PS_OK;
  const int32_t width = table_width(*p, b);
  const ps_comm& comm = *p->context->comm;
  for (int64_t g = 0; g < graph.page_groups.size(); ++g) {
    if (!((p->plan.used_groups & ~graph.whole_groups) >> g & 1)) continue;
    int32_t* table = p->batch.page_tables + g * b.num_requests * width;
    const Ragged batch{p->batch.positions, p->batch.request_starts, table, b.num_tokens, b.num_requests, width};
    PS_TRY(localize_pages(batch, static_cast<int32_t>(g), graph.page_groups[g], comm.rank % graph.context_world,
                          graph.context_world, table));
  }
  return PS_OK;
}

static ps_status check_in_flight(const ps_program& p, bool some) {
  if ((p.ranks.num_in_flight > 0) == some) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "program: expected %s, got %d", some ? "a step in flight" : "no step in flight",
              p.ranks.num_in_flight);
}

static ps_status launch(ps_program* p, const ps_batch& batch, bool best_only) {
  PS_TRY(check_exchange(p));
  PS_TRY(check_first_rank(*p));
  // The results of the step that was collected last remain valid.
  const int32_t num_wanted = p->batch.num_wanted;
  const bool has_hidden = p->batch.has_hidden, had_best_only = p->ranks.best_only;
  const auto take_and_send = [&] {
    PS_TRY(take_batch(p, batch));
    p->ranks.best_only = best_only;
    return send_batch(p, batch);
  };
  const ps_status status = take_and_send();
  if (status == PS_OK) {
    p->ranks.in_flight[p->ranks.num_in_flight++] = InFlight{.num_tokens = batch.num_tokens,
                                                            .num_requests = batch.num_requests,
                                                            .num_rows = batch.num_rows,
                                                            .page_table_width = batch.page_table_width,
                                                            .num_wanted = p->batch.num_wanted,
                                                            .has_hidden = p->batch.has_hidden,
                                                            .best_only = best_only};
  }
  p->batch.num_wanted = num_wanted;
  p->batch.has_hidden = has_hidden;
  p->ranks.best_only = had_best_only;
  return status;
}

ps_status launch_program(ps_program* p, const ps_batch& batch, bool best_only) {
  const ps_context& context = *p->context;
  if (!kBuildsRanks || !context.links) return fail(PS_INVALID_ARGUMENT, "program: expected one of a pipeline");
  if (batch.flags & PS_BATCH_ALL_RANKS)
    return fail(PS_UNSUPPORTED, "flags: PS_BATCH_ALL_RANKS: expected ranks without stages");
  const int32_t num_stages = (context.links->world - 1) / context.stage_ranks;
  if (p->ranks.num_in_flight >= num_stages)
    return fail(PS_INVALID_ARGUMENT, "program: expected at most %d steps in flight, one for each stage", num_stages);
  for (int32_t t = 0; batch.token_ids && t < batch.num_tokens; ++t) {
    if (batch.token_ids[t] < 0) return fail(PS_UNSUPPORTED, "token_ids[%d]: expected a token, got a slot", t);
  }
  return launch(p, batch, best_only);
}

ps_status collect_program(ps_program* p) {
  const int64_t start_ns = p->spans.on ? now_ns() : 0;
  p->spans.count = 0;
  PS_TRY(check_in_flight(*p, true));
  const InFlight step = p->ranks.in_flight[0];
  memmove(p->ranks.in_flight, p->ranks.in_flight + 1, sizeof(InFlight) * static_cast<size_t>(--p->ranks.num_in_flight));
  ps_batch batch{};
  batch.num_tokens = step.num_tokens;
  batch.num_requests = step.num_requests;
  batch.num_rows = step.num_rows;
  batch.page_table_width = step.page_table_width;
  p->batch.num_wanted = step.num_wanted;
  p->batch.has_hidden = step.has_hidden;
  p->ranks.best_only = step.best_only;
  note_kinds(p);
  return run_taken(p, batch, start_ns);
}

ps_status run_on_ranks(ps_program* p, const ps_batch& batch, bool best_only) {
  const int64_t start_ns = p->spans.on ? now_ns() : 0;
  p->spans.count = 0;
  const bool on_all = batch.flags & PS_BATCH_ALL_RANKS;
  if (p->context->links) {
    if (on_all) return fail(PS_UNSUPPORTED, "flags: PS_BATCH_ALL_RANKS: expected ranks without stages");
    PS_TRY(check_in_flight(*p, false));
    PS_TRY(launch(p, batch, best_only));
    return collect_program(p);
  }
  PS_TRY(check_exchange(p));
  if (!on_all) PS_TRY(check_first_rank(*p));
  PS_TRY(take_batch(p, batch));
  p->ranks.best_only = best_only;
  PS_TRY(p->context->comm->rank == 0 ? send_batch(p, batch) : receive_same_batch(p, batch));
  PS_TRY(take_own_pages(p, batch));
  return run_taken(p, batch, start_ns);
}

ps_status follow_program(ps_program* p) {
  p->spans.count = 0;
  PS_TRY(check_exchange(p));
  ps_batch batch{};
  PS_TRY(receive_batch(p, &batch));
  const int64_t start_ns = p->spans.on ? now_ns() : 0;
  ps_status status = take_batch(p, batch);
  if (status == PS_OK) status = take_own_pages(p, batch);
  if (status == PS_OK) return run_taken(p, batch, start_ns);
  const ps_comm* group = all_ranks(*p->context);
  group->abort(group->self, error_message());  // otherwise the ranks would wait for this one
  return status;
}

ps_status describe_rank(const ps_model& model, const ps_program_options& o, ps_rank_info* out) {
  const Graph& graph = model.graph;
  if (graph.kind == KIND_NETWORK) return PS_OK;  // a single rank
  const int64_t tables = graph.page_groups.size() * o.max_requests * max_table_width(graph);
  const int64_t most_rows = std::max({o.max_tokens, o.max_rows, o.max_requests});
  int64_t bytes = std::max(kShortBytes, static_cast<int64_t>(sizeof(Message)) +
                                            (2 * int64_t{o.max_tokens} + o.max_requests + 1 + o.max_rows + tables) * 4);
  for (const Node& node : graph.nodes) {
    AttrValue attrs[kMaxAttrs];
    Cut cut{};
    PS_TRY(bind_node_attrs(node, attrs));
    int64_t columns = node.op == OP_SHARDED_EMBEDDING ? attrs[kShardedDim].i : 0;
    if (node.op == OP_ALL_GATHER || node.op == OP_ALL_GATHER_ROUNDED) {
      read_cut(attrs[kAllGatherStarts].s, &cut);
      const Value& x = graph.values[node.inputs[0].index];
      const int64_t slots = x.rank == 3 ? x.dims[1].offset : 1;
      for (int32_t r = 0; r < cut.world; ++r) columns = std::max(columns, slots * cut.size(r));
    }
    if (node.op == OP_BROADCAST) columns = graph.values[node.inputs[0].index].dims[1].offset;
    bytes = std::max(bytes, most_rows * columns * 4);
    if (node.op == OP_CONTEXT_ATTENTION) {
      const Value& q = graph.values[node.inputs[0].index];
      Call call{};
      memcpy(call.attrs, attrs, sizeof(attrs));
      call.in[kAttentionQ] = Tensor{nullptr, PS_F32, 2, 0, {o.max_tokens, q.row_elements}, q.row_elements};
      call.in[kAttentionState].dims[2] = graph.states[node.inputs[kAttentionState].index].head_dim;
      call.in[kAttentionPageTables].dims[2] = max_table_width(graph);
      bytes = std::max(bytes, part_bytes(node.op, call));
    }
    const Membership member = membership_of(node.op, attrs);
    if (node.op == OP_SEND || node.op == OP_RECV) return no_links(member);
    if (member.world > 1 && member.world >= out->world) out->rank = member.rank, out->world = member.world;
  }
  out->part_bytes = bytes;
  return PS_OK;
}

}  // namespace ps
