// Sampling one row of logits: edits, filters and the draw, in the order that docs/explanation/numerics.md gives.
#ifndef PENSTOCK_SAMPLING_ROW_H
#define PENSTOCK_SAMPLING_ROW_H

#include "base/kernels.h"
#include "ops/top.h"

namespace ps {

// The edits of a row's logits before a token is drawn.
struct RowEdits {
  const uint32_t* mask;     // [(vocab+31)/32] or null
  const int32_t* bias_ids;  // [num_bias]
  const float* bias;
  int32_t num_bias;
  const int32_t* history;  // [history_len]: the prompt's tokens first; -1-s: slot s
  int32_t prompt_len, history_len;
  const int32_t* slots;
  float repetition, presence, frequency;

  bool penalizes() const { return history_len > 0 && (repetition != 1 || presence != 0 || frequency != 0); }
  bool any() const { return mask || num_bias > 0 || penalizes(); }
  // The token at i; kFailedSlot if the row that should have sampled it failed.
  int32_t token(int32_t i) const { return history[i] < 0 ? slots[-1 - history[i]] : history[i]; }
};

// The parameters of the draw.
struct RowNumbers {
  float temperature, top_p, min_p, typical_p;  // 0, 1, 0 and 1: off; with temperature 0 nothing is drawn
  int32_t top_k;                               // 0: off
  double uniform;
};

struct RowScratch {
  float* edited;          // [vocab]
  float* weights;         // [vocab]
  Candidate* candidates;  // [vocab]
  int32_t* counts;        // [vocab], zero before and after
};

int64_t row_scratch_bytes(int32_t vocab);
RowScratch row_scratch(uint8_t* memory, int32_t vocab);

// Writes x [vocab], edited, to scratch.edited.
void edit_row(const float* x, int32_t vocab, const RowEdits& edits, const RowScratch& scratch);
// Draws a token of x [vocab], whose greatest logit is at `best` and finite.
int32_t draw_token(const Kernels& kernels, const float* x, int32_t vocab, int32_t best, const RowNumbers& numbers,
                   const RowScratch& scratch);
// Natural logarithm of a positive number, with the same bits on every machine.
double natural_log(double x);

}  // namespace ps

#endif
