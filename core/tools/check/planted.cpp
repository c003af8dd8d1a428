// Fault injection.  A kernel table that breaks the numerics contract as slightly as its formats can show proves that
// the invariance tests detect it; steps that fail prove that the engine survives them.  Compiled in only with
// -DPENSTOCK_PLANTED=ON, never in a release.
//
// PENSTOCK_PLANT names the fault:
//   - split_k: linears are off when a batch has more than one token.
//   - split_threads: linears are off when a thread has only a part of the rows.
//   - level: linears are off at every level but the generic one.  bf16, which levels round each in their own way, loses
//     half of K there.
//   - kv: keys are off in their pages when a batch has more than one token.
//   - not_a_number: a step of 13 tokens computes NaN.
//   - step_fails: a step of 13 tokens fails once it is computed.
// A linear that is off splits K in two chains (float schemes), or changes the last bit of each token's scale (integer
// schemes, whose sums are exact in any order).
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/kernels.h"

namespace ps {
namespace {

constexpr int kMaxLevels = 4;  // levels used in one process, each with its own table
const Kernels* originals[kMaxLevels];
Kernels tables[kMaxLevels];
constexpr int32_t kUnlucky = 13;  // number of tokens of the step that fails
enum { SPLIT_K, SPLIT_THREADS, LEVEL, KV, NOT_A_NUMBER } plant;

float* floats(int64_t count) {
  float* memory = static_cast<float*>(malloc(static_cast<size_t>(count) * sizeof(float)));
  if (!memory) abort();
  return memory;
}

float round_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}

// The product with K split in two chains, on the values that the kernel computes with.
template <bool rounded>
void split_linear(const Kernels* original, const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t k = args.weight.cols, n = args.weight.rows;
  const float kept = rounded && plant == LEVEL ? 0.f : 1.f;  // factor of the second half
  float* row = floats(k);
  for (int64_t j = begin * 16; j < end * 16 && j < n; ++j) {
    original->unpack(args.weight, j, 1, row);
    for (int32_t i = 0; i < args.m; ++i) {
      const float* x = args.x + i * args.x_stride;
      float low = 0, high = 0;
      for (int64_t c = 0; c < k / 2; ++c) low += (rounded ? round_bf16(x[c]) : x[c]) * row[c];
      for (int64_t c = k / 2; c < k; ++c) high += (rounded ? round_bf16(x[c]) : x[c]) * row[c];
      const float sum = low + high * kept + (args.bias ? args.bias[j] : 0);
      args.y[i * args.y_stride + j] = sum + (args.residual ? args.residual[i * args.residual_stride + j] : 0);
    }
  }
  free(row);
}

// The product with activation scales that are one unit in the last place too large.
void scale_linear(void (*linear)(const LinearArgs&, int64_t begin, int64_t end), const LinearArgs& args, int64_t begin,
                  int64_t end) {
  LinearArgs off = args;
  off.qx.scale = floats(args.m);
  for (int32_t i = 0; i < args.m; ++i) off.qx.scale[i] = args.qx.scale[i] * (1 + 0x1p-23f);
  linear(off, begin, end);
  free(off.qx.scale);
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
  const bool whole = begin == 0 && end == (args.weight.rows / (args.gated ? 2 : 1) + 15) / 16;
  const bool off = plant == SPLIT_K         ? args.m > 1
                   : plant == SPLIT_THREADS ? !whole
                                            : strcmp(original->level, "generic") != 0;
  if (off && scheme >= LINEAR_W8A16 && scheme <= LINEAR_W4A8_H32)
    scale_linear(original->linear[scheme], args, begin, end);
  else if (off && !args.gated) split_linear<scheme == LINEAR_BF16>(original, args, begin, end);
  else original->linear[scheme](args, begin, end);
}

// Changes keys by one unit in the last place, or by the least that their format stores: int8 in their scales.
template <int level>
void kv_append(const KvAppendArgs& args, int64_t begin, int64_t end) {
  if (args.batch.num_tokens < 2) return originals[level]->kv_append(args, begin, end);
  const float factor = 1 + (args.kv.layout == PS_KV_BF16 ? 0x1p-7f : 0x1p-23f);
  KvAppendArgs off = args;
  off.k_stride = static_cast<int64_t>(args.kv.num_kv_heads) * args.kv.head_dim;
  float* keys = floats(end * off.k_stride);
  for (int64_t t = begin; t < end; ++t)
    for (int64_t c = 0; c < off.k_stride; ++c) keys[t * off.k_stride + c] = args.k[t * args.k_stride + c] * factor;
  off.k = keys;
  originals[level]->kv_append(off, begin, end);
  free(keys);
}

template <int level>
const Kernels* plant_level(const Kernels* kernels) {
  originals[level] = kernels;
  Kernels& table = tables[level];
  table = *kernels;
  if (plant == KV) {
    table.kv_append = kv_append<level>;
    return &table;
  }
  table.linear[LINEAR_F32] = linear<level, LINEAR_F32>;
  table.linear[LINEAR_F16] = linear<level, LINEAR_F16>;
  table.linear[LINEAR_BF16] = linear<level, LINEAR_BF16>;
  table.linear[LINEAR_W8A16] = linear<level, LINEAR_W8A16>;
  table.linear[LINEAR_W8A8] = linear<level, LINEAR_W8A8>;
  table.linear[LINEAR_W4A16] = linear<level, LINEAR_W4A16>;
  table.linear[LINEAR_W4A8] = linear<level, LINEAR_W4A8>;
  table.linear[LINEAR_W8A8_H32] = linear<level, LINEAR_W8A8_H32>;
  table.linear[LINEAR_W4A8_H32] = linear<level, LINEAR_W4A8_H32>;
#define PS_BLOCKS(id, ...) table.linear[LINEAR_##id] = linear<level, LINEAR_##id>;
#include "base/block_schemes.inc"
  return &table;
}

}  // namespace

const Kernels* planted_kernels(const Kernels* kernels) {
  const char* name = getenv("PENSTOCK_PLANT");
  if (!name || strcmp(name, "step_fails") == 0) return kernels;
  plant = strcmp(name, "split_k") == 0         ? SPLIT_K
          : strcmp(name, "split_threads") == 0 ? SPLIT_THREADS
          : strcmp(name, "kv") == 0            ? KV
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
