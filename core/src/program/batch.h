// The batch of a step: checked and copied into the program's memory.
#ifndef PENSTOCK_PROGRAM_BATCH_H
#define PENSTOCK_PROGRAM_BATCH_H

#include "base/error.h"
#include "program/pages.h"

namespace ps {

// The program's private copy of a batch, inside the scratch memory (bind_scratch).  take_batch writes it.
struct BatchCopy {
  int32_t *token_ids = nullptr, *positions = nullptr, *request_starts = nullptr, *page_tables = nullptr,
          *output_rows = nullptr, *token_request = nullptr;
  int32_t* slots = nullptr;        // the tokens last sampled, written by sampling
  int32_t* failed_rows = nullptr;  // [num_rows]: whether the row's request follows a row that failed
  bool has_failed = false;         // the step reads a slot whose row failed
  int32_t *wanted_rows = nullptr, *wanted_positions = nullptr, *wanted_request = nullptr;  // for wanted tokens
  int32_t num_wanted = 0;   // tokens of wanted-only nodes
  bool has_hidden = false;  // the last step has its hidden rows
  PageOwner* owners = nullptr;
  uint32_t step_number = 0;  // identifies the step in owners
};

// Checks and copies the batch.  After an error the copy is incomplete and no step may run.
ps_status take_batch(ps_program* program, const ps_batch& batch);
// The width of the page tables in the copy.
int32_t table_width(const ps_program& program, const ps_batch& batch);
// Fills the logits of failed rows with NaN.
void clear_failed_rows(ps_program* program, int32_t num_rows);

}  // namespace ps

#endif
