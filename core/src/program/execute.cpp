// Execution of one step: check and copy the batch, then walk the steps with all threads (walk.cpp).
// Hot: runs in every step.
#include <math.h>

#include "base/clock.h"
#include "ops/loaded.h"
#include "program/estimate.h"
#include "program/program.h"
#include "program/ranks.h"
#include "sampling/sample.h"

namespace ps {
#if defined(PENSTOCK_PLANTED)
ps_status planted_failure(int32_t num_tokens);  // core/tools/check/planted.cpp: faults for the tests of the tests
#endif
namespace {

// A step that one thread ends sooner than this is not shared: waking another and waiting for it at every barrier costs
// more than it saves, and thousands of times more when something else holds that thread's core.
constexpr int64_t kShortStepNanoseconds = 500000;
// The others wait this long for a thread, or a share of the step, before they go on without it.  Threads on cores of
// their own are late by tens of microseconds.
constexpr int64_t kMinPatience = 400000, kPatienceShare = 32;  // ns; of the step

ps_status check_count(const char* name, int32_t found, int32_t min, int32_t max) {
  if (found >= min && found <= max) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %d to %d, found %d", name, min, max, found);
}

ps_status check_counts(const ps_program& p, const ps_batch& b) {
  const ps_program_options& o = p.options;
  PS_TRY(check_count("num_tokens", b.num_tokens, 1, o.max_tokens));
  PS_TRY(check_count("num_requests", b.num_requests, 1, o.max_requests));
  PS_TRY(check_count("num_rows", b.num_rows, 0, o.max_rows));
  if (b.flags & ~(PS_BATCH_HIDDEN | PS_BATCH_LOGITS | PS_BATCH_ALL_RANKS))
    return fail(PS_UNSUPPORTED, "flags: 0x%x has bits that this version does not know", b.flags);
  if (b.reserved) return fail(PS_UNSUPPORTED, "reserved: expected 0, found 0x%x", b.reserved);
  const bool has_pages = p.model->graph.page_groups.size() > 0;
  PS_TRY(check_count("page_table_width", b.page_table_width, has_pages ? 1 : 0, INT32_MAX));
  const char* missing = !b.token_ids                       ? "token_ids"
                        : !b.positions                     ? "positions"
                        : !b.request_starts                ? "request_starts"
                        : !b.page_tables && has_pages      ? "page_tables"
                        : !b.output_rows && b.num_rows > 0 ? "output_rows"
                                                           : nullptr;
  return missing ? fail(PS_INVALID_ARGUMENT, "%s: expected an array, found null", missing) : PS_OK;
}

// Copies the token ids; an id -1-s becomes the token last sampled in slot s, or kFailedSlot.
ps_status take_tokens(ps_program* p, const ps_batch& b) {
  const int32_t vocab = p->model->graph.vocab_size;
  p->has_failed = false;
  for (int32_t t = 0; t < b.num_tokens; ++t) {
    int32_t id = b.token_ids[t];
    if (id < 0) {
      const int64_t slot = -1 - static_cast<int64_t>(id);
      if (slot >= p->options.num_slots) {
        return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: expected a token or one of %d slots, found slot %lld", t,
                    p->options.num_slots, static_cast<long long>(slot));
      }
      id = p->slots[slot];
      if (id == kEmptySlot)
        return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: nothing was sampled in slot %lld yet", t,
                    static_cast<long long>(slot));
      p->has_failed |= id == kFailedSlot;
    }
    if (id >= vocab)
      return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: expected less than the vocabulary of %d, found %d", t, vocab,
                  id);
    p->token_ids[t] = id;
  }
  return PS_OK;
}

