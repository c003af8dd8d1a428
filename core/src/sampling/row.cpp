// Drawing a token: the filters, then inverse transform sampling with a uniform number.
// Hot: runs in every step.
#include "sampling/row.h"

#include <float.h>
#include <math.h>

#include <algorithm>

#include "base/memory.h"

namespace ps {
namespace {

constexpr int64_t kBlock = 1024;  // weights are summed block by block, so that a search can skip blocks

struct Row {
  const Kernels& kernels;
  const float* x;
  int32_t vocab;
  const RowNumbers& numbers;
  const RowScratch& scratch;
  float shift, factor;  // a token's weight is exp((x - shift) * factor): 1 for the best
};

// The candidates of a row after filters, in the order of the search; a candidate's value is its weight.
struct Kept {
  Candidate* first;
  int64_t count;
  double sum;
};

// The weights of all tokens, zero for those below min_p, and their sum in ascending order of id, by blocks.
double weigh_all(const Row& row, double* block_sums) {
  double total = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kBlock) {
    const int64_t n = row.vocab - begin < kBlock ? row.vocab - begin : kBlock;
    float* y = row.scratch.weights + begin;
    double sum = row.kernels.exp_sum(row.x + begin, n, row.shift, row.factor, y);
    if (row.numbers.min_p > 0) {
      sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (y[i] < row.numbers.min_p) y[i] = 0;
        sum += y[i];
      }
    }
    if (block_sums) block_sums[begin / kBlock] = sum;
    total += sum;
  }
  return total;
}

// Without a filter that needs sorting: all tokens in ascending order of id, block by block.
int32_t walk_all(const Row& row, int32_t best) {
  double* block_sums = reinterpret_cast<double*>(row.scratch.candidates);
  const double target = row.numbers.uniform * weigh_all(row, block_sums);
  const int64_t blocks = (row.vocab + kBlock - 1) / kBlock;
  const float* weights = row.scratch.weights;
  double reached = 0;
  int32_t last = best;
  for (int64_t b = 0; b < blocks; ++b) {
    if (reached + block_sums[b] <= target && b + 1 < blocks) {
      reached += block_sums[b];
      continue;
    }
    const int64_t end = (b + 1) * kBlock < row.vocab ? (b + 1) * kBlock : row.vocab;
    for (int64_t i = b * kBlock; i < end; ++i) {
      if (weights[i] <= 0) continue;
      last = static_cast<int32_t>(i);
      reached += weights[i];
      if (reached > target) return last;
    }
  }
  return last;  // rounding left a remainder past the end
}

double sum_of(const Candidate* candidates, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += candidates[i].value;
  return sum;
}

// The top_k best tokens that pass min_p, best first.
Kept keep_best(const Row& row) {
  Candidate* const first = row.scratch.candidates;
  float* const y = row.scratch.weights;
  const int64_t size = take_best(row.x, row.vocab, row.numbers.top_k, first);
  for (int64_t i = 0; i < size; ++i) y[i] = first[i].value;
  row.kernels.exp_sum(y, size, row.shift, row.factor, y);
  int64_t count = 0;
  for (; count < size && y[count] > 0 && y[count] >= row.numbers.min_p; ++count) first[count].value = y[count];
  return Kept{first, count, sum_of(first, count)};
}

// All tokens that pass min_p, in ascending order of id.
Kept keep_all(const Row& row) {
  const double total = weigh_all(row, nullptr);
  int64_t count = 0;
  for (int32_t i = 0; i < row.vocab; ++i) {
    if (row.scratch.weights[i] > 0) row.scratch.candidates[count++] = Candidate{row.scratch.weights[i], i};
  }
  return Kept{row.scratch.candidates, count, total};
}

// Pops from a heap until the weights reach a share of `total`; at least one. weights is by id.
Kept take_until(Candidate* heap, int64_t size, double least, const float* weights) {
  double sum = 0;
  int64_t taken = 0;
  while (taken < size && (taken == 0 || sum < least)) {
    std::pop_heap(heap, heap + size - taken, worse);
    ++taken;
    sum += weights[heap[size - taken].id];
  }
  Candidate* const first = heap + size - taken;
  std::reverse(first, first + taken);
  for (int64_t i = 0; i < taken; ++i) first[i].value = weights[first[i].id];
  return Kept{first, taken, sum};
}

