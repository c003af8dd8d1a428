// The arrays of ps_sampling for the rows of a step.
#include "rows.h"

namespace lite {

void Rows::set(const Defaults& sampling, uint64_t seed, int64_t num_prompt) {
  for (int64_t i = 0; i < kMaxRows; ++i) {
    temperature_[i] = static_cast<float>(sampling.temperature);
    top_k_[i] = static_cast<int32_t>(sampling.top_k);
    top_p_[i] = static_cast<float>(sampling.top_p);
    min_p_[i] = static_cast<float>(sampling.min_p);
    typical_p_[i] = static_cast<float>(sampling.typical_p);
    penalty_[i] = static_cast<float>(sampling.repetition_penalty);
    prompt_lens_[i] = static_cast<int32_t>(num_prompt);
    seed_[i] = seed;
  }
}

ps_sampling Rows::sampling(const int32_t* tokens, int64_t end, int32_t num_rows) {
  ps_sampling out{};
  out.struct_size = sizeof(out);
  out.num_rows = num_rows;
  out.temperature = temperature_;
  out.top_k = top_k_;
  out.top_p = top_p_;
  out.seed = seed_;
  out.counter = counter_[0];
  for (int32_t i = 0; i < num_rows; ++i) {
    counter_[i][0] = 0;
    counter_[i][1] = end + i;
  }
  if (min_p_[0] > 0) out.min_p = min_p_;
  if (typical_p_[0] < 1) out.typical_p = typical_p_;
  if (penalty_[0] != 1) add_history(tokens, end, num_rows, &out);
  return out;
}

// Histories are concatenated; that of a single row is the text itself.
void Rows::add_history(const int32_t* tokens, int64_t end, int32_t num_rows, ps_sampling* out) {
  history_.size = 0;
  history_starts_[0] = 0;
  for (int32_t i = 0; i < num_rows; ++i) {
    if (num_rows > 1) history_.append(tokens, end + i);
    history_starts_[i + 1] = history_starts_[i] + static_cast<int32_t>(end + i);
  }
  out->repetition_penalty = penalty_;
  out->history_starts = history_starts_;
  out->prompt_lens = prompt_lens_;
  out->history = num_rows > 1 ? history_.data : tokens;
}

}  // namespace lite