// A request that reads a failed slot has no token there.  It runs with token 0, so that the rest of the batch can run,
// and its rows are marked: they get no logits.
void take_failed(ps_program* p, const ps_batch& b) {
  if (!p->has_failed) return;
  for (int32_t r = 0; r < b.num_rows; ++r) {
    const int32_t request = p->token_request[p->output_rows[r]];
    p->failed_rows[r] = 0;
    for (int32_t t = p->request_starts[request]; t < p->request_starts[request + 1]; ++t)
      p->failed_rows[r] |= p->token_ids[t] == kFailedSlot;
  }
  for (int32_t t = 0; t < b.num_tokens; ++t) {
    if (p->token_ids[t] == kFailedSlot) p->token_ids[t] = 0;
  }
}

// NaN: sampling and every other reader of the logits find a row that failed.  A graph that ends in ids has no row that
// fails.
void clear_failed_rows(ps_program* p, int32_t num_rows) {
  const Graph& graph = p->model->graph;
  float* logits = reinterpret_cast<float*>(p->logits.data());
  const int32_t columns = kBuildsRanks && p->best_only ? best_parts(*p->context) : graph.vocab_size;
  for (int32_t r = 0; p->has_failed && graph.tail < 0 && graph.output >= 0 && r < num_rows; ++r, logits += columns) {
    for (int32_t i = 0; p->failed_rows[r] && i < columns; ++i) logits[i] = NAN;
  }
}

// The recurrent states of a group have seen the same tokens, so the first is looked at.
ps_status check_states(ps_program* p, int32_t group, const Ragged& batch) {
  const Graph& graph = p->model->graph;
  for (int32_t i = 0; i < graph.states.size(); ++i) {
    const State& state = graph.states[i];
    if (state.group != group) continue;
    if (!state.recurrent || has_flag(*p, PS_PROGRAM_EMPTY_KERNELS)) return PS_OK;
    int64_t bytes;
    PS_TRY(page_bytes_of(state, p->options.kv_layout, &bytes));
    return check_state_positions(batch, group, p->kv.data() + p->plan.state_offsets[i], bytes, state.head_dim,
                                 group == graph.prefix_group);
  }
  return PS_OK;
}

ps_status take_pages(ps_program* p, const ps_batch& b, int32_t width) {
  const Graph& graph = p->model->graph;
  if (++p->step_number == 0) {  // a wrapped number could meet an old owner
    memset(static_cast<void*>(p->owners), 0, static_cast<size_t>(p->plan.owner_bytes));
    p->step_number = 1;
  }
  for (int64_t g = 0; g < graph.page_groups.size(); ++g) {
    int32_t* table = p->page_tables + g * b.num_requests * width;
    const bool has_pages = p->plan.used_groups >> g & 1;  // a group without states has no pages that a table could name
    for (int64_t r = 0; r < b.num_requests; ++r) {
      memcpy(table + r * width, b.page_tables + (g * b.num_requests + r) * b.page_table_width,
             static_cast<size_t>(width) * 4);
    }
    const Ragged batch{p->positions, p->request_starts, table, b.num_tokens, b.num_requests, width};
    if (!has_pages) continue;
    const bool is_whole = graph.whole_groups >> g & 1;
    const int32_t num_pages = p->plan.group_pages[g] * (is_whole ? 1 : graph.context_world);
    PageOwner* owners = p->owners + g * p->options.num_pages * graph.context_world;
    PS_TRY(check_page_table(batch, static_cast<int32_t>(g), graph.page_groups[g], num_pages, owners, p->step_number));
    PS_TRY(check_states(p, static_cast<int32_t>(g), batch));
  }
  return PS_OK;
}

// With the context split over ranks, rewrites the page tables to this rank's pages.
ps_status take_own_pages(ps_program* p, const ps_batch& b) {
  const Graph& graph = p->model->graph;
  if (!kBuildsRanks || graph.context_world == 1) return PS_OK;
  const int64_t most = p->plan.symbols[ROLE_PAGES];
  const int32_t width = static_cast<int32_t>(b.page_table_width < most ? b.page_table_width : most);
  const ps_comm& comm = *p->context->comm;
  for (int64_t g = 0; g < graph.page_groups.size(); ++g) {
    if (!((p->plan.used_groups & ~graph.whole_groups) >> g & 1)) continue;
    int32_t* table = p->page_tables + g * b.num_requests * width;
    const Ragged batch{p->positions, p->request_starts, table, b.num_tokens, b.num_requests, width};
    PS_TRY(localize_pages(batch, static_cast<int32_t>(g), graph.page_groups[g], comm.rank % graph.context_world,
                          graph.context_world, table));
  }
  return PS_OK;
}

