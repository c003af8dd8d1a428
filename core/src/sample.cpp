#include "sample.h"

#include <float.h>
#include <math.h>

#include <algorithm>
#include <atomic>

namespace ps {
namespace {

constexpr int64_t kBlock = 1024;  // probabilities are summed block by block, so that a walk can skip blocks

// Natural logarithm in double precision from additions, multiplications and divisions alone: one result everywhere.
double natural_log(double x) {
  int exponent;
  double m = frexp(x, &exponent);
  if (m < 0.70710678118654752440) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1), s2 = s * s;
  double sum = 0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return 2 * s * sum + exponent * 0.69314718055994530942;
}

struct Candidate {
  float logit;
  int32_t id;
};

// A heap's order: the best candidate, then the smaller id, is on top.
bool worse(const Candidate& a, const Candidate& b) { return a.logit < b.logit || (a.logit == b.logit && a.id > b.id); }

struct Row {
  const Kernels* kernels;
  const float* logits;
  int32_t vocab;
  float temperature, top_p;
  int32_t top_k;
  double uniform;
  const uint32_t* mask;
  float* probabilities;   // [vocab]
  Candidate* candidates;  // [vocab]
};

bool allowed(const Row& row, int32_t id) { return !row.mask || (row.mask[id / 32] >> (id % 32) & 1); }

// Largest allowed logit and the first token that has it; -1: every token is masked or minus infinity.
int32_t best_allowed(const Row& row) {
  int32_t best = -1;
  if (!row.mask) {
    best = row.kernels->argmax(row.logits, row.vocab);
    return row.logits[best] > -INFINITY ? best : -1;
  }
  for (int32_t i = 0; i < row.vocab; ++i) {
    if (allowed(row, i) && row.logits[i] > -INFINITY && (best < 0 || row.logits[i] > row.logits[best])) best = i;
  }
  return best;
}

// Neither NaN nor plus infinity.
bool is_sound(const float* x, int32_t n) {
  int bad = 0;
  for (int32_t i = 0; i < n; ++i) bad |= !(x[i] <= FLT_MAX);
  return !bad;
}

float inverse_temperature(const Row& row) {
  const float inverse = 1.0f / row.temperature;
  return inverse > FLT_MAX ? FLT_MAX : inverse;
}

// All tokens in ascending order of id, block by block.
int32_t walk_all(const Row& row, int32_t best, double* block_sums) {
  const float factor = inverse_temperature(row), shift = row.logits[best];
  double total = 0;
  int64_t blocks = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
    const int64_t n = row.vocab - begin < kBlock ? row.vocab - begin : kBlock;
    float* y = row.probabilities + begin;
    double sum = row.kernels->exp_sum(row.logits + begin, n, shift, factor, y);
    if (row.mask) {
      sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (!allowed(row, static_cast<int32_t>(begin + i))) y[i] = 0;
        sum += y[i];
      }
    }
    block_sums[blocks++] = sum;
    total += sum;
  }
  const double target = row.uniform * total;
  double reached = 0;
  int32_t last = best;
  for (int64_t b = 0; b < blocks; ++b) {
    if (reached + block_sums[b] <= target && b + 1 < blocks) {
      reached += block_sums[b];
      continue;
    }
    const int64_t end = (b + 1) * kBlock < row.vocab ? (b + 1) * kBlock : row.vocab;
    for (int64_t i = b * kBlock; i < end; ++i) {
      if (row.probabilities[i] <= 0) continue;
      last = static_cast<int32_t>(i);
      reached += row.probabilities[i];
      if (reached > target) return last;
    }
  }
  return last;  // rounding left a crumb past the end
}

// Candidates as a heap; each one taken moves behind the heap, so that the best ends up last.
struct Heap {
  const Row& row;
  float factor, shift;
  int64_t size = 0, taken = 0;

  Heap(const Row& r, int32_t best) : row(r), factor(inverse_temperature(r)), shift(r.logits[best]) {}

