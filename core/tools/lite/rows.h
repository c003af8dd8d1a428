// The sampling parameters of the rows of a step; they differ only in the position in the text.
#ifndef PENSTOCK_LITE_ROWS_H
#define PENSTOCK_LITE_ROWS_H

#include "array.h"
#include "defaults.h"
#include "draft.h"
#include "penstock.h"

namespace lite {

constexpr int64_t kMaxRows = 1 + kMaxDraft;

class Rows {
 public:
  void set(const Defaults& sampling, uint64_t seed, int64_t num_prompt);
  // For rows of which the first is drawn after `end` tokens of the text, and each following one after one more token.
  // Valid until the next call.
  ps_sampling sampling(const int32_t* tokens, int64_t end, int32_t num_rows);

 private:
  void add_history(const int32_t* tokens, int64_t end, int32_t num_rows, ps_sampling* out);

  float temperature_[kMaxRows], top_p_[kMaxRows], min_p_[kMaxRows], typical_p_[kMaxRows], penalty_[kMaxRows];
  int32_t top_k_[kMaxRows], prompt_lens_[kMaxRows], history_starts_[kMaxRows + 1];
  uint64_t seed_[kMaxRows];
  int64_t counter_[kMaxRows][2];
  Array<int32_t> history_;
};

}  // namespace lite

#endif
