// Checks of a ragged batch.  Kernels run only on batches that passed.
#ifndef PENSTOCK_PROGRAM_PAGES_H
#define PENSTOCK_PROGRAM_PAGES_H

#include "base/error.h"
#include "base/memory.h"

namespace ps {

// The arrays of one step or one op, with the page tables of one group.
struct Ragged {
  const int32_t* positions;       // [num_tokens]
  const int32_t* request_starts;  // [num_requests + 1]
  const int32_t* page_table;      // [num_requests][width]
  int32_t num_tokens, num_requests, width;
};

// The last writer of a page: a step, a request of that step, and an entry of its table.
struct PageOwner {
  uint32_t step;
  int32_t request, entry;
};

// Checks request_starts, and that positions ascend by one within a request and are below max_position.
ps_status check_requests(const Ragged& batch, int32_t max_position);
// Checks that every request of the step begins at position 0.  Needed if attention is not causal, where what a step
// writes depends on all tokens of the request.  PS_UNSUPPORTED.
ps_status check_whole_requests(const Ragged& batch);
// Checks that every table entry needed by a key in the window names a page, and that a page that the step writes occurs
// once in the batch. owners: [num_pages], kept between steps; step: must differ from the last call's.
ps_status check_page_table(const Ragged& batch, int32_t group, int32_t window, int32_t num_pages, PageOwner* owners,
                           uint32_t step);
// Checks that every request of the step continues where the recurrent state that it reads ends, because such a state
// cannot be rewound.  The last number of each head of a page is how many tokens it has seen. `of_prefix`: the first is
// the length of the prefix, which is 0 if the request's first step did not have all of it.
ps_status check_state_positions(const Ragged& batch, int32_t group, const uint8_t* pages, int64_t page_bytes,
                                int64_t head_elements, bool of_prefix);
// For pages split over ranks (rank is page % world; partitions of a request are assigned to ranks round-robin).  After
// the checks, replaces an entry of the table by this rank's page, page / world, or by -2 - rank for a page of another
// rank.
ps_status localize_pages(const Ragged& batch, int32_t group, int32_t window, int32_t rank, int32_t world,
                         int32_t* page_table);
void fill_token_request(const Ragged& batch, int32_t* token_request);

}  // namespace ps

#endif
