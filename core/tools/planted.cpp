// Faults on purpose: a kernel table whose linear kernels break the numerics contract, so that a test can prove
// that the invariance tests notice.  Compiled in by -DPENSTOCK_PLANTED=ON alone, never into a release.
//
// PENSTOCK_PLANT=split_k        K is split in two chains when a batch has more than one token
// PENSTOCK_PLANT=split_threads  K is split in two chains when a thread has only a part of the rows
// PENSTOCK_PLANT=level          K is split in two chains at every level but the generic one
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

namespace ps {
namespace {

constexpr int kMaxLevels = 4;  // levels side by side in one process, each with its own table
const Kernels* originals[kMaxLevels];
Kernels tables[kMaxLevels];
enum { SPLIT_K, SPLIT_THREADS, LEVEL } plant;

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

template <int level, int scheme>
void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  const Kernels* original = originals[level];
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
  if (!name) return kernels;
  plant = strcmp(name, "split_k") == 0 ? SPLIT_K : strcmp(name, "split_threads") == 0 ? SPLIT_THREADS : LEVEL;
  if (strcmp(kernels->level, "generic") == 0) return plant_level<0>(kernels);
  if (strcmp(kernels->level, "avx2") == 0) return plant_level<1>(kernels);
  if (strcmp(kernels->level, "avx512") == 0) return plant_level<2>(kernels);
  return plant_level<3>(kernels);
}

}  // namespace ps