// Takes the tokens of wanted-only nodes.  Moving rows together costs as much as some of the work that it saves: it pays
// if at most half of the tokens are wanted, each once and in order.
void take_wanted(ps_program* p, const ps_batch& b) {
  p->has_hidden = b.flags & PS_BATCH_HIDDEN;
  bool few = !p->has_hidden && b.num_rows <= b.num_tokens / 2;
  for (int32_t r = 1; few && r < b.num_rows; ++r) few = p->output_rows[r] > p->output_rows[r - 1];
  p->num_wanted = few ? b.num_rows : b.num_tokens;
  for (int32_t k = 0; k < p->num_wanted; ++k) {
    const int32_t row = p->wanted_rows[k] = few ? p->output_rows[k] : k;
    p->wanted_positions[k] = p->positions[row];
    p->wanted_request[k] = p->token_request[row];
  }
  for (int32_t k = 0; few && p->plan.sources.count > 0 && k < p->num_wanted; ++k) p->output_rows[k] = k;
}

ps_status take_batch(ps_program* p, const ps_batch& b) {
  PS_TRY(check_counts(*p, b));
  PS_TRY(take_tokens(p, b));
  memcpy(p->positions, b.positions, static_cast<size_t>(b.num_tokens) * 4);
  memcpy(p->request_starts, b.request_starts, (static_cast<size_t>(b.num_requests) + 1) * 4);
  const int64_t most = p->plan.symbols[ROLE_PAGES];
  const int32_t width = static_cast<int32_t>(b.page_table_width < most ? b.page_table_width : most);
  const Ragged batch{p->positions, p->request_starts, nullptr, b.num_tokens, b.num_requests, width};
  PS_TRY(check_requests(batch, p->model->graph.context_len));
  if (p->model->graph.bidirectional) PS_TRY(check_whole_requests(batch));
  PS_TRY(take_pages(p, b, width));
  for (int32_t r = 0; r < b.num_rows; ++r) {
    const int32_t row = b.output_rows[r];
    if (row < 0 || row >= b.num_tokens) {
      return fail(PS_INVALID_ARGUMENT, "output_rows[%d]: expected a token of the step, 0 to %d, found %d", r,
                  b.num_tokens - 1, row);
    }
    p->output_rows[r] = row;
  }
  fill_token_request(batch, p->token_request);
  take_failed(p, b);
  take_wanted(p, b);
  return PS_OK;
}

// Whether every request goes on behind its prefix, which its first step had: the nodes of the encoder have nothing to
// do.
bool is_behind_prefix(const ps_program& p, const ps_batch& b) {
  bool behind = p.model->graph.prefix_token >= 0;
  for (int32_t r = 0; behind && r < b.num_requests; ++r) behind = p.positions[p.request_starts[r]] > 0;
  return behind;
}

