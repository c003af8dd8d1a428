// Faults on purpose: a kernel table whose linear kernels break the numerics contract, so that a test can prove
// that the invariance tests notice; and steps that fail, so that one can prove that the engine outlives them.
// Compiled in by -DPENSTOCK_PLANTED=ON alone, never into a release.
//
// PENSTOCK_PLANT=split_k        K is split in two chains when a batch has more than one token
// PENSTOCK_PLANT=split_threads  K is split in two chains when a thread has only a part of the rows
// PENSTOCK_PLANT=level          K is split in two chains at every level but the generic one
// PENSTOCK_PLANT=not_a_number   a step of 13 tokens computes NaN
// PENSTOCK_PLANT=step_fails     a step of 13 tokens fails once it is computed
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "kernels.h"

namespace ps {
namespace {

constexpr int kMaxLevels = 4;  // levels side by side in one process, each with its own table
const Kernels* originals[kMaxLevels];
Kernels tables[kMaxLevels];
constexpr int32_t kUnlucky = 13;  // tokens of the step that fails
enum { SPLIT_K, SPLIT_THREADS, LEVEL, NOT_A_NUMBER } plant;

// The product with K in two halves, on the values that the kernel computes with.
void split_linear(const Kernels* original, const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t k = args.weight.cols, n = args.weight.rows;
  float* row = static_cast<float*>(malloc(static_cast<size_t>(k) * sizeof(float)));
  if (!row) abort();
  for (int64_t j = begin * 16; j < end * 16 && j < n; ++j) {
    original->unpack(args.weight, j, 1, row);
    for (int32_t i = 0; i < args.m; ++i) {
      const float* x = args.x + i * args.x_stride;
      float low = 0, high = 0;
      for (int64_t c = 0; c < k / 2; ++c) low += x[c] * row[c];
      for (int64_t c = k / 2; c < k; ++c) high += x[c] * row[c];
      args.y[i * args.y_stride + j] = low + high + (args.bias ? args.bias[j] : 0);
    }
  }
  free(row);
}

void spoil(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.weight.rows;
  for (int64_t j = begin * 16; j < end * 16 && j < n; ++j)
    for (int32_t i = 0; i < args.m; ++i) args.y[i * args.y_stride + j] = __builtin_nanf("");
}

template <int level, int scheme>
void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  const Kernels* original = originals[level];
  if (plant == NOT_A_NUMBER) {
    original->linear[scheme](args, begin, end);
    if (args.m == kUnlucky) spoil(args, begin, end);
    return;
  }
  const bool whole = begin == 0 && end == (args.weight.rows + 15) / 16;
  const bool split =
      plant == SPLIT_K ? args.m > 1 : plant == SPLIT_THREADS ? !whole : strcmp(original->level, "generic") != 0;
  if (split) split_linear(original, args, begin, end);
  else original->linear[scheme](args, begin, end);
}

template <int level>
const Kernels* plant_level(const Kernels* kernels) {
  originals[level] = kernels;
  Kernels& table = tables[level];
  table = *kernels;
  table.linear[LINEAR_F32] = linear<level, LINEAR_F32>;
  table.linear[LINEAR_F16] = linear<level, LINEAR_F16>;
  table.linear[LINEAR_BF16] = linear<level, LINEAR_BF16>;
  table.linear[LINEAR_W8A16] = linear<level, LINEAR_W8A16>;
  table.linear[LINEAR_W8A8] = linear<level, LINEAR_W8A8>;
  table.linear[LINEAR_W4A16] = linear<level, LINEAR_W4A16>;
  table.linear[LINEAR_W4A8] = linear<level, LINEAR_W4A8>;
  return &table;
}

}  // namespace

const Kernels* planted_kernels(const Kernels* kernels) {
  const char* name = getenv("PENSTOCK_PLANT");
  if (!name || strcmp(name, "step_fails") == 0) return kernels;
  plant = strcmp(name, "split_k") == 0         ? SPLIT_K
          : strcmp(name, "split_threads") == 0 ? SPLIT_THREADS
          : strcmp(name, "not_a_number") == 0  ? NOT_A_NUMBER
                                               : LEVEL;
  if (strcmp(kernels->level, "generic") == 0) return plant_level<0>(kernels);
  if (strcmp(kernels->level, "avx2") == 0) return plant_level<1>(kernels);
  if (strcmp(kernels->level, "avx512") == 0) return plant_level<2>(kernels);
  return plant_level<3>(kernels);
}

ps_status planted_failure(int32_t num_tokens) {
  const char* name = getenv("PENSTOCK_PLANT");
  if (!name || strcmp(name, "step_fails") != 0 || num_tokens != kUnlucky) return PS_OK;
  return fail(PS_INTERNAL, "planted: a step of %d tokens", num_tokens);
}

}  // namespace ps