// The smallest set in descending order that reaches top_p of the tokens that pass min_p.
Kept keep_top_p(const Row& row) {
  const float *weights = row.scratch.weights, top_p = row.numbers.top_p;
  const double least = static_cast<double>(top_p) * weigh_all(row, nullptr);
  // Finds a cut such that the tokens above it certainly reach top_p together, so no token below it can be kept.
  float cut = -INFINITY;
  double span = 8.0 / row.factor;
  for (int attempt = 0; attempt < 4; ++attempt, span *= 2) {
    const float tried = static_cast<float>(row.shift - span);
    double reached = 0;
    for (int32_t i = 0; i < row.vocab; ++i) reached += row.x[i] >= tried ? weights[i] : 0;
    if (reached <= least * 1.000001) continue;  // the order of summation changes the last bits
    cut = tried;
    break;
  }
  Candidate* const heap = row.scratch.candidates;
  int64_t size = 0;
  for (int32_t i = 0; i < row.vocab; ++i) {
    if (row.x[i] >= cut && weights[i] > 0) heap[size++] = Candidate{row.x[i], i};
  }
  std::make_heap(heap, heap + size, worse);
  return take_until(heap, size, least, weights);
}

// The smallest set, by distance of a token's surprise from the mean, that reaches typical_p (Meister et al., Locally
// typical sampling, 2022).
Kept keep_typical(const Row& row, const Kept& kept) {
  const double log_sum = natural_log(kept.sum);
  const auto surprise = [&](int32_t id) { return log_sum - (static_cast<double>(row.x[id]) - row.shift) * row.factor; };
  double entropy = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    entropy += kept.first[i].value * surprise(kept.first[i].id);
    row.scratch.weights[kept.first[i].id] = kept.first[i].value;
  }
  entropy /= kept.sum;
  for (int64_t i = 0; i < kept.count; ++i)
    kept.first[i].value = static_cast<float>(-fabs(surprise(kept.first[i].id) - entropy));
  std::make_heap(kept.first, kept.first + kept.count, worse);
  return take_until(kept.first, kept.count, static_cast<double>(row.numbers.typical_p) * kept.sum, row.scratch.weights);
}

int32_t walk(const Kept& kept, double uniform) {
  const double target = uniform * kept.sum;
  double reached = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    reached += kept.first[i].value;
    if (reached > target) return kept.first[i].id;
  }
  return kept.first[kept.count - 1].id;
}

}  // namespace

// Uses only additions, multiplications and divisions: the same result on every machine.
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

int64_t row_scratch_bytes(int32_t vocab) {
  return 3 * round_up(static_cast<int64_t>(vocab) * 4, 64) +
         round_up(static_cast<int64_t>(vocab) * static_cast<int64_t>(sizeof(Candidate)), 64);
}

RowScratch row_scratch(uint8_t* memory, int32_t vocab) {
  const int64_t words = round_up(static_cast<int64_t>(vocab) * 4, 64);
  return RowScratch{reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + words),
                    reinterpret_cast<Candidate*>(memory + 3 * words), reinterpret_cast<int32_t*>(memory + 2 * words)};
}

int32_t draw_token(const Kernels& kernels, const float* x, int32_t vocab, int32_t best, const RowNumbers& numbers,
                   const RowScratch& scratch) {
  const float inverse = 1.0f / numbers.temperature;
  const Row row{kernels, x, vocab, numbers, scratch, x[best], inverse > FLT_MAX ? FLT_MAX : inverse};
  const bool is_typical = numbers.typical_p < 1;
  if (numbers.top_k == 0 && !(numbers.top_p < 1) && !is_typical) return walk_all(row, best);
  Kept kept{};
  if (numbers.top_k > 0) {
    kept = keep_best(row);
    if (numbers.top_p < 1) {  // a prefix of the sorted list
      const double least = static_cast<double>(numbers.top_p) * kept.sum;
      double sum = 0;
      int64_t count = 0;
      while (count < kept.count && (count == 0 || sum < least)) sum += kept.first[count++].value;
      kept = Kept{kept.first, count, sum};
    }
  } else {
    kept = numbers.top_p < 1 ? keep_top_p(row) : keep_all(row);
  }
  if (is_typical) kept = keep_typical(row, kept);
  return walk(kept, numbers.uniform);
}

}  // namespace ps
