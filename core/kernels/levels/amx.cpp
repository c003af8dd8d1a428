// Linears of integers and bf16 on AMX tile registers.  The other kernels of this level are those of AVX-512, whose
// translation unit must not contain AMX instructions.
//
// A tile of weights in the file, 16 outputs by 64 bytes of columns, has the layout of a tile register, and so has a
// block of rows of activations (QuantizedRows): no rearrangement is needed.  Two blocks of rows by two tiles of weights
// use all eight registers, four for sums and four for operands.
#if defined(__GNUC__) && !defined(__clang__)  // as in avx512.cpp
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wunused-function"  // only a part of the headers is used

#include <stddef.h>
#include <stdint.h>

#include "levels/amx.h"
#include "levels/avx512_bf16.h"
#include "base/kernels.h"
#include "penstock_dev.h"

#ifdef __AMX_INT8__

#include <immintrin.h>

#include "simd/avx512.h"

#include "base/build.h"
#include "base/tiles.h"
#include "simd/elementary.h"
#include "rows/norms.h"
#include "rows/activation.h"
#include "rows/reduce.h"
#include "rows/quantize.h"
#include "linear/store_lines.h"
#include "linear/blocks.h"
#include "linear/integer.h"
#include "linear/bf16_rows.h"
#include "linear/amx_sums.h"

namespace ps {
namespace {

constexpr int64_t kTileBytes = 1024;
static_assert(kIntRows == 16, "blocks of rows are those of a tile register");

// The prefetch distance of a memory-bound pass, for each of its two tiles.  Prefetched lines and the rows share the L1
// cache, 48 KiB here; what does not fit is fetched twice.
PS_INLINE int64_t tile_prefetch_distance(int64_t blocks) { return blocks == 1 ? 4096 : 2048; }

// A compiler barrier before tile loads: gcc's intrinsics do not declare the memory that they read.
PS_INLINE void written_for_tiles() { __asm__ volatile("" : : : "memory"); }

// Configures tiles of `rows` rows for activations and sums; weights always have sixteen.  Released at the end of the
// caller's range, because the system saves configured tiles at each context switch.
class TileShapes {
 public:
  explicit TileShapes(int64_t rows) {
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; ++t) {
      shapes.bytes[t] = 64;
      shapes.rows[t] = t < 6 ? uint8_t(rows) : 16;
    }
    written_for_tiles();
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
};

// 64 bytes of columns of A blocks of rows by those of N tiles.
template <class Type, int A, int N>
PS_INLINE void multiply(const uint8_t* const* x, const uint8_t* const* w) {
  written_for_tiles();
  _tile_loadd(4, x[0], 64);
  _tile_loadd(6, w[0], 64);
  Type::dot0();
  if constexpr (N == 2) {
    _tile_loadd(7, w[1], 64);
    Type::dot1();
  }
  if constexpr (A == 2) {
    _tile_loadd(5, x[1], 64);
    Type::dot2();
    if constexpr (N == 2) Type::dot3();
  }
}

// y [A][16][N][16]
template <int A, int N>
PS_INLINE void store_sums(void* y) {
  uint8_t* const at = (uint8_t*)y;
  _tile_stored(0, at, 64 * N);
  if constexpr (N == 2) _tile_stored(1, at + 64, 64 * N);
  if constexpr (A == 2) _tile_stored(2, at + kTileBytes * N, 64 * N);
  if constexpr (A == 2 && N == 2) _tile_stored(3, at + kTileBytes * N + 64, 64 * N);
}

PS_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// One pass over the columns of up to two tiles.
struct Pass {
  const uint8_t *x[2], *w[2];
  int64_t x_step[2];       // 64 bytes for each row of the block
  int64_t lines;           // units of 64 bytes of a tile: the last step may have fewer than 16
  const uint8_t* next[2];  // prefetched, next_lines of each with each step, in one run
  int64_t next_lines;
};

template <class Type, int A, int N>
__attribute__((noinline)) void run(const Pass& pass, Waiting<Type>& waiting, void* y) {
  const uint8_t *x[2] = {pass.x[0], pass.x[1]}, *w[2] = {pass.w[0], pass.w[1]}, *next[2] = {pass.next[0], pass.next[1]};
  const int64_t steps = pass.lines / 16, lines = pass.lines % 16;
  clear_sums();
  const int share = waiting.rows > 16 ? 8 : 4;  // rows at a time: fewer cost more calls, more delay the products
  const int64_t every = waiting.rows > share ? steps * share / waiting.rows : steps;
  int64_t pause = every;
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t i = 0; i < pass.next_lines; ++i)
      for (int t = 0; t < N; ++t) {
        prefetch(next[t]);
        next[t] += 64;
      }
    multiply<Type, A, N>(x, w);
    for (int a = 0; a < A; ++a) x[a] += pass.x_step[a];
    for (int t = 0; t < N; ++t) w[t] += kTileBytes;
    if (--pause <= 0) {
      waiting.finish_until(waiting.done + share < waiting.rows ? waiting.done + share : waiting.rows);
      pause = every;
    }
  }
  if (lines) {  // memory past the tile may hold anything or be unmapped
    alignas(64) uint8_t last[N][kTileBytes] = {};
    const uint8_t* const copies[2] = {last[0], last[N - 1]};
    for (int t = 0; t < N; ++t) __builtin_memcpy(last[t], w[t], size_t(64 * lines));
    multiply<Type, A, N>(x, copies);
    written_for_tiles();  // before the memory of the copies is reused
  }
  waiting.finish_until(waiting.rows);
  store_sums<A, N>(y);
}