  // Every allowed token whose logit is at least `least`.
  void fill(float least) {
    for (int32_t i = 0; i < row.vocab; ++i) {
      if (row.logits[i] >= least && row.logits[i] > -INFINITY && allowed(row, i)) {
        row.candidates[size++] = Candidate{row.logits[i], i};
      }
    }
    std::make_heap(row.candidates, row.candidates + size, worse);
  }
  // The best `count` of the allowed tokens: the worst kept is on top while the others pass by.
  void fill_best(int64_t count) {
    const auto better = [](const Candidate& a, const Candidate& b) { return worse(b, a); };
    Candidate* const first = row.candidates;
    for (int32_t i = 0; i < row.vocab; ++i) {
      const Candidate c{row.logits[i], i};
      if (size == count && !worse(first[0], c)) continue;
      if (!(c.logit > -INFINITY) || !allowed(row, i)) continue;
      if (size == count) {
        std::pop_heap(first, first + size, better);
        first[size - 1] = c;
      } else {
        first[size++] = c;
      }
      std::push_heap(first, first + size, better);
    }
    std::make_heap(first, first + size, worse);
  }
  // Takes the next best and notes its probability, not yet divided by the sum.
  double take() {
    std::pop_heap(row.candidates, row.candidates + size - taken, worse);
    ++taken;
    row.kernels->exp_sum(&at(taken - 1).logit, 1, shift, factor, &row.probabilities[taken - 1]);
    return row.probabilities[taken - 1];
  }
  const Candidate& at(int64_t rank) const { return row.candidates[size - 1 - rank]; }
};

// The sum over all allowed tokens in ascending order of id; leaves each one's probability.
double sum_of_all(const Row& row, float shift, float factor) {
  double total = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
    const int64_t n = row.vocab - begin < kBlock ? row.vocab - begin : kBlock;
    float* y = row.probabilities + begin;
    double sum = row.kernels->exp_sum(row.logits + begin, n, shift, factor, y);
    if (row.mask) {
      sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (!allowed(row, static_cast<int32_t>(begin + i))) y[i] = 0;
        sum += y[i];
      }
    }
    total += sum;
  }
  return total;
}

// Fills the heap with the tokens above a cut that together surely reach top_p: those below it cannot be kept.
void fill_top_p(Heap* heap, double total) {
  const Row& row = heap->row;
  double span = 8.0 / heap->factor;
  for (int attempt = 0; attempt < 4; ++attempt, span *= 2) {
    const float cut = static_cast<float>(heap->shift - span);
    double reached = 0;
    for (int32_t i = 0; i < row.vocab; ++i) reached += row.logits[i] >= cut ? row.probabilities[i] : 0;
    if (reached > row.top_p * total * 1.000001) return heap->fill(cut);  // the order of sums moves the last bits
  }
  heap->fill(-INFINITY);
}

// The best tokens in descending order, until top_k are taken or top_p is reached.
int32_t walk_best(const Row& row, int32_t best) {
  Heap heap(row, best);
  double total = 0;
  if (row.top_k > 0) {
    heap.fill_best(row.top_k);
    while (heap.taken < heap.size) total += heap.take();
  } else {
    total = sum_of_all(row, heap.shift, heap.factor);
    fill_top_p(&heap, total);
  }
  double kept = 0;
  int64_t num_kept = 0;
  while (num_kept < heap.size && (num_kept == 0 || kept < static_cast<double>(row.top_p) * total)) {
    if (num_kept == heap.taken) heap.take();
    kept += row.probabilities[num_kept++];
  }
  const double target = row.uniform * kept;
  double reached = 0;
  for (int64_t i = 0; i < num_kept; ++i) {
    reached += row.probabilities[i];
    if (reached > target) return heap.at(i).id;
  }
  return heap.at(num_kept - 1).id;
}

