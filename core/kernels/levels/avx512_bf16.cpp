// Linear and attention with the bf16 dot product, for AVX-512 machines that have the extension.  The other kernels are
// those of the AVX-512 level, whose translation unit must not contain these instructions.
#if defined(__GNUC__) && !defined(__clang__)  // as in avx512.cpp
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wunused-function"  // only attention is used of the headers

#include <stddef.h>
#include <stdint.h>

#include "levels/avx512_bf16.h"
#include "base/kernels.h"
#include "penstock_dev.h"

#ifdef __AVX512BF16__

#include <immintrin.h>

#include "simd/avx512.h"
#include "linear/store_lines.h"

#include "base/build.h"
#include "base/tiles.h"
#include "simd/elementary.h"
#include "rows/norms.h"
#include "rows/quantize.h"
#include "rows/hadamard.h"
#include "linear/bf16_rows.h"
#include "simd/bf16_pairs.h"
#include "attention/kv_pages.h"
#include "attention/partition.h"
#include "attention/attention.h"

namespace ps {
namespace {

// Up to kStreamRows rows are bound by memory: they read tile after tile, as one sequential stream, and prefetch this
// many bytes ahead.
constexpr int64_t kStreamRows = 8, kStreamPrefetchBytes = 16384;

// The prefetch of a pass over tiles: one address per tile, which advances by `step` bytes for each pair of columns.
struct Prefetch {
  const uint8_t* at[2];
  int64_t step;
};

// M rows, x [pairs / 16][M][16] pairs of columns, by the N tiles at w, into y [M][N][16].
template <int M, int N>
__attribute__((noinline)) void block(const uint8_t* x, const uint8_t* const* w, int64_t pairs, const Prefetch& ahead,
                                     float* y) {
  const uint8_t *p[N], *next[N];
  const int64_t step = ahead.step;
  __m512 acc[M][N];
  PS_UNROLL for (int t = 0; t < N; ++t) p[t] = w[t], next[t] = ahead.at[t];
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = _mm512_setzero_ps();
  for (int64_t s = 0; s < pairs; x += 64 * (M - 1)) {
    for (const int64_t stop = s + 16 < pairs ? s + 16 : pairs; s < stop; ++s, x += 4) {
      __m512bh v[N];
      PS_UNROLL for (int t = 0; t < N; ++t) {
        v[t] = (__m512bh)_mm512_loadu_si512(p[t] + 64 * s);
        __builtin_prefetch(next[t] + s * step, 0, 3);
      }
      PS_UNROLL for (int i = 0; i < M; ++i) {
        const __m512bh b = (__m512bh)four_bytes((const int8_t*)x + 64 * i);
        PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = _mm512_dpbf16_ps(acc[i][t], v[t], b);
      }
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t)
      _mm512_storeu_ps(y + 16 * (i * N + t), acc[i][t]);
}

template <int N>
void block_of(int rows, const uint8_t* x, const uint8_t* const* w, int64_t pairs, const Prefetch& ahead, float* y) {
  switch (rows) {
    case 1: return block<1, N>(x, w, pairs, ahead, y);
    case 2: return block<2, N>(x, w, pairs, ahead, y);
    case 3: return block<3, N>(x, w, pairs, ahead, y);
    case 4: return block<4, N>(x, w, pairs, ahead, y);
    case 5: return block<5, N>(x, w, pairs, ahead, y);
    case 6: return block<6, N>(x, w, pairs, ahead, y);
    case 7: return block<7, N>(x, w, pairs, ahead, y);
    case 8: return block<8, N>(x, w, pairs, ahead, y);
    case 9: return block<9, N>(x, w, pairs, ahead, y);
    case 10: return block<10, N>(x, w, pairs, ahead, y);
    case 11: return block<11, N>(x, w, pairs, ahead, y);
    case 12: return block<12, N>(x, w, pairs, ahead, y);
  }
}

// N tiles, `apart` bytes from one to the next, by every row: the tiles stay in the L2 cache meanwhile.  With several
// blocks of rows, each prefetches its share of the next tiles.
template <int N>
void panel(const LinearArgs& a, int64_t tile, int64_t apart) {
  const int64_t pairs = (a.weight.cols + 1) / 2, bytes = pairs * 64, blocks = num_row_blocks(a.m, 1);
  const int64_t further = a.gated ? bytes : N * bytes;  // distance to the next tiles
  const uint8_t* w[2];
  alignas(64) float y[kIntRows * N * 16];
  for (int t = 0; t < N; ++t) w[t] = a.weight.data + (tile + t * apart) * bytes;
  if (N == 1) w[1] = w[0];
  for (int64_t b = 0; b < blocks; ++b) {
    const RowBlock rows = row_block(a.m, blocks, b);
    const int64_t at =
        blocks > 1 ? further + bytes * b / blocks : prefetch_distance_bf16_dot(a, 2 * a.m, kStreamPrefetchBytes);
    const Prefetch ahead = {{w[0] + at, w[1] + at}, blocks > 1 ? bytes / (blocks * pairs) : 64};
    StoreLines(a, rows.first, tile, rows.count, a.gated ? 1 : N).prefetch_all();
    block_of<N>(rows.count, (const uint8_t*)a.qx.q + rows.first * a.qx.stride, w, pairs, ahead, y);
    store_bf16_dot(a, rows.first, tile, rows.count, N, y);
  }
}

// A few tiles [begin, end) by few rows; gated: the tiles of the gate, then those of `up`.
constexpr int kStreamTiles = 8;
void stream(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t pairs = (a.weight.cols + 1) / 2, bytes = pairs * 64;
  const int n = a.gated ? 2 : 1;
  const int64_t ahead = prefetch_distance_bf16_dot(a, 2 * a.m, kStreamPrefetchBytes);
  alignas(64) float y[kStreamTiles][kStreamRows * 2 * 16], one[kStreamRows * 16];
  for (int t = 0; t < n; ++t)
    for (int64_t tile = begin; tile < end; ++tile) {
      const uint8_t* const w = a.weight.data + (tile + t * (a.weight.rows / 32)) * bytes;
      block_of<1>(a.m, (const uint8_t*)a.qx.q, &w, pairs, {{w + ahead, w + ahead}, 64}, one);
      for (int i = 0; i < a.m; ++i) __builtin_memcpy(y[tile - begin] + 16 * (n * i + t), one + 16 * i, 64);
    }
  for (int64_t tile = begin; tile < end; ++tile) store_bf16_dot(a, 0, tile, a.m, n, y[tile - begin]);
}

}  // namespace

void linear_bf16_dot(const LinearArgs& a, int64_t begin, int64_t end) {
  int64_t tile = begin;
  if (a.m <= kStreamRows) {
    for (; tile < end; tile += kStreamTiles) stream(a, tile, tile + kStreamTiles < end ? tile + kStreamTiles : end);
  } else if (a.gated) {
    for (; tile < end; ++tile) panel<2>(a, tile, a.weight.rows / 32);
  } else {
    for (; tile + 2 <= end; tile += 2) panel<2>(a, tile, 1);
    if (tile < end) panel<1>(a, tile, 1);
  }
}

void round_rows_bf16_dot(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                         int64_t begin, int64_t end) {
  round_rows_to_pairs(x, x_stride, cols, m, out, begin, end);
}

void attention_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch) {
  attention(args, begin, end, scratch);
}
void attention_part_bf16_dot(const AttentionArgs& args, int64_t begin, int64_t end, void* scratch) {
  attention_part(args, begin, end, scratch);
}

void dot_pairs(const uint16_t* a, const uint16_t* b, float* acc) {
  const __m512bh x = (__m512bh)_mm512_loadu_si512(a), y = (__m512bh)_mm512_loadu_si512(b);
  _mm512_storeu_ps(acc, _mm512_dpbf16_ps(_mm512_loadu_ps(acc), x, y));
}

int64_t peak_bf16_dot(int64_t iterations, float* sink) {
  constexpr int chains = 16;
  float start[chains + 16];  // all chains differ, or the compiler would compute them once
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

#else

namespace ps {
void dot_pairs(const uint16_t*, const uint16_t*, float*) {}  // never called
}  // namespace ps

#endif
