// Checking and copying the batch of a step.
// Hot: runs in every step.
#include "program/batch.h"

#include <math.h>

#include "program/program.h"
#include "sampling/sample.h"

namespace ps {
namespace {

ps_status check_count(const char* name, int32_t found, int32_t min, int32_t max) {
  if (found >= min && found <= max) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %d to %d, got %d", name, min, max, found);
}

ps_status check_counts(const ps_program& p, const ps_batch& b) {
  const ps_program_options& o = p.options;
  PS_TRY(check_count("num_tokens", b.num_tokens, 1, o.max_tokens));
  PS_TRY(check_count("num_requests", b.num_requests, 1, o.max_requests));
  PS_TRY(check_count("num_rows", b.num_rows, 0, o.max_rows));
  if (b.flags & ~(PS_BATCH_HIDDEN | PS_BATCH_LOGITS | PS_BATCH_ALL_RANKS))
    return fail(PS_UNSUPPORTED, "flags: 0x%x has bits that this version does not know", b.flags);
  if (b.reserved) return fail(PS_UNSUPPORTED, "reserved: expected 0, got 0x%x", b.reserved);
  const bool has_pages = p.model->graph.page_groups.size() > 0;
  PS_TRY(check_count("page_table_width", b.page_table_width, has_pages ? 1 : 0, INT32_MAX));
  const char* missing = !b.token_ids                       ? "token_ids"
                        : !b.positions                     ? "positions"
                        : !b.request_starts                ? "request_starts"
                        : !b.page_tables && has_pages      ? "page_tables"
                        : !b.output_rows && b.num_rows > 0 ? "output_rows"
                                                           : nullptr;
  return missing ? fail(PS_INVALID_ARGUMENT, "%s: expected an array, got null", missing) : PS_OK;
}

// Copies the token ids; an id -1-s becomes the token last sampled in slot s, or kFailedSlot.
ps_status take_tokens(ps_program* p, const ps_batch& b) {
  const int32_t vocab = p->model->graph.vocab_size;
  p->batch.has_failed = false;
  for (int32_t t = 0; t < b.num_tokens; ++t) {
    int32_t id = b.token_ids[t];
    if (id < 0) {
      const int64_t slot = -1 - static_cast<int64_t>(id);
      if (slot >= p->options.num_slots) {
        return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: expected a token or one of %d slots, got slot %lld", t,
                    p->options.num_slots, static_cast<long long>(slot));
      }
      id = p->batch.slots[slot];
      if (id == kEmptySlot)
        return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: nothing was sampled in slot %lld yet", t,
                    static_cast<long long>(slot));
      p->batch.has_failed |= id == kFailedSlot;
    }
    if (id >= vocab)
      return fail(PS_INVALID_ARGUMENT, "token_ids[%d]: expected less than the vocabulary of %d, got %d", t, vocab, id);
    p->batch.token_ids[t] = id;
  }
  return PS_OK;
}

// A request that reads a failed slot has no token.  It runs with token 0 so that the rest of the batch can run, and its
// rows are marked to get no logits.
void take_failed(ps_program* p, const ps_batch& b) {
  if (!p->batch.has_failed) return;
  for (int32_t r = 0; r < b.num_rows; ++r) {
    const int32_t request = p->batch.token_request[p->batch.output_rows[r]];
    p->batch.failed_rows[r] = 0;
    for (int32_t t = p->batch.request_starts[request]; t < p->batch.request_starts[request + 1]; ++t)
      p->batch.failed_rows[r] |= p->batch.token_ids[t] == kFailedSlot;
  }
  for (int32_t t = 0; t < b.num_tokens; ++t) {
    if (p->batch.token_ids[t] == kFailedSlot) p->batch.token_ids[t] = 0;
  }
}