template <class Type>
void run_of(int blocks, int tiles, const Pass& pass, Waiting<Type>& waiting, void* y) {
  if (blocks == 2) return tiles == 2 ? run<Type, 2, 2>(pass, waiting, y) : run<Type, 2, 1>(pass, waiting, y);
  return tiles == 2 ? run<Type, 1, 2>(pass, waiting, y) : run<Type, 1, 1>(pass, waiting, y);
}

// A full blocks of rows by N tiles of 4-bit weights.  Each step is dequantized just before it is multiplied.
template <int A, int N>
__attribute__((noinline)) void run4(const Pass& pass, int64_t ahead, Waiting<Integers>& waiting, void* y) {
  constexpr int64_t kSteps = 4, kEarly = 2;
  alignas(64) uint8_t ready[kSteps][N][kTileBytes];
  const int64_t pairs = pass.lines / 16;
  const uint8_t *x[2] = {pass.x[0], pass.x[1]}, *w[2] = {pass.w[0], pass.w[1]};
  clear_sums();
  for (int64_t s = 0; s < pairs + kEarly; ++s) {
    if (s < pairs) PS_UNROLL for (int t = 0; t < N; ++t) {
        dequantize_nibbles(w[t], ahead, ready[s % kSteps][t]);
        w[t] += kPairBytes;
      }
    if (s < kEarly) continue;
    const uint8_t* const at[2] = {ready[(s - kEarly) % kSteps][0], ready[(s - kEarly) % kSteps][N - 1]};
    multiply<Integers, A, N>(x, at);
    for (int a = 0; a < A; ++a) x[a] += pass.x_step[a];
  }
  waiting.finish_until(waiting.rows);
  store_sums<A, N>(y);
}

template <class Type>
void run4_of(int blocks, int tiles, const Pass& pass, int64_t ahead, Waiting<Type>& waiting, void* y) {
  if constexpr (Type::kFour) {
    if (blocks == 2) return tiles == 2 ? run4<2, 2>(pass, ahead, waiting, y) : run4<2, 1>(pass, ahead, waiting, y);
    return tiles == 2 ? run4<1, 2>(pass, ahead, waiting, y) : run4<1, 1>(pass, ahead, waiting, y);
  }
}

// The weight in its packed layout.
struct Tiles {
  int64_t header, bytes, lines;  // header: bytes before the columns; bytes: of a whole tile; lines: units of 64 bytes
                                 // after widening to int8 or bf16
  bool four;

