// The functions by which avx512_bf16.cpp and avx512.cpp call each other.
#ifndef PENSTOCK_KERNELS_LEVELS_AVX512_BF16_H
#define PENSTOCK_KERNELS_LEVELS_AVX512_BF16_H

#include "base/kernels.h"

namespace ps {

void linear_bf16_dot(const LinearArgs& args, int64_t begin, int64_t end);
void round_rows_bf16_dot(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                         int64_t begin, int64_t end);
int64_t prefetch_distance_bf16_dot(const LinearArgs& args, int64_t products, int64_t far);
// Adds bias, gate and residual as in every scheme, then stores: v [m][n][16]; gated: n is 2, gate and up side by side.
void store_bf16_dot(const LinearArgs& args, int64_t row, int64_t tile, int m, int n, float* v);
// For bf16 and int8 pages.
void attention_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch);
void attention_part_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch);
void dot_pairs(const uint16_t* a, const uint16_t* b, float* acc);  // lets base/cpu.cpp check the order of additions
int64_t peak_bf16_dot(int64_t iterations, float* sink);

}  // namespace ps

#endif
