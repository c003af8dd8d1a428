// Checks of positions, request starts and page tables.
#include "program/pages.h"

#include "base/kernels.h"

namespace ps {
namespace {

// Table entries [first, last] for the keys that a request reads; the step writes entries from `written` on.
struct Entries { int32_t first, written, last; };

Entries entries_of(const Ragged& batch, int32_t request, int32_t window) {
  const int32_t begin = batch.positions[batch.request_starts[request]];
  const int32_t end = batch.positions[batch.request_starts[request + 1] - 1];
  const int32_t oldest = window > 0 && begin - window + 1 > 0 ? begin - window + 1 : 0;
  return Entries{oldest / PS_PAGE_TOKENS, begin / PS_PAGE_TOKENS, end / PS_PAGE_TOKENS};
}

}  // namespace

ps_status check_requests(const Ragged& batch, int32_t max_position) {
  const int32_t* starts = batch.request_starts;
  if (starts[0] != 0) return fail(PS_INVALID_ARGUMENT, "request_starts[0]: expected 0, got %d", starts[0]);
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    if (starts[r + 1] <= starts[r] || starts[r + 1] > batch.num_tokens) {
      return fail(PS_INVALID_ARGUMENT, "request_starts[%d]: expected more than %d and at most %d, got %d", r + 1,
                  starts[r], batch.num_tokens, starts[r + 1]);
    }
    for (int32_t t = starts[r]; t < starts[r + 1]; ++t) {
      const int32_t position = batch.positions[t];
      if (position < 0 || position >= max_position) {
        return fail(PS_INVALID_ARGUMENT, "positions[%d]: expected 0 to %d, got %d", t, max_position - 1, position);
      }
      if (t > starts[r] && position != batch.positions[t - 1] + 1) {
        return fail(PS_INVALID_ARGUMENT,
                    "positions[%d]: expected %d, one more than the position before it in request %d, got %d", t,
                    batch.positions[t - 1] + 1, r, position);
      }
    }
  }
  if (starts[batch.num_requests] != batch.num_tokens) {
    return fail(PS_INVALID_ARGUMENT, "request_starts[%d]: expected the number of tokens %d, got %d", batch.num_requests,
                batch.num_tokens, starts[batch.num_requests]);
  }
  return PS_OK;
}

ps_status check_whole_requests(const Ragged& batch) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int32_t t = batch.request_starts[r];
    if (batch.positions[t] == 0) continue;
    return fail(PS_UNSUPPORTED,
                "positions[%d]: expected 0, got %d: the network's attention is not causal, so a request's tokens run "
                "in one step, without earlier ones",
                t, batch.positions[t]);
  }
  return PS_OK;
}

ps_status check_page_table(const Ragged& batch, int32_t group, int32_t window, int32_t num_pages, PageOwner* owners,
                           uint32_t step) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const Entries entries = entries_of(batch, r, window);
    if (entries.last >= batch.width) {
      return fail(PS_INVALID_ARGUMENT, "page_table_width: expected at least %d for position %d of request %d, got %d",
                  entries.last + 1, batch.positions[batch.request_starts[r + 1] - 1], r, batch.width);
    }
    const int32_t* row = batch.page_table + static_cast<int64_t>(r) * batch.width;
    for (int32_t e = entries.first; e <= entries.last; ++e) {
      if (row[e] < 0 || row[e] >= num_pages) {
        return fail(PS_INVALID_ARGUMENT, "page_tables[%d][%d][%d]: expected a page from 0 to %d, got %d", group, r, e,
                    num_pages - 1, row[e]);
      }
      if (e < entries.written) continue;
      PageOwner& owner = owners[row[e]];
      if (owner.step == step) {
        return fail(PS_INVALID_ARGUMENT, "page_tables[%d][%d][%d]: page %d is written by this step at [%d][%d] already",
                    group, r, e, row[e], owner.request, owner.entry);
      }
      owner = PageOwner{step, r, e};
    }
  }
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const Entries entries = entries_of(batch, r, window);
    const int32_t* row = batch.page_table + static_cast<int64_t>(r) * batch.width;
    for (int32_t e = entries.first; e < entries.written; ++e) {
      const PageOwner& owner = owners[row[e]];
      if (owner.step == step) {
        return fail(PS_INVALID_ARGUMENT,
                    "page_tables[%d][%d][%d]: page %d is read here and written by this step at [%d][%d]", group, r, e,
                    row[e], owner.request, owner.entry);
      }
    }
  }
  return PS_OK;
}

ps_status check_state_positions(const Ragged& batch, int32_t group, const uint8_t* pages, int64_t page_bytes,
                                int64_t head_elements, bool of_prefix) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int32_t begin = batch.positions[batch.request_starts[r]];
    if (begin == 0) continue;  // a new request
    const int32_t page = batch.page_table[static_cast<int64_t>(r) * batch.width + (begin - 1) / PS_PAGE_TOKENS];
    const float* cell = reinterpret_cast<const float*>(pages + page * page_bytes);
    const float seen = cell[head_elements - 1];
    if (of_prefix && seen == static_cast<float>(begin) && !(cell[0] > 0)) {
      return fail(
          PS_UNSUPPORTED,
          "positions[%d]: expected 0, got %d: tokens of the encoder see later ones, so they run in one step with the "
          "first token of the decoder",
          batch.request_starts[r], begin);
    }
    if (seen == static_cast<float>(begin)) continue;
    return fail(PS_INVALID_ARGUMENT,
                "positions[%d]: expected the %g tokens that the recurrent state of page_tables[%d] has seen, got "
                "position %d: "
                "a recurrent layer cannot go back",
                batch.request_starts[r], static_cast<double>(seen), group, begin);
  }
  return PS_OK;
}

ps_status localize_pages(const Ragged& batch, int32_t group, int32_t window, int32_t rank, int32_t world,
                         int32_t* page_table) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const Entries entries = entries_of(batch, r, window);
    int32_t* row = page_table + static_cast<int64_t>(r) * batch.width;
    const int32_t first = entries.first / kPartitionPages, first_rank = row[entries.first] % world;
    for (int32_t e = 0; e < batch.width; ++e) {
      if (e < entries.first || e > entries.last) {
        row[e] = -1;
        continue;
      }
      const int32_t expected = (first_rank + e / kPartitionPages - first) % world;
      if (row[e] % world != expected) {
        return fail(PS_INVALID_ARGUMENT, "page_tables[%d][%d][%d]: expected a page of rank %d, got %d of rank %d",
                    group, r, e, expected, row[e], row[e] % world);
      }
      row[e] = expected == rank ? row[e] / world : -2 - expected;
    }
  }
  return PS_OK;
}

void fill_token_request(const Ragged& batch, int32_t* token_request) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    for (int32_t t = batch.request_starts[r]; t < batch.request_starts[r + 1]; ++t) token_request[t] = r;
  }
}

}  // namespace ps