// All recurrent states of a group have seen the same tokens, so checking the first suffices.
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
  if (++p->batch.step_number == 0) {  // after a wrap, an old owner could match
    memset(static_cast<void*>(p->batch.owners), 0, static_cast<size_t>(p->plan.owner_bytes));
    p->batch.step_number = 1;
  }
  for (int64_t g = 0; g < graph.page_groups.size(); ++g) {
    int32_t* table = p->batch.page_tables + g * b.num_requests * width;
    const bool has_pages = p->plan.used_groups >> g & 1;  // a group without states has no pages that a table could name
    for (int64_t r = 0; r < b.num_requests; ++r) {
      memcpy(table + r * width, b.page_tables + (g * b.num_requests + r) * b.page_table_width,
             static_cast<size_t>(width) * 4);
    }
    const Ragged batch{p->batch.positions, p->batch.request_starts, table, b.num_tokens, b.num_requests, width};
    if (!has_pages) continue;
    const bool is_whole = graph.whole_groups >> g & 1;
    const int32_t num_pages = p->plan.group_pages[g] * (is_whole ? 1 : graph.context_world);
    PageOwner* owners = p->batch.owners + g * p->options.num_pages * graph.context_world;
    PS_TRY(check_page_table(batch, static_cast<int32_t>(g), graph.page_groups[g], num_pages, owners,
                            p->batch.step_number));
    PS_TRY(check_states(p, static_cast<int32_t>(g), batch));
  }
  return PS_OK;
}

// Takes the tokens of wanted-only nodes.  Moving rows costs as much as some of the work that it saves: it pays if at
// most half of the tokens are wanted, each once and in order.
void take_wanted(ps_program* p, const ps_batch& b) {
  p->batch.has_hidden = b.flags & PS_BATCH_HIDDEN;
  bool few = !p->batch.has_hidden && b.num_rows <= b.num_tokens / 2;
  for (int32_t r = 1; few && r < b.num_rows; ++r) few = p->batch.output_rows[r] > p->batch.output_rows[r - 1];
  p->batch.num_wanted = few ? b.num_rows : b.num_tokens;
  for (int32_t k = 0; k < p->batch.num_wanted; ++k) {
    const int32_t row = p->batch.wanted_rows[k] = few ? p->batch.output_rows[k] : k;
    p->batch.wanted_positions[k] = p->batch.positions[row];
    p->batch.wanted_request[k] = p->batch.token_request[row];
  }
  for (int32_t k = 0; few && p->plan.sources.count > 0 && k < p->batch.num_wanted; ++k) p->batch.output_rows[k] = k;
}

}  // namespace

int32_t table_width(const ps_program& p, const ps_batch& b) {
  const int64_t most = p.plan.symbols[ROLE_PAGES];
  return static_cast<int32_t>(b.page_table_width < most ? b.page_table_width : most);
}

ps_status take_batch(ps_program* p, const ps_batch& b) {
  PS_TRY(check_counts(*p, b));
  PS_TRY(take_tokens(p, b));
  memcpy(p->batch.positions, b.positions, static_cast<size_t>(b.num_tokens) * 4);
  memcpy(p->batch.request_starts, b.request_starts, (static_cast<size_t>(b.num_requests) + 1) * 4);
  const int32_t width = table_width(*p, b);
  const Ragged batch{p->batch.positions, p->batch.request_starts, nullptr, b.num_tokens, b.num_requests, width};
  PS_TRY(check_requests(batch, p->model->graph.context_len));
  if (p->model->graph.bidirectional) PS_TRY(check_whole_requests(batch));
  PS_TRY(take_pages(p, b, width));
  for (int32_t r = 0; r < b.num_rows; ++r) {
    const int32_t row = b.output_rows[r];
    if (row < 0 || row >= b.num_tokens) {
      return fail(PS_INVALID_ARGUMENT, "output_rows[%d]: expected a token of the step, 0 to %d, got %d", r,
                  b.num_tokens - 1, row);
    }
    p->batch.output_rows[r] = row;
  }
  fill_token_request(batch, p->batch.token_request);
  take_failed(p, b);
  take_wanted(p, b);
  return PS_OK;
}

// NaN lets sampling and every other reader of the logits find a row that failed.  A graph that ends in ids has no such
// rows.
void clear_failed_rows(ps_program* p, int32_t num_rows) {
  const Graph& graph = p->model->graph;
  float* logits = reinterpret_cast<float*>(p->logits.data());
  const int32_t columns = kBuildsRanks && p->ranks.best_only ? best_parts(*p->context) : graph.vocab_size;
  for (int32_t r = 0; p->batch.has_failed && graph.tail < 0 && graph.output >= 0 && r < num_rows;
       ++r, logits += columns) {
    for (int32_t i = 0; p->batch.failed_rows[r] && i < columns; ++i) logits[i] = NAN;
  }
}

}  // namespace ps
