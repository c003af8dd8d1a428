// Sampling of all rows of a step on the threads of the context.
// Hot: runs in every step.
#include "sampling/sample.h"

#include <float.h>
#include <math.h>

#include <atomic>

#include "sampling/row.h"

namespace ps {
namespace {

// Below this many logits, about 50 us of work, waking another thread does not pay.
constexpr int64_t kSharedNumbers = 65536;

// Neither NaN nor plus infinity.
bool is_sound(const float* x, int32_t n) {
  int bad = 0;
  for (int32_t i = 0; i < n; ++i) bad |= !(x[i] <= FLT_MAX);
  return !bad;
}

double uniform_of(uint64_t seed, int64_t sample, int64_t position) {
  const uint64_t p = static_cast<uint64_t>(position), s = static_cast<uint64_t>(sample);
  const uint32_t counter[4] = {static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), static_cast<uint32_t>(s),
                               static_cast<uint32_t>(s >> 32)};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t out[4];
  philox(counter, key, out);
  const uint64_t bits = (static_cast<uint64_t>(out[0]) << 21) | (out[1] >> 11);
  return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

struct Job {
  const Kernels* kernels;
  const SampleSource* source;
  const ps_sampling* sampling;
  const ps_sampled* out;
  uint8_t* scratch;
  std::atomic<int32_t> next{0};
  std::atomic<int64_t> first_error{INT64_MAX};  // row * 4 + ps_row_status: the smallest row wins
};

float at(const float* numbers, int32_t r, float otherwise) { return numbers ? numbers[r] : otherwise; }

RowEdits edits_of(const Job& job, int32_t r) {
  const ps_sampling& s = *job.sampling;
  RowEdits edits{};
  edits.repetition = at(s.repetition_penalty, r, 1);
  edits.presence = at(s.presence_penalty, r, 0);
  edits.frequency = at(s.frequency_penalty, r, 0);
  edits.slots = job.source->slots;
  if (s.mask) edits.mask = s.mask + static_cast<int64_t>(r) * ((job.source->vocab + 31) / 32);
  if (s.bias_starts) {
    edits.bias_ids = s.bias_ids + s.bias_starts[r];
    edits.bias = s.bias + s.bias_starts[r];
    edits.num_bias = s.bias_starts[r + 1] - s.bias_starts[r];
  }
  if (s.history_starts) {
    edits.history = s.history + s.history_starts[r];
    edits.history_len = s.history_starts[r + 1] - s.history_starts[r];
    edits.prompt_len = s.prompt_lens[r];
  }
  return edits;
}

RowNumbers numbers_of(const ps_sampling& s, int32_t r) {
  return RowNumbers{s.temperature[r],      s.top_p[r], at(s.min_p, r, 0),
                    at(s.typical_p, r, 1), s.top_k[r], uniform_of(s.seed[r], s.counter[2 * r], s.counter[2 * r + 1])};
}

// The log-probabilities of a row's token and of its most likely tokens, from the logits of the graph.
void report(const Job& job, int32_t r, const float* x, int32_t id, const RowScratch& scratch) {
  const ps_sampled& out = *job.out;
  const int32_t vocab = job.source->vocab;
  const int32_t num_wanted = job.sampling->num_logprobs ? job.sampling->num_logprobs[r] : 0;
  if (!out.logprobs || num_wanted < 0) return;
  const float top = job.kernels->max(x, vocab);
  const double log_sum = natural_log(job.kernels->exp_sum(x, vocab, top, 1.0f, nullptr));
  const auto log_probability = [&](float value) {
    return static_cast<float>(static_cast<double>(value) - top - log_sum);
  };
  out.logprobs[r] = log_probability(x[id]);
  if (out.ranks) {
    int32_t ahead = 0;
    for (int32_t i = 0; i < vocab; ++i) ahead += x[i] > x[id] || (x[i] == x[id] && i < id);
    out.ranks[r] = ahead + 1;
  }
  const int64_t num_best = take_best(x, vocab, num_wanted, scratch.candidates);
  for (int64_t i = 0; i < num_best; ++i) {
    const int64_t to = static_cast<int64_t>(r) * out.num_top + i;
    out.top_ids[to] = scratch.candidates[i].id;
    out.top_logprobs[to] = log_probability(scratch.candidates[i].value);
  }
}

// The outputs of rows that failed, and log-probabilities that were not requested.
void clear(const ps_sampled& out, int32_t r) {
  out.ids[r] = -1;
  if (out.logprobs) out.logprobs[r] = NAN;
  if (out.ranks) out.ranks[r] = 0;
  for (int32_t i = 0; i < out.num_top; ++i) {
    out.top_ids[static_cast<int64_t>(r) * out.num_top + i] = -1;
    out.top_logprobs[static_cast<int64_t>(r) * out.num_top + i] = NAN;
  }
}

bool follows_failed_row(const RowEdits& edits) {
  for (int32_t i = 0; edits.penalizes() && i < edits.history_len; ++i) {
    if (edits.token(i) == kFailedSlot) return true;
  }
  return false;
}

ps_row_status sample_row(const Job& job, int32_t r, const RowScratch& scratch) {
  const ps_sampling& s = *job.sampling;
  const int32_t vocab = job.source->vocab;
  const float* const logits = job.source->logits + static_cast<int64_t>(r) * vocab;
  clear(*job.out, r);
  if (!is_sound(logits, vocab)) return PS_ROW_NOT_FINITE;
  int32_t id = s.target ? s.target[r] : -1;
  if (id < 0) {
    const float* x = logits;
    const RowEdits edits = edits_of(job, r);
    if (follows_failed_row(edits)) return PS_ROW_NOT_FINITE;
    if (edits.any()) {
      edit_row(logits, vocab, edits, scratch);
      x = scratch.edited;
    }
    id = job.kernels->argmax(x, vocab);
    if (!(x[id] > -INFINITY)) return PS_ROW_MASKED;
    if (s.temperature[r] > 0) id = draw_token(*job.kernels, x, vocab, id, numbers_of(s, r), scratch);
  } else if (!(job.kernels->max(logits, vocab) > -INFINITY)) {
    return PS_ROW_MASKED;
  }
  report(job, r, logits, id, scratch);
  job.out->ids[r] = id;
  return PS_ROW_OK;
}

void run_job(void* argument, int32_t thread) {
  Job* job = static_cast<Job*>(argument);
  const int32_t vocab = job->source->vocab;
  const RowScratch scratch = row_scratch(job->scratch + thread * sample_scratch_bytes(vocab), vocab);
  for (int32_t r; (r = job->next.fetch_add(1)) < job->source->num_rows;) {
    const ps_row_status status = sample_row(*job, r, scratch);
    if (job->out->row_status) job->out->row_status[r] = status;
    if (status == PS_ROW_OK) continue;
    const int64_t code = static_cast<int64_t>(r) * 4 + status;
    int64_t seen = job->first_error.load();
    while (code < seen && !job->first_error.compare_exchange_weak(seen, code)) {
    }
  }
}

}  // namespace

void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

int64_t sample_scratch_bytes(int32_t vocab) { return row_scratch_bytes(vocab); }

ps_status sample_rows(ps_context* context, const SampleSource& source, const ps_sampling& sampling, uint8_t* scratch,
                      const ps_sampled& out) {
  Job job;
  job.kernels = context->kernels;
  job.source = &source;
  job.sampling = &sampling;
  job.out = &out;
  job.scratch = scratch;
  const bool single_thread = source.num_rows == 1 || int64_t{source.num_rows} * source.vocab < kSharedNumbers;
  PS_TRY(context->pool.share(run_job, &job, single_thread));
  const int64_t error = job.first_error.load();
  if (error == INT64_MAX || out.row_status) return PS_OK;
  const int32_t row = static_cast<int32_t>(error / 4);
  if (error % 4 == PS_ROW_MASKED)
    return fail(PS_INVALID_ARGUMENT, "mask[%d]: expected a token that is allowed, got none", row);
  return fail(PS_INVALID_ARGUMENT, "logits[%d]: expected numbers, got NaN or infinity", row);
}

void take_tail(const SampleSource& source, const ps_sampled& out) {
  for (int32_t r = 0; r < source.num_rows; ++r) {
    clear(out, r);
    out.ids[r] = source.ids[static_cast<int64_t>(r) * source.tail_k];
    if (out.row_status) out.row_status[r] = PS_ROW_OK;
  }
}

}  // namespace ps
