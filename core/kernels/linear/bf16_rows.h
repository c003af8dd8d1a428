// Rows rounded to bf16 for dot products of pairs, in the block layout of QuantizedRows with 32 columns instead of 64.
#ifndef PENSTOCK_KERNELS_LINEAR_BF16_ROWS_H
#define PENSTOCK_KERNELS_LINEAR_BF16_ROWS_H

namespace ps {
namespace {

PS_INLINE __mmask16 lanes_below(int64_t n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1u); }

void round_rows_to_pairs(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                         int64_t begin, int64_t end) {
  const int64_t blocks = num_row_blocks(m, 1);
  for (int64_t row = begin; row < end; ++row) {
    const float *src = x + row * x_stride, *next = row + 1 < end ? src + x_stride : src;  // prefetched
    if (row == begin) prefetch_row(src, cols);
    const RowBlock block = block_of_row(m, blocks, row);
    uint8_t* y = (uint8_t*)out.q + block.first * out.stride + 64 * (row - block.first);
    for (int64_t i = 0; i < out.stride / 2; i += 32, y += 64 * block.count)
      for (int64_t j = i; j < i + 32; j += 16) {
        __builtin_prefetch(next + j, 0, 3);
        const __m512 v = j < cols ? _mm512_maskz_loadu_ps(lanes_below(cols - j), src + j) : _mm512_setzero_ps();
        _mm256_storeu_si256((__m256i*)(y + 2 * (j - i)), (__m256i)_mm512_cvtneps_pbh(v));
      }
  }
}

}  // namespace
}  // namespace ps

#endif
