// Samples rows of random, special and hostile numbers.  For any arrays, the core must return a status and a message, or
// tokens below the vocabulary: a crash or a sanitizer report is a failure.
//
//   fuzz_sample ITERATIONS SEED
//
// Every array is a separate allocation of its exact size, so that a sanitizer detects each access beyond it.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "penstock_dev.h"
#include "random.h"

namespace {

struct Case {
  Random* r;
  int32_t rows, vocab;
  int32_t odd;  // one number in this many is hostile; 0: none

  bool is_odd() { return odd && r->index(odd) == 0; }
  float odd_float() {
    static const float values[] = {0, -0.0f, 1, -1, FLT_MAX, -FLT_MAX, FLT_MIN, 1e-45f, INFINITY, -INFINITY, NAN, 2};
    return values[r->index(sizeof(values) / sizeof(values[0]))];
  }
  std::vector<float> floats(int64_t n, float low, float high) {
    std::vector<float> out(static_cast<size_t>(n));
    for (float& x : out) x = is_odd() ? odd_float() : low + (high - low) * r->unit();
    return out;
  }
  std::vector<int32_t> ints(int64_t n, int32_t low, int32_t high) {
    static const int32_t values[] = {0, 1, -1, -2, INT32_MAX, INT32_MIN, 1 << 30, 31, 32};
    std::vector<int32_t> out(static_cast<size_t>(n));
    for (int32_t& x : out) x = is_odd() ? values[r->index(9)] : low + r->index(int64_t{high} - low + 1);
    return out;
  }
  // Starts of `rows` lists that end at *total; hostile ones are arbitrary but stay within the arrays.
  std::vector<int32_t> starts(int32_t* total) {
    std::vector<int32_t> out(static_cast<size_t>(rows) + 1);
    for (int32_t i = 0; i < rows; ++i) out[static_cast<size_t>(i) + 1] = out[static_cast<size_t>(i)] + r->index(6);
    *total = out.back();
    if (rows && is_odd()) out[static_cast<size_t>(r->index(rows))] += r->index(9) - 4;
    return out;
  }
};

template <typename T>
const T* maybe(Random* r, const std::vector<T>& array) {
  return r->index(3) ? array.data() : nullptr;
}

bool try_case(ps_context* context, Random* r, int64_t* sampled_rows) {
  Case c{r, r->index(5), 1 + r->index(r->index(4) ? 70 : 2500), r->index(2) ? 0 : 4 + r->index(200)};
  const int32_t n = c.rows;
  std::vector<float> logits = c.floats(int64_t{n} * c.vocab, -9, 9);
  if (n && r->index(4) == 0) {  // equal values and outliers
    for (float& x : logits) x = r->index(3) ? -INFINITY : static_cast<float>(r->index(3)) * 1e30f;
  }
  const auto temperature = c.floats(n, 0, 2), top_p = c.floats(n, 0.01f, 1), min_p = c.floats(n, 0, 1),
             typical = c.floats(n, 0.01f, 1), repetition = c.floats(n, 0.1f, 2), presence = c.floats(n, -2, 2),
             frequency = c.floats(n, -2, 2);
  const auto top_k = c.ints(n, 0, c.vocab + 3), target = c.ints(n, -1, c.vocab - 1), wanted = c.ints(n, -1, 4);
  const std::vector<uint64_t> seed(static_cast<size_t>(n), r->next());
  const std::vector<int64_t> counter(static_cast<size_t>(n) * 2, static_cast<int64_t>(r->next()));
  std::vector<uint32_t> mask(static_cast<size_t>(n) * static_cast<size_t>((c.vocab + 31) / 32));
  for (uint32_t& word : mask) word = static_cast<uint32_t>(r->next());
  int32_t history_len, num_biases;
  const auto history_starts = c.starts(&history_len), bias_starts = c.starts(&num_biases);
  const auto history = c.ints(history_len, 0, c.vocab - 1), bias_ids = c.ints(num_biases, 0, c.vocab - 1);
  const auto prompt_lens = c.ints(n, 0, 0);
  const auto bias = c.floats(num_biases, -100, 100);

  ps_sampling s{};
  s.struct_size = sizeof(s);
  s.num_rows = n;
  s.temperature = temperature.data();
  s.top_k = top_k.data();
  s.top_p = top_p.data();
  s.seed = seed.data();
  s.counter = counter.data();
  s.mask = maybe(r, mask);
  s.min_p = maybe(r, min_p);
  s.typical_p = maybe(r, typical);
  if ((s.history_starts = maybe(r, history_starts))) {
    s.repetition_penalty = maybe(r, repetition);
    s.presence_penalty = maybe(r, presence);
    s.frequency_penalty = maybe(r, frequency);
    s.prompt_lens = prompt_lens.data();
    s.history = history.data();
  }
  if ((s.bias_starts = maybe(r, bias_starts))) {
    s.bias_ids = bias_ids.data();
    s.bias = bias.data();
  }
  s.target = r->index(4) ? nullptr : target.data();
  s.num_logprobs = maybe(r, wanted);
  std::vector<int32_t> ids(static_cast<size_t>(n)), ranks(ids), status(ids), top_ids(ids.size() * 4);
  std::vector<float> logprobs(ids.size()), top_logprobs(top_ids.size());
  ps_sampled out{};
  out.struct_size = sizeof(out);
  out.num_top = 4;
  out.ids = ids.data();
  out.logprobs = logprobs.data();
  out.ranks = maybe(r, ranks) ? ranks.data() : nullptr;
  out.row_status = r->index(2) ? status.data() : nullptr;
  out.top_ids = top_ids.data();
  out.top_logprobs = top_logprobs.data();
  const ps_status result = ps_sample(context, logits.data(), c.vocab, &s, &out);
  if (result != PS_OK) return result == PS_INVALID_ARGUMENT && *ps_error_message();
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool failed = out.row_status && status[i] != PS_ROW_OK;
    if (failed ? ids[i] != -1 : ids[i] < 0 || ids[i] >= c.vocab) return false;
    const size_t word =
        i * static_cast<size_t>((c.vocab + 31) / 32) + static_cast<size_t>(ids[i] < 0 ? 0 : ids[i] / 32);
    if (!failed && !s.target && s.mask && !(mask[word] >> (ids[i] % 32) & 1)) return false;
    *sampled_rows += !failed;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: fuzz_sample ITERATIONS SEED\n");
    return 2;
  }
  const int64_t iterations = atoll(argv[1]);
  const uint64_t seed = strtoull(argv[2], nullptr, 10);
  ps_context* contexts[2] = {};
  for (int32_t i = 0; i < 2; ++i) {
    const ps_context_options options{sizeof(ps_context_options), i + 1, nullptr, nullptr};
    if (ps_context_create(&options, &contexts[i]) != PS_OK) {
      fprintf(stderr, "%s\n", ps_error_message());
      return 2;
    }
  }
  int64_t sampled_rows = 0;
  for (int64_t i = 0; i < iterations; ++i) {
    Random random{(seed + static_cast<uint64_t>(i)) * 0xD1342543DE82EF95u};
    if (try_case(contexts[random.index(8) == 0], &random, &sampled_rows)) continue;
    fprintf(stderr, "case %lld of seed %llu failed: %s\n", static_cast<long long>(i),
            static_cast<unsigned long long>(seed), ps_error_message());
    return 1;
  }
  for (ps_context* context : contexts) ps_context_destroy(context);
  printf("cases %lld sampled %lld\n", static_cast<long long>(iterations), static_cast<long long>(sampled_rows));
  return 0;
}
