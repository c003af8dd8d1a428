// Execution of one step: its sizes are written into the calls, then all threads run the list of steps (walk.cpp).
// Hot: runs in every step.
#include "base/clock.h"
#include "program/program.h"

namespace ps {
#if defined(PENSTOCK_PLANTED)
ps_status planted_failure(int32_t num_tokens);  // core/tools/check/planted.cpp: injected faults that check the tests
                                                // themselves
#endif
namespace {

// Shorter steps run on one thread: waking another and waiting for it at every barrier costs more than it saves, and
// thousands of times more if something else occupies that thread's core.
constexpr int64_t kShortStepNanoseconds = 500000;
// How long the others wait for a thread, at least, or as a share of the step, before they continue without it.  Threads
// with their own cores are late by tens of microseconds.
constexpr int64_t kMinPatience = 400000, kPatienceShare = 32;  // ns; of the step

// Returns true if every request continues after its prefix, which its first step computed.  The encoder's nodes are
// then skipped.
bool is_behind_prefix(const ps_program& p, const ps_batch& b) {
  bool behind = p.model->graph.prefix_token >= 0;
  for (int32_t r = 0; behind && r < b.num_requests; ++r) behind = p.batch.positions[p.batch.request_starts[r]] > 0;
  return behind;
}

// Writes the sizes of the step into the calls, if they differ from those of the step before.
void set_symbols(ps_program* p, const ps_batch& b) {
  int64_t symbols[NUM_ROLES + 1];
  symbols[ROLE_TOKENS] = b.num_tokens;
  symbols[ROLE_REQUESTS] = b.num_requests;
  symbols[ROLE_PAGES] = table_width(*p, b);
  symbols[ROLE_ROWS] = b.num_rows;
  symbols[kWantedTokens] = p->batch.num_wanted;
  const bool behind_prefix = is_behind_prefix(*p, b);
  if (memcmp(symbols, p->last.symbols, sizeof(symbols)) == 0 && behind_prefix == p->last.behind_prefix) return;
  p->last.behind_prefix = behind_prefix;
  memcpy(p->last.symbols, symbols, sizeof(symbols));
  for (const Patch& patch : p->bound.patches) *patch.target = evaluate(patch.dim, symbols);
  const Vec<Node>& nodes = p->model->graph.nodes;
  for (int64_t s = 0; s < p->bound.steps.size(); ++s) {
    const int64_t node = p->bound.steps[s].call - p->bound.calls.data();
    const bool left_out = behind_prefix && node < nodes.size() && nodes[node].prefix_only;
    p->bound.steps[s].items = left_out ? 0 : p->bound.phases[s]->items(*p->bound.steps[s].call);
  }
}

void poison(ps_program* p) {
  memset(p->temporaries.data(), 0xFF, static_cast<size_t>(p->plan.temporary_bytes));
  memset(p->logits.data(), 0xFF, static_cast<size_t>(p->plan.logits_bytes));
  memset(p->scratch.data(), 0xFF, static_cast<size_t>(p->plan.shared_scratch));
  memset(p->thread_scratch, 0xFF, static_cast<size_t>(p->plan.thread_scratch * p->context->pool.num_threads()));
}

}  // namespace

ps_status check_failure(const ps_program& p) {
  OpFailure* const failure = p.bound.failure.get();
  if (!failure) return PS_OK;
  const ps_status status = take_failure(failure);
  if (status == PS_OK) return PS_OK;
  const Node& node = p.model->graph.nodes[failure->call - p.bound.calls.data()];
  return prefix(status, "nodes[%lld] (%s%s%.*s): ", static_cast<long long>(failure->call - p.bound.calls.data()),
                failure->call->loaded ? "" : op_name(node.op), failure->call->loaded ? "" : " ", PS_STR(node.name));
}

ps_status run_taken(ps_program* p, const ps_batch& batch, int64_t start_ns) {
  set_symbols(p, batch);
  if (has_flag(*p, PS_PROGRAM_POISON)) poison(p);
  if (p->spans.on) clear_spans(p);
  if (has_ranks(*p)) aim_direct_parts(p);
  const Pool::Walk work = p->spans.on ? walk_steps_timed : walk_steps;
  const int64_t nanoseconds = estimate_step(*p, batch.num_tokens);
  if (has_flag(*p, PS_PROGRAM_ALL_THREADS) || (has_ranks(*p) && nanoseconds >= kShortStepNanoseconds)) {
    // With several ranks, no rank continues without a late thread, because the thread may be waiting for another rank.
    PS_TRY(p->context->pool.walk(work, p, 0, false));
  } else {
    const int64_t patience = nanoseconds / kPatienceShare > kMinPatience ? nanoseconds / kPatienceShare : kMinPatience;
    PS_TRY(p->context->pool.walk(work, p, patience, nanoseconds < kShortStepNanoseconds));
  }
  p->last.stamp += static_cast<uint64_t>(p->bound.steps.size());
#if defined(PENSTOCK_PLANTED)
  PS_TRY(planted_failure(batch.num_tokens));
#endif
  if (p->spans.on) gather_spans(p, start_ns);
  if (has_ranks(*p)) PS_TRY(check_exchange(p));
  const ps_status status = check_failure(*p);
  if (status != PS_OK) {
    p->last.num_rows = -1;  // the step has no result
    return status;
  }
  clear_failed_rows(p, batch.num_rows);
  p->last.num_rows = batch.num_rows;
  return PS_OK;
}

ps_status run_program(ps_program* p, const ps_batch& batch, bool best_only) {
  if (has_ranks(*p)) return run_on_ranks(p, batch, best_only);
  const int64_t start_ns = p->spans.on ? now_ns() : 0;
  p->spans.count = 0;
  PS_TRY(take_batch(p, batch));
  return run_taken(p, batch, start_ns);
}

}  // namespace ps