  PS_INLINE TilePair pair_at(const LinearArgs& a, int64_t tile, int64_t end, int64_t group) const {
    TilePair p = {a.gated || tile + 2 <= end ? 2 : 1, {}, {}};
    p.data[0] = a.weight.data + tile * bytes;
    p.data[1] = a.gated ? p.data[0] + a.weight.rows / 32 * bytes : p.count == 2 ? p.data[0] + bytes : p.data[0];
    for (int t = 0; t < 2; ++t) p.next[t] = p.data[t] + group * bytes;
    return p;
  }
};

// A single pass prefetches a short distance ahead.  With several passes, each prefetches its share of the next tiles.
PS_INLINE void set_prefetch(Pass* pass, const Tiles& tiles, const TilePair& pair, int64_t ahead, int64_t index,
                            int64_t passes) {
  const int64_t at = passes == 1 ? 0 : tiles.bytes * index / passes / 64 * 64;
  const int64_t lines = (tiles.bytes / passes + 63) / 64, steps = pass->lines / 16 > 0 ? pass->lines / 16 : 1;
  for (int t = 0; t < 2; ++t) pass->next[t] = passes == 1 ? pair.data[t] + ahead : pair.next[t] + at;
  pass->next_lines = (lines + steps - 1) / steps;
}

// The number of tile pairs that are multiplied by one pair of row blocks before the next.  If all rows fit in the L2
// cache this is one.  Otherwise each pair of row blocks is read once for as many tiles as stay in the cache.
PS_INLINE int64_t pairs_at_once(int64_t lines, int64_t row_bytes) {
  constexpr int64_t kStays = 1 << 20;
  const int64_t pairs = row_bytes <= kStays ? 1 : kStays / (2 * 64 * lines);
  return pairs < 1 ? 1 : pairs > 16 ? 16 : pairs;
}

// The row blocks of pass p, for the products and for the sums that are still to be stored.
template <class Type>
PS_INLINE void put_rows(const LinearArgs& a, int planes, int64_t blocks, int64_t p, Pass* pass, Waiting<Type>* next) {
  for (int i = 0; i < 2 && 2 * p + i < blocks; ++i) {
    const RowBlock block = row_block(a.m, blocks, 2 * p + i);
    pass->x[i] = (const uint8_t*)a.qx.q + block.first * planes * a.qx.stride;
    pass->x_step[i] = 64 * block.count * planes;
    next->blocks[i] = block;
    next->rows += block.count;
  }
}

template <class Type>
void linear_tiles(const LinearArgs& a, const Tiles& tiles, int planes, int64_t begin, int64_t end) {
  const int64_t blocks = num_row_blocks(a.m, planes), passes = (blocks + 1) / 2, step = a.gated ? 1 : 2;
  const int64_t ahead = tile_prefetch_distance(blocks);
  const int64_t group = step * pairs_at_once(tiles.lines, a.m * planes * a.qx.stride), panel_bytes = tiles.lines * 64;
  typename Type::Sum sums[2][2 * 16 * 2];
  Waiting<Type> waiting = {&a, 0, {}, planes, 0, 0, {}, nullptr};
  // The tile shapes of the largest block.  With them a smaller block also reads rows of the next block, whose sums are
  // not used.  The last block is never smaller (row_block), so there always is a next one.
  const TileShapes shapes((a.m + blocks - 1) / blocks * planes);
  int turn = 0;
  for (int64_t first = begin; first < end; first += group)
    for (int64_t p = 0; p < passes; ++p)
      for (int64_t tile = first; tile < end && tile < first + group; tile += step, turn = 1 - turn) {
        const TilePair pair = tiles.pair_at(a, tile, end, group);
        Waiting<Type> next = {&a, tile, pair, planes, 0, 0, {}, sums[turn]};
        Pass pass = {};
        pass.lines = tiles.lines;
        put_rows(a, planes, blocks, p, &pass, &next);
        const int count = 2 * p + 1 < blocks ? 2 : 1;
        uint8_t* panel = a.panel + (tile - first) / step * 2 * panel_bytes;
        for (int t = 0; t < pair.count; ++t, panel += panel_bytes) {
          pass.w[t] = pair.data[t] + tiles.header;
          if (!tiles.four || passes == 1) continue;
          if (p == 0) fill_panel(pass.w[t], tiles.lines / 16, kI4PrefetchBytes, panel);
          pass.w[t] = panel;
        }
        if (tiles.four && passes == 1) {
          run4_of<Type>(count, pair.count, pass, ahead, waiting, sums[turn]);
        } else {
          set_prefetch(&pass, tiles, pair, ahead, p, passes);
          run_of<Type>(count, pair.count, pass, waiting, sums[turn]);
        }
        waiting = next;
      }
  waiting.finish_until(waiting.rows);
}

}  // namespace

