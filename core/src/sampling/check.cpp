// Checks of every number in the sampling arrays before any of them is used.
#include <float.h>
#include <math.h>

#include "sampling/sample.h"

namespace ps {
namespace {

// Checks that each row's number is in [low, high], or in (low, high]; a null array is off.
struct Bounds {
  const char* name;
  const float* numbers;
  float low, high;
  bool above_low;
  const char* expected;
};

ps_status check_numbers(const Bounds& b, int32_t num_rows) {
  for (int32_t r = 0; b.numbers && r < num_rows; ++r) {
    const float x = b.numbers[r];
    if (x <= b.high && (b.above_low ? x > b.low : x >= b.low)) continue;
    return fail(PS_INVALID_ARGUMENT, "%s[%d]: expected %s, got %g", b.name, r, b.expected, static_cast<double>(x));
  }
  return PS_OK;
}

// starts [num_rows + 1]: from 0, not descending; lists that are not empty need the arrays.
ps_status check_starts(const char* name, const int32_t* starts, int32_t num_rows, bool has_arrays) {
  if (starts[0] != 0) return fail(PS_INVALID_ARGUMENT, "%s[0]: expected 0, got %d", name, starts[0]);
  for (int32_t r = 0; r < num_rows; ++r) {
    if (starts[r + 1] >= starts[r]) continue;
    return fail(PS_INVALID_ARGUMENT, "%s[%d]: expected at least %d, got %d", name, r + 1, starts[r], starts[r + 1]);
  }
  if (starts[num_rows] >= 1 << 30)
    return fail(PS_INVALID_ARGUMENT, "%s[%d]: expected less than 2^30, got %d", name, num_rows, starts[num_rows]);
  if (starts[num_rows] > 0 && !has_arrays)
    return fail(PS_INVALID_ARGUMENT, "%s: expected the arrays that it points into, got null", name);
  return PS_OK;
}

ps_status check_token(const char* name, int32_t i, int32_t id, const SampleSource& source) {
  if (id >= 0 && id < source.vocab) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s[%d]: expected a token below %d, got %d", name, i, source.vocab, id);
}

ps_status check_bias(const ps_sampling& s, const SampleSource& source) {
  if (!s.bias_starts) return PS_OK;
  PS_TRY(check_starts("bias_starts", s.bias_starts, source.num_rows, s.bias_ids && s.bias));
  for (int32_t i = 0; i < s.bias_starts[source.num_rows]; ++i) {
    PS_TRY(check_token("bias_ids", i, s.bias_ids[i], source));
    if (!(s.bias[i] <= FLT_MAX)) {
      return fail(PS_INVALID_ARGUMENT, "bias[%d]: expected a number or minus infinity, got %g", i,
                  static_cast<double>(s.bias[i]));
    }
  }
  return PS_OK;
}

ps_status check_history(const ps_sampling& s, const SampleSource& source) {
  if (!s.history_starts) {
    if (!s.repetition_penalty && !s.presence_penalty && !s.frequency_penalty) return PS_OK;
    return fail(PS_INVALID_ARGUMENT, "history_starts: expected the tokens that a penalty counts, got null");
  }
  PS_TRY(check_starts("history_starts", s.history_starts, source.num_rows, s.history));
  if (!s.prompt_lens && source.num_rows)
    return fail(PS_INVALID_ARGUMENT, "prompt_lens: expected an array of %d rows, got null", source.num_rows);
  for (int32_t r = 0; r < source.num_rows; ++r) {
    const int32_t len = s.history_starts[r + 1] - s.history_starts[r];
    if (s.prompt_lens[r] >= 0 && s.prompt_lens[r] <= len) continue;
    return fail(PS_INVALID_ARGUMENT, "prompt_lens[%d]: expected 0 to %d, got %d", r, len, s.prompt_lens[r]);
  }
  for (int32_t i = 0; i < s.history_starts[source.num_rows]; ++i) {
    const int32_t id = s.history[i];
    if (id >= 0) {
      PS_TRY(check_token("history", i, id, source));
    } else if (id < -source.num_slots || source.slots[-1 - id] == kEmptySlot) {
      return fail(PS_INVALID_ARGUMENT, "history[%d]: expected a token or a slot that one was sampled in, got %d", i,
                  id);
    }
  }
  return PS_OK;
}

ps_status check_integers(const ps_sampling& s, const SampleSource& source) {
  for (int32_t r = 0; r < source.num_rows; ++r) {
    if (s.top_k[r] < 0) return fail(PS_INVALID_ARGUMENT, "top_k[%d]: expected 0 (off) or more, got %d", r, s.top_k[r]);
    if (s.slot && (s.slot[r] < -1 || s.slot[r] >= source.num_slots)) {
      return fail(PS_INVALID_ARGUMENT, "slot[%d]: expected -1 or a slot below %d, got %d", r, source.num_slots,
                  s.slot[r]);
    }
    if (s.target && s.target[r] != -1) PS_TRY(check_token("target", r, s.target[r], source));
  }
  return PS_OK;
}

// A field with the value that greedy sampling requires.
struct Greedy {
  const char* name;
  const float* numbers;
  float off;
};

ps_status refuse(const char* name) {
  return fail(PS_UNSUPPORTED, "%s: the graph ends in argmax or topk: it is sampled greedily, and has no logits to give",
              name);
}

}  // namespace

ps_status check_sampling(const ps_sampling& s, const SampleSource& source) {
  const int32_t num_rows = source.num_rows;
  if (s.num_rows != num_rows) {
    return fail(PS_INVALID_ARGUMENT, "num_rows: expected the last step's %d, got %d", num_rows, s.num_rows);
  }
  const char* missing = !s.temperature ? "temperature"
                        : !s.top_k     ? "top_k"
                        : !s.top_p     ? "top_p"
                        : !s.seed      ? "seed"
                        : !s.counter   ? "counter"
                                       : nullptr;
  if (missing && num_rows)
    return fail(PS_INVALID_ARGUMENT, "%s: expected an array of %d rows, got null", missing, num_rows);
  const Bounds all[] = {
      {"temperature", s.temperature, 0, FLT_MAX, false, "0 or a positive number"},
      {"top_p", s.top_p, 0, 1, true, "more than 0 and at most 1"},
      {"min_p", s.min_p, 0, 1, false, "0 (off) to 1"},
      {"typical_p", s.typical_p, 0, 1, true, "more than 0 and at most 1"},
      {"repetition_penalty", s.repetition_penalty, 0, FLT_MAX, true, "a positive number"},
      {"presence_penalty", s.presence_penalty, -FLT_MAX, FLT_MAX, false, "a number"},
      {"frequency_penalty", s.frequency_penalty, -FLT_MAX, FLT_MAX, false, "a number"},
  };
  for (const Bounds& bounds : all) PS_TRY(check_numbers(bounds, num_rows));
  PS_TRY(check_integers(s, source));
  PS_TRY(check_bias(s, source));
  return check_history(s, source);
}

ps_status check_sampled(const ps_sampling& s, const ps_sampled& out, const SampleSource& source) {
  if (!out.ids && source.num_rows) return fail(PS_INVALID_ARGUMENT, "ids: expected an array, got null");
  if (out.num_top < 0 || out.num_top > source.vocab) {
    return fail(PS_INVALID_ARGUMENT, "num_top: expected 0 to %d, got %d", source.vocab, out.num_top);
  }
  if (out.num_top > 0 && (!out.top_ids || !out.top_logprobs || !out.logprobs)) {
    return fail(PS_INVALID_ARGUMENT, "top_ids, top_logprobs, logprobs: expected arrays for num_top, got null");
  }
  if (out.ranks && !out.logprobs)
    return fail(PS_INVALID_ARGUMENT, "logprobs: expected an array beside ranks, got null");
  for (int32_t r = 0; s.num_logprobs && r < source.num_rows; ++r) {
    if (s.num_logprobs[r] >= -1 && s.num_logprobs[r] <= out.num_top) continue;
    return fail(PS_INVALID_ARGUMENT, "num_logprobs[%d]: expected -1 to %d (num_top), got %d", r, out.num_top,
                s.num_logprobs[r]);
  }
  return PS_OK;
}

ps_status check_tail(const ps_sampling& s) {
  const Greedy values[] = {{"temperature", s.temperature, 0},
                           {"repetition_penalty", s.repetition_penalty, 1},
                           {"presence_penalty", s.presence_penalty, 0},
                           {"frequency_penalty", s.frequency_penalty, 0}};
  for (const Greedy& greedy : values) {
    for (int32_t r = 0; greedy.numbers && r < s.num_rows; ++r) {
      if (greedy.numbers[r] != greedy.off) return refuse(greedy.name);
    }
  }
  if (s.mask) return refuse("mask");
  if (s.bias_starts && s.bias_starts[s.num_rows] > 0) return refuse("bias");
  for (int32_t r = 0; r < s.num_rows; ++r) {
    if (s.target && s.target[r] >= 0) return refuse("target");
    if (s.num_logprobs && s.num_logprobs[r] >= 0) return refuse("num_logprobs");
  }
  return PS_OK;
}

}  // namespace ps
