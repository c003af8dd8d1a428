// The kernels of amx.cpp for the table in avx512.cpp.
#ifndef PENSTOCK_KERNELS_LEVELS_AMX_H
#define PENSTOCK_KERNELS_LEVELS_AMX_H

#include "base/kernels.h"

namespace ps {

void linear_integer_amx(const LinearArgs& args, int64_t begin, int64_t end);
void quantize_rows_amx(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout,
                       const QuantizedRows& out, int64_t begin, int64_t end);
int64_t linear_panel_bytes_amx(int32_t layout, int64_t cols, int64_t m, int32_t planes);
void linear_bf16_amx(const LinearArgs& args, int64_t begin, int64_t end);
void round_rows_bf16_amx(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                         int64_t begin, int64_t end);
int64_t peak_amx(int32_t dtype, int64_t iterations);  // PS_I8 or PS_BF16; returns operations done

}  // namespace ps

#endif