// Sizes of the step into the calls; most steps have those of the step before.
void set_symbols(ps_program* p, const ps_batch& b) {
  int64_t symbols[NUM_ROLES + 1];
  const int64_t most = p->plan.symbols[ROLE_PAGES];
  symbols[ROLE_TOKENS] = b.num_tokens;
  symbols[ROLE_REQUESTS] = b.num_requests;
  symbols[ROLE_PAGES] = b.page_table_width < most ? b.page_table_width : most;
  symbols[ROLE_ROWS] = b.num_rows;
  symbols[kWantedTokens] = p->num_wanted;
  const bool behind_prefix = is_behind_prefix(*p, b);
  if (memcmp(symbols, p->symbols, sizeof(symbols)) == 0 && behind_prefix == p->behind_prefix) return;
  p->behind_prefix = behind_prefix;
  memcpy(p->symbols, symbols, sizeof(symbols));
  for (const Patch& patch : p->patches) *patch.target = evaluate(patch.dim, symbols);
  const Vec<Node>& nodes = p->model->graph.nodes;
  for (int64_t s = 0; s < p->steps.size(); ++s) {
    const int64_t node = p->steps[s].call - p->calls.data();
    const bool left_out = behind_prefix && node < nodes.size() && nodes[node].prefix_only;
    p->steps[s].items = left_out ? 0 : p->phases[s]->items(*p->steps[s].call);
  }
}

void poison(ps_program* p) {
  memset(p->temporaries.data(), 0xFF, static_cast<size_t>(p->plan.temporary_bytes));
  memset(p->logits.data(), 0xFF, static_cast<size_t>(p->plan.logits_bytes));
  memset(p->scratch.data(), 0xFF, static_cast<size_t>(p->plan.shared_scratch));
  memset(p->thread_scratch, 0xFF, static_cast<size_t>(p->plan.thread_scratch * p->context->pool.num_threads()));
}

}  // namespace

ps_span label_span(const ps_program& p, int64_t step, int32_t thread) {
  const Step& s = p.steps[step];
  const int64_t node = s.call - p.calls.data();
  if (node == p.plan.nodes.size()) {  // the wanted rows are moved at the end of the step before it
    ps_span span = label_span(p, step - 1, thread);
    ++span.phase;
    return span;
  }
  int32_t phase = 0;
  while (step - phase > 0 && p.steps[step - phase - 1].call == s.call) ++phase;
  return ps_span{static_cast<int32_t>(node), phase, thread, 0, 0, 0, 0};
}

namespace {

// Each thread has a row of spans, and fills those of the steps that it walks.
void clear_spans(ps_program* p) {
  ps_span* span = spans_of(p) + 1;
  for (int64_t i = p->context->pool.num_threads() * p->steps.size(); i > 0; --i, ++span)
    span->arrive_ns = span->begin_ns = span->end_ns = 0;
}

// Afterwards the rows of those that were there come first.  Steps that one is absent from take it no time.
void gather_spans(ps_program* p, int64_t start_ns) {
  ps_span* const whole = spans_of(p);
  whole->arrive_ns = whole->begin_ns = start_ns;
  whole->end_ns = now_ns();
  const int64_t num_steps = p->steps.size();
  int64_t count = 0;
  for (int32_t t = 0; t < p->context->pool.num_threads(); ++t) {
    const ps_span* row = whole + 1 + t * num_steps;
    ps_span* out = whole + 1 + count * num_steps;
    int64_t last = start_ns, present = 0;
    for (int64_t s = 0; s < num_steps; ++s) {
      ps_span span = row[s];
      present += span.end_ns != 0;
      if (!span.end_ns) span.arrive_ns = span.begin_ns = span.end_ns = span.arrive_ns ? span.arrive_ns : last;
      last = span.end_ns;
      span.thread = t;
      out[s] = span;
    }
    count += present > 0;
  }
  p->num_spans = 1 + count * num_steps;
}

}  // namespace

ps_status profile_program(ps_program* program, bool on) {
  program->profiling = false;
  program->num_spans = 0;
  program->spans.release();
  if (!on) return PS_OK;
  const int64_t threads = program->context->pool.num_threads(), steps = program->steps.size();
  const int64_t bytes = (1 + threads * steps) * static_cast<int64_t>(sizeof(ps_span));
  if (!program->spans.allocate(bytes))
    return fail(PS_OUT_OF_MEMORY, "profile: no memory for %lld bytes", static_cast<long long>(bytes));
  ps_span* span = spans_of(program);
  *span++ = ps_span{-1, 0, 0, 0, 0, 0, 0};
  for (int64_t t = 0; t < threads; ++t) {
    for (int64_t s = 0; s < steps; ++s) *span++ = label_span(*program, s, static_cast<int32_t>(t));
  }
  program->profiling = true;
  return PS_OK;
}