// With a few rows both ways are bound by memory, and vectors need fewer steps. 4-bit weights are the exception: tiles
// dequantize them once for all rows, vectors once per row, so tiles are used from two rows on.
void linear_integer_amx(const LinearArgs& a, int64_t begin, int64_t end) {
  const bool four = is_int4(a.weight.layout);
  if (a.m * a.qx.planes <= (four ? 1 : kGroupRows)) return kernels_avx512->linear[LINEAR_W8A8](a, begin, end);
  const int64_t steps = num_i8_lines(a.weight.cols), pairs = num_pairs(a.weight.cols);
  const Tiles tiles = four ? Tiles{kScaleBytes, i4_tile_bytes(a.weight.cols), pairs * 16, true}
                           : Tiles{kScaleBytes, i8_tile_bytes(a.weight.cols), steps, false};
  linear_tiles<Integers>(a, tiles, a.qx.planes, begin, end);
}

void quantize_rows_amx(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout,
                       const QuantizedRows& out, int64_t begin, int64_t end) {
  quantize_rows(x, x_stride, cols, m, layout, out, begin, end);
}

int64_t linear_panel_bytes_amx(int32_t layout, int64_t cols, int64_t m, int32_t planes) {
  if (!is_int4(layout) || num_row_blocks(m, planes) <= 2) return 0;
  const int64_t pairs = num_pairs(cols);
  return pairs_at_once(pairs * 16, m * planes * pairs * 64) * pairs * 2 * kTileBytes;
}

void linear_bf16_amx(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t pairs = (a.weight.cols + 1) / 2;
  linear_tiles<Halves>(a, Tiles{0, pairs * 64, pairs, false}, 1, begin, end);
}

void round_rows_bf16_amx(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                         int64_t begin, int64_t end) {
  round_rows_to_pairs(x, x_stride, cols, m, out, begin, end);
}

// Random operands, as weights are, from the L1 cache: processors multiply zeros a third faster because that takes less
// power.
int64_t peak_amx(int32_t dtype, int64_t iterations) {
  alignas(64) uint16_t operands[4][kTileBytes / 2];
  uint32_t state = 1;
  for (auto& operand : operands)
    for (uint16_t& pair : operand) {
      state = state * 1664525u + 1013904223u;
      pair = uint16_t(state >> 16 & (dtype == PS_I8 ? 0xffff : 0x80ff)) | (dtype == PS_I8 ? 0 : 0x3f00);
    }
  const uint8_t* const x[2] = {(const uint8_t*)operands[0], (const uint8_t*)operands[1]};
  const uint8_t* const w[2] = {(const uint8_t*)operands[2], (const uint8_t*)operands[3]};
  const TileShapes shapes(16);
  clear_sums();
  for (int64_t i = 0; i < iterations; ++i) {
    if (dtype == PS_I8) multiply<Integers, 2, 2>(x, w);
    else multiply<Halves, 2, 2>(x, w);
  }
  return iterations * 4 * 2 * 16 * 16 * (dtype == PS_I8 ? 64 : 32);
}

}  // namespace ps

#endif
