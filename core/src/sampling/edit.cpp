// Edits of a row of logits before sampling: token mask, biases and penalties.
// Hot: runs in every step.
#include <float.h>
#include <math.h>
#include <string.h>

#include "sampling/row.h"

namespace ps {
namespace {

constexpr int32_t kOfPrompt = 1 << 30;  // flag beside the count of generated tokens

float bounded(float x) { return x > FLT_MAX ? FLT_MAX : x; }

void apply_mask(const uint32_t* mask, int32_t vocab, float* x) {
  for (int32_t begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == 0xFFFFFFFFu) continue;
    const int32_t n = vocab - begin < 32 ? vocab - begin : 32;
    for (int32_t i = 0; i < n; ++i) {
      if (!(word >> i & 1)) x[begin + i] = -INFINITY;
    }
  }
}

void apply_penalties(const RowEdits& edits, int32_t* counts, float* x) {
  for (int32_t i = 0; i < edits.history_len; ++i) {
    int32_t* const count = &counts[edits.token(i)];
    if (i < edits.prompt_len) {
      *count = kOfPrompt;
    } else {
      ++*count;
    }
  }
  for (int32_t i = 0; i < edits.history_len; ++i) {
    const int32_t token = edits.token(i);
    if (!counts[token]) continue;  // already done at its first occurrence
    const int32_t of_answer = counts[token] & (kOfPrompt - 1);
    counts[token] = 0;
    float y = x[token];
    y = y > 0 ? y / edits.repetition : y * edits.repetition;
    y -= edits.frequency * static_cast<float>(of_answer);
    if (of_answer) y -= edits.presence;
    x[token] = bounded(y);
  }
}

}  // namespace

void edit_row(const float* x, int32_t vocab, const RowEdits& edits, const RowScratch& scratch) {
  float* const y = scratch.edited;
  memcpy(y, x, static_cast<size_t>(vocab) * sizeof(float));
  if (edits.mask) apply_mask(edits.mask, vocab, y);
  for (int32_t i = 0; i < edits.num_bias; ++i) y[edits.bias_ids[i]] = bounded(y[edits.bias_ids[i]] + edits.bias[i]);
  if (edits.penalizes()) apply_penalties(edits, scratch.counts, y);
}

}  // namespace ps