// Returns the failure of a custom op, if one failed: the step then has no result.
static ps_status check_loaded(ps_program* p) {
  if (!p->failure.data()) return PS_OK;
  OpFailure* failure = reinterpret_cast<OpFailure*>(p->failure.data());
  const ps_status status = take_failure(failure);
  if (status == PS_OK) return PS_OK;
  p->num_rows = -1;
  const Node& node = p->model->graph.nodes[failure->call - p->calls.data()];
  return prefix(status, "nodes[%lld] (%.*s): ", static_cast<long long>(failure->call - p->calls.data()),
                PS_STR(node.name));
}

// A step of several ranks fails with the first exchange that failed, and so do all later ones.
static ps_status check_exchange(ps_program* p) {
  if (!has_ranks(*p)) return PS_OK;
  const Exchange* exchange = reinterpret_cast<const Exchange*>(p->exchange.data());
  if (exchange->status == PS_OK) return PS_OK;
  p->num_rows = -1;
  return fail(exchange->status, "%s", exchange->message);
}

// The step of a batch that was taken.
static ps_status run_taken(ps_program* p, const ps_batch& batch, int64_t start_ns) {
  set_symbols(p, batch);
  if (has_flag(*p, PS_PROGRAM_POISON)) poison(p);
  if (p->profiling) clear_spans(p);
  if (has_ranks(*p)) {
    for (const DirectPart& part : p->direct_parts) part.aim(nullptr);
    const Exchange& exchange = *reinterpret_cast<const Exchange*>(p->exchange.data());
    if (exchange.first) exchange.first->aim(exchange.comm->part(exchange.comm->self));
  }
  const Pool::Walk work = p->profiling ? walk_steps_timed : walk_steps;
  const int64_t nanoseconds = estimate_step(*p, batch.num_tokens);
  if (has_flag(*p, PS_PROGRAM_ALL_THREADS) || (has_ranks(*p) && nanoseconds >= kShortStepNanoseconds)) {
    // Of several ranks none goes on without a thread that is late: it may wait for another rank.
    PS_TRY(p->context->pool.walk(work, p, 0, false));
  } else {
    const int64_t patience = nanoseconds / kPatienceShare > kMinPatience ? nanoseconds / kPatienceShare : kMinPatience;
    PS_TRY(p->context->pool.walk(work, p, patience, nanoseconds < kShortStepNanoseconds));
  }
  p->stamp += static_cast<uint64_t>(p->steps.size());
#if defined(PENSTOCK_PLANTED)
  PS_TRY(planted_failure(batch.num_tokens));
#endif
  if (p->profiling) gather_spans(p, start_ns);
  PS_TRY(check_exchange(p));
  PS_TRY(check_loaded(p));
  clear_failed_rows(p, batch.num_rows);
  p->num_rows = batch.num_rows;
  return PS_OK;
}

static ps_status check_in_flight(const ps_program& p, bool some) {
  if ((p.num_in_flight > 0) == some) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "program: expected %s, found %d", some ? "a step in flight" : "no step in flight",
              p.num_in_flight);
}

static ps_status launch(ps_program* p, const ps_batch& batch, bool best_only) {
  PS_TRY(check_exchange(p));
  PS_TRY(check_first_rank(*p));
  // The results of the step that was collected last stay readable.
  const InFlight collected{0, 0, 0, 0, p->num_wanted, p->has_hidden, p->best_only};
  const auto take_and_send = [&] {
    PS_TRY(take_batch(p, batch));
    p->best_only = best_only;
    return send_batch(p, batch);
  };
  const ps_status status = take_and_send();
  if (status == PS_OK) {
    p->in_flight[p->num_in_flight++] =
        InFlight{batch.num_tokens, batch.num_requests, batch.num_rows, batch.page_table_width,
                 p->num_wanted,    p->has_hidden,      best_only};
  }
  p->num_wanted = collected.num_wanted;
  p->has_hidden = collected.has_hidden;
  p->best_only = collected.best_only;
  return status;
}

