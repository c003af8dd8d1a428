// Linear and attention by the bf16 dot product: for AVX-512 machines that have the extension.  The rest of their kernels are the
// AVX-512 level's, whose translation unit must not hold these instructions.
#if defined(__GNUC__) && !defined(__clang__)  // as in avx512.cpp
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wunused-function"  // of the headers, attention alone is wanted

#include <stddef.h>
#include <stdint.h>

#include "avx512_bf16.h"
#include "kernels.h"
#include "penstock.h"

#ifdef __AVX512BF16__

#include <immintrin.h>

#include "lanes_avx512.h"

#include "elementary.h"
#include "norms.h"
#include "quantize.h"
#include "pairs.h"
#include "kv_pages.h"
#include "attention_partition.h"
#include "attention.h"

namespace ps {
namespace {

constexpr int kRows = 8;  // of activations in a register block, at most
// How far ahead weights are asked for: further where one row reads them as fast as they come.
constexpr int64_t kAhead = 1024, kAheadOfOne = 16384;

PS_INLINE __mmask16 lanes_below(int64_t n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1u); }

PS_INLINE __m512bh pair(const uint8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return (__m512bh)_mm512_set1_epi32(word);
}

// M rows by the N tiles at w, into y [M][N][16].  The weights are asked for some way ahead: a pass that serves few rows
// waits for memory.
template <int M, int N>
void block(const LinearArgs& a, int64_t row, const uint8_t* const (&w)[N], float* y) {
  const int64_t pairs = (a.weight.cols + 1) / 2;
  const uint8_t* x[M];
  __m512 acc[M][N];
  PS_UNROLL for (int i = 0; i < M; ++i) {
    x[i] = (const uint8_t*)a.qx.q + (row + i) * a.qx.stride;
    PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = _mm512_setzero_ps();
  }
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh v[N];
    PS_UNROLL for (int t = 0; t < N; ++t) {
      v[t] = (__m512bh)_mm512_loadu_si512(w[t] + 64 * p);
      __builtin_prefetch(w[t] + 64 * p + (M == 1 ? kAheadOfOne : kAhead), 0, 3);
    }
    PS_UNROLL for (int i = 0; i < M; ++i) {
      const __m512bh b = pair(x[i] + 4 * p);
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = _mm512_dpbf16_ps(acc[i][t], v[t], b);
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i)
    PS_UNROLL for (int t = 0; t < N; ++t) _mm512_storeu_ps(y + 16 * (i * N + t), acc[i][t]);
}

template <int N>
void block_of(const LinearArgs& a, int rows, int64_t row, const uint8_t* const (&w)[N], float* y) {
  switch (rows) {
    case 1: return block<1, N>(a, row, w, y);
    case 2: return block<2, N>(a, row, w, y);
    case 3: return block<3, N>(a, row, w, y);
    case 4: return block<4, N>(a, row, w, y);
    case 5: return block<5, N>(a, row, w, y);
    case 6: return block<6, N>(a, row, w, y);
    case 7: return block<7, N>(a, row, w, y);
    case 8: return block<8, N>(a, row, w, y);
  }
}

// N tiles, `step` apart, against every row: the tiles stay in the second-level cache meanwhile.
template <int N>
void panel(const LinearArgs& a, int64_t tile, int64_t step) {
  const int64_t blocks = (a.m + kRows - 1) / kRows, tile_bytes = (a.weight.cols + 1) / 2 * 64;
  const uint8_t* w[N];
  alignas(64) float y[kRows * N * 16];
  for (int t = 0; t < N; ++t) w[t] = a.weight.data + (tile + t * step) * tile_bytes;
  int64_t row = 0;
  for (int64_t b = 0; b < blocks; ++b) {  // rows are spread evenly, so that no block is left with one
    const int64_t next = a.m * (b + 1) / blocks;
    block_of<N>(a, int(next - row), row, w, y);
    store_bf16_dot(a, row, tile, int(next - row), N, y);
    row = next;
  }
}

}  // namespace

void linear_bf16_dot(const LinearArgs& a, int64_t begin, int64_t end) {
  int64_t tile = begin;
  if (a.gated) {  // a tile of the gate and the one of `up` beside it
    for (; tile < end; ++tile) panel<2>(a, tile, a.weight.rows / 32);
    return;
  }
  if (a.m > 1) {  // one row reads tile after tile: a single run of addresses
    for (; tile + 3 <= end; tile += 3) panel<3>(a, tile, 1);
    for (; tile + 2 <= end; tile += 2) panel<2>(a, tile, 1);
  }
  for (; tile < end; ++tile) panel<1>(a, tile, 1);
}

void round_rows_bf16_dot(const float* x, int64_t x_stride, int64_t cols, const QuantizedRows& out, int64_t begin,
                         int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* src = x + row * x_stride;
    uint16_t* y = (uint16_t*)(out.q + row * out.stride);
    for (int64_t i = 0; i < out.stride / 2; i += 16) {
      const __m512 v = i < cols ? _mm512_maskz_loadu_ps(lanes_below(cols - i), src + i) : _mm512_setzero_ps();
      _mm256_storeu_si256((__m256i*)(y + i), (__m256i)_mm512_cvtneps_pbh(v));
    }
  }
}

void attention_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch) {
  attention(args, begin, end, scratch);
}
void attention_part_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch) {
  attention_part(args, begin, end, scratch);
}

int64_t peak_bf16_dot(int64_t iterations, float* sink) {
  constexpr int chains = 16;
  float start[chains + 16];  // no two chains alike, or the compiler would compute them once
  for (int i = 0; i < chains + 16; ++i) start[i] = *sink + float(i);
  __m512 acc[chains];
  PS_UNROLL for (int j = 0; j < chains; ++j) acc[j] = _mm512_loadu_ps(start + j);
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00), b = (__m512bh)_mm512_set1_epi16(0x3e80);
  for (int64_t i = 0; i < iterations; ++i) {
    PS_UNROLL for (int j = 0; j < chains; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], a, b);
  }
  PS_UNROLL for (int j = 1; j < chains; ++j) acc[0] = _mm512_add_ps(acc[0], acc[j]);
  *sink = _mm512_cvtss_f32(acc[0]);
  return iterations * chains * 64;
}

}  // namespace ps

#endif