float log_probability(const Row& row, int32_t id) {
  const float top = row.kernels->max(row.logits, row.vocab);
  const float sum = row.kernels->exp_sum(row.logits, row.vocab, top, 1.0f, nullptr);
  return static_cast<float>(static_cast<double>(row.logits[id]) - top - natural_log(sum));
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

enum RowError { ROW_OK, ROW_NOT_FINITE, ROW_MASKED };

struct Job {
  ps_context* context;
  const float* logits;
  int32_t vocab;
  const ps_sampling* sampling;
  uint8_t* scratch;
  int32_t* ids;
  float* logprobs;
  std::atomic<int32_t> next{0};
  std::atomic<int64_t> first_error{INT64_MAX};  // row * 4 + RowError: the smallest row wins
};

RowError sample_row(Job* job, int32_t r, uint8_t* scratch) {
  const ps_sampling& s = *job->sampling;
  Row row{};
  row.kernels = job->context->kernels;
  row.vocab = job->vocab;
  row.logits = job->logits + static_cast<int64_t>(r) * job->vocab;
  row.temperature = s.temperature[r];
  row.top_p = s.top_p[r];
  row.top_k = s.top_k[r];
  row.mask = s.mask ? s.mask + static_cast<int64_t>(r) * ((job->vocab + 31) / 32) : nullptr;
  const int64_t floats = round_up(static_cast<int64_t>(job->vocab) * 4, 64);
  row.probabilities = reinterpret_cast<float*>(scratch);
  row.candidates = reinterpret_cast<Candidate*>(scratch + floats);
  if (!is_sound(row.logits, row.vocab)) return ROW_NOT_FINITE;
  int32_t id = best_allowed(row);
  if (id < 0) return ROW_MASKED;
  if (row.temperature > 0) {
    row.uniform = uniform_of(s.seed[r], s.counter[2 * r], s.counter[2 * r + 1]);
    const bool filtered = row.top_k > 0 || row.top_p < 1;
    id = filtered ? walk_best(row, id) : walk_all(row, id, reinterpret_cast<double*>(scratch + floats));
  }
  job->ids[r] = id;
  if (job->logprobs) job->logprobs[r] = log_probability(row, id);
  return ROW_OK;
}

void run_job(void* argument, int32_t thread) {
  Job* job = static_cast<Job*>(argument);
  uint8_t* scratch = job->scratch + thread * sample_scratch_bytes(job->vocab);
  for (int32_t r; (r = job->next.fetch_add(1)) < job->sampling->num_rows;) {
    const RowError error = sample_row(job, r, scratch);
    if (error == ROW_OK) continue;
    const int64_t code = static_cast<int64_t>(r) * 4 + error;
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

int64_t sample_scratch_bytes(int32_t vocab) {
  return round_up(static_cast<int64_t>(vocab) * 4, 64) +
         round_up(static_cast<int64_t>(vocab) * static_cast<int64_t>(sizeof(Candidate)), 64);
}

ps_status check_sampling(const ps_sampling& s, int32_t num_rows, int32_t num_slots) {
  if (s.num_rows != num_rows) {
    return fail(PS_INVALID_ARGUMENT, "num_rows: expected the last step's %d, found %d", num_rows, s.num_rows);
  }
  const char* missing = !s.temperature ? "temperature"
                        : !s.top_k     ? "top_k"
                        : !s.top_p     ? "top_p"
                        : !s.seed      ? "seed"
                        : !s.counter   ? "counter"
                                       : nullptr;
  if (missing && num_rows)
    return fail(PS_INVALID_ARGUMENT, "%s: expected an array of %d rows, found null", missing, num_rows);
  for (int32_t r = 0; r < num_rows; ++r) {
    if (!(s.temperature[r] >= 0 && s.temperature[r] <= FLT_MAX)) {
      return fail(PS_INVALID_ARGUMENT, "temperature[%d]: expected 0 or a positive number, found %g", r,
                  static_cast<double>(s.temperature[r]));
    }
    if (s.top_k[r] < 0)
      return fail(PS_INVALID_ARGUMENT, "top_k[%d]: expected 0 (off) or more, found %d", r, s.top_k[r]);
    if (!(s.top_p[r] > 0 && s.top_p[r] <= 1)) {
      return fail(PS_INVALID_ARGUMENT, "top_p[%d]: expected more than 0 and at most 1, found %g", r,
                  static_cast<double>(s.top_p[r]));
    }
    if (s.slot && (s.slot[r] < -1 || s.slot[r] >= num_slots)) {
      return fail(PS_INVALID_ARGUMENT, "slot[%d]: expected -1 or a slot below %d, found %d", r, num_slots, s.slot[r]);
    }
  }
  return PS_OK;
}

ps_status sample_rows(ps_context* context, const float* logits, int32_t vocab, const ps_sampling& sampling,
                      uint8_t* scratch, int32_t* ids, float* logprobs) {
  Job job;
  job.context = context;
  job.logits = logits;
  job.vocab = vocab;
  job.sampling = &sampling;
  job.scratch = scratch;
  job.ids = ids;
  job.logprobs = logprobs;
  PS_TRY(context->pool.run(run_job, &job, sampling.num_rows == 1));
  const int64_t error = job.first_error.load();
  if (error == INT64_MAX) return PS_OK;
  const int32_t row = static_cast<int32_t>(error / 4);
  if (error % 4 == ROW_MASKED)
    return fail(PS_INVALID_ARGUMENT, "mask[%d]: expected a token that is allowed, found none", row);
  return fail(PS_INVALID_ARGUMENT, "logits[%d]: expected numbers, found NaN or infinity", row);
}

}  // namespace ps