ps_status launch_program(ps_program* p, const ps_batch& batch, bool best_only) {
  const ps_context& context = *p->context;
  if (!kBuildsRanks || !context.links) return fail(PS_INVALID_ARGUMENT, "program: expected one of a pipeline");
  if (batch.flags & PS_BATCH_ALL_RANKS)
    return fail(PS_UNSUPPORTED, "flags: PS_BATCH_ALL_RANKS: expected ranks without stages");
  const int32_t num_stages = (context.links->world - 1) / context.stage_ranks;
  if (p->num_in_flight >= num_stages)
    return fail(PS_INVALID_ARGUMENT, "program: expected at most %d steps in flight, one for each stage", num_stages);
  for (int32_t t = 0; batch.token_ids && t < batch.num_tokens; ++t) {
    if (batch.token_ids[t] < 0) return fail(PS_UNSUPPORTED, "token_ids[%d]: expected a token, found a slot", t);
  }
  return launch(p, batch, best_only);
}

ps_status collect_program(ps_program* p) {
  const int64_t start_ns = p->profiling ? now_ns() : 0;
  p->num_spans = 0;
  PS_TRY(check_in_flight(*p, true));
  const InFlight step = p->in_flight[0];
  memmove(p->in_flight, p->in_flight + 1, sizeof(InFlight) * static_cast<size_t>(--p->num_in_flight));
  ps_batch batch{};
  batch.num_tokens = step.num_tokens;
  batch.num_requests = step.num_requests;
  batch.num_rows = step.num_rows;
  batch.page_table_width = step.page_table_width;
  p->num_wanted = step.num_wanted;
  p->has_hidden = step.has_hidden;
  p->best_only = step.best_only;
  note_kinds(p);
  return run_taken(p, batch, start_ns);
}

ps_status run_program(ps_program* p, const ps_batch& batch, bool best_only) {
  const int64_t start_ns = p->profiling ? now_ns() : 0;
  p->num_spans = 0;
  if (kBuildsRanks && p->context->links) {
    if (batch.flags & PS_BATCH_ALL_RANKS)
      return fail(PS_UNSUPPORTED, "flags: PS_BATCH_ALL_RANKS: expected ranks without stages");
    PS_TRY(check_in_flight(*p, false));
    PS_TRY(launch(p, batch, best_only));
    return collect_program(p);
  }
  PS_TRY(check_exchange(p));
  const bool on_all = batch.flags & PS_BATCH_ALL_RANKS;
  if (has_ranks(*p) && !on_all) PS_TRY(check_first_rank(*p));
  PS_TRY(take_batch(p, batch));
  p->best_only = has_ranks(*p) && best_only;
  if (has_ranks(*p)) PS_TRY(p->context->comm->rank == 0 ? send_batch(p, batch) : receive_same_batch(p, batch));
  PS_TRY(take_own_pages(p, batch));
  return run_taken(p, batch, start_ns);
}

ps_status follow_program(ps_program* p) {
  p->num_spans = 0;
  PS_TRY(check_exchange(p));
  ps_batch batch{};
  PS_TRY(receive_batch(p, &batch));
  const int64_t start_ns = p->profiling ? now_ns() : 0;
  ps_status status = take_batch(p, batch);
  if (status == PS_OK) status = take_own_pages(p, batch);
  if (status == PS_OK) return run_taken(p, batch, start_ns);
  const ps_comm* group = all_ranks(*p->context);
  group->abort(group->self, error_message());  // the ranks would wait for this one
  return status;
}

}  // namespace ps
