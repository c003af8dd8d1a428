// Linear with the block types of GGUF.  Activations are rounded to int8 in groups of 32 columns, each with its own
// scale.  The integers of each group are summed exactly, and one fused multiply-add per scale (and another for types
// with a minimum) adds them to the output, groups ascending: every level computes the same bits for any blocks of rows.
#ifndef PENSTOCK_KERNELS_LINEAR_BLOCKS_ROWS_H
#define PENSTOCK_KERNELS_LINEAR_BLOCKS_ROWS_H

namespace ps {
namespace {

struct BlockRows {  // rows of activations, `stride` bytes apart
  const uint8_t* x;
  int64_t stride;
  int count;
  // If there are fewer rows than the kernel takes, the last one is computed again.
  PS_INLINE const RoundedGroup* row(int i) const {
    return (const RoundedGroup*)(x + (i < count ? i : count - 1) * stride);
  }
};

// A few unpacked groups of a tile, so few that they and the activations of kPanelRows rows stay in the L1 cache.
constexpr int kChunkGroups = 8, kPanelRows = 32;
struct Chunk {
  Slot slots[kChunkGroups];
  const uint8_t* q[kChunkGroups];  // the bytes of each: in its slot, or in the tile
  int count;
};

// A pass over the groups of a tile, with a prefetch distance of `ahead` bytes.
struct Pass {
  const uint8_t* tile;
  int64_t groups, group_bytes, ahead;
  PS_INLINE Pass(const WeightView& w, const uint8_t* start, int64_t by)
      : tile(start), groups(w.cols / kGroupColumns), group_bytes(tile_bytes_of(w.layout, w.cols) / groups), ahead(by) {}
};

// The part of the pass's bytes that one step prefetches.
struct TilePrefetch {
  const uint8_t* from;
  int64_t bytes;
  PS_INLINE void step(int64_t n) const {
    const uint8_t* const next = from + bytes * n;
    for (int64_t at = 0; at < bytes; at += kLineBytes) prefetch(next + at);
  }
};

// Unpacks up to kChunkGroups groups of a tile into `chunk`, from group g on.
template <int32_t kLayout>
__attribute__((noinline)) void fill_chunk(const Pass& pass, int64_t g, Chunk* chunk) {
  chunk->count = int(pass.groups - g < kChunkGroups ? pass.groups - g : kChunkGroups);
  for (int n = 0; n < chunk->count; ++n) chunk->q[n] = put_group(kLayout, pass.tile, g + n, chunk->slots + n);
}

// How the bytes of a group are multiplied: signed; unsigned up to 15 or up to 31; up to 31 or 63 with an integer scale
// for each 16 columns; or up to 31 with a float scale for each 16.
enum Products { SIGNED, NIBBLES, PLAIN, HALVES, HALVES_OF_63, FLOAT_HALVES };
constexpr Products products_of(int32_t layout) {
  if (layout == PS_T16_Q8_0 || layout == PS_T16_IQ4_NL || layout == PS_T16_IQ4_XS) return SIGNED;
  if (layout == PS_T16_NVFP4) return FLOAT_HALVES;
  if (is_low_bit(layout)) return NIBBLES;
  if (layout == PS_T16_Q4_K || layout == PS_T16_Q4_0 || layout == PS_T16_Q4_1 || layout == PS_T16_UINT4) return NIBBLES;
  return layout == PS_T16_Q6_K ? HALVES_OF_63 : has_halves(layout) ? HALVES : PLAIN;
}

// sum [M]: the products of a group; each 16 columns are multiplied by their step.
template <Products kProducts, int M>
PS_INLINE void group_sums(const uint8_t* q, const Slot& s, const RoundedGroup* const (&x)[M], int64_t n,
                          I16 (&sum)[M]) {
  constexpr int kLines = 2 * kGroupLines;
  if (kProducts == SIGNED) {
    PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w8_start(x[i][n].sum);
    PS_UNROLL for (int j = 0; j < kLines; ++j) {
      const W8 v = w8_load(q + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w8_dot(sum[i], v, x[i][n].q + kRowBytes * j), keep_order(sum[i]);
    }
    return;
  }
  constexpr bool kHalves = kProducts == HALVES || kProducts == HALVES_OF_63;
  constexpr int kRun = kProducts == HALVES_OF_63 ? 2
                       : kProducts == NIBBLES    ? 8
                                                 : 4;  // lines whose products fit the sums of u8_dot
  PS_UNROLL for (int first = 0; first < kLines; first += kRun) {
    U16 part[M];
    PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_zero();
    PS_UNROLL for (int j = first; j < first + kRun; ++j) {
      const U8 v = u8_load(q + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_dot(part[i], v, x[i][n].q + kRowBytes * j);
    }
    I16 step;
    if (kHalves) step = i_load(s.step[first / kGroupLines]);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      const I16 own = kHalves ? u8_times(part[i], step) : u8_sum(part[i]);  // exact: 32 * 63 * 127 * 128 < 2^31
      sum[i] = first ? sum[i] + own : own;
    }
  }
}

// acc [M] += a group's sums, which are exact as floats: below 2^24.
template <Products kProducts, int M>
PS_INLINE void add_sums(int32_t layout, const Slot& s, const RoundedGroup* const (&x)[M], int64_t n, I16 (&sum)[M],
                        F16 (&acc)[M]) {
  if (kProducts != SIGNED && has_start(layout)) {
    const I16 start = i_load(s.start);
    PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = sum[i] + i_pairs(start, x[i][n].half_sums);
  }
  const F16 scale = f_load(s.scale);
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(f_from_i(sum[i]), scale * f_set(x[i][n].scale), acc[i]);
  if (kProducts == SIGNED || kProducts == HALVES_OF_63 || !has_minimum(layout)) return;
  const F16 minimum = f_load(s.minimum);
  if (kProducts == HALVES) {  // Q2_K: multipliers of 4 bits
    const I16 start = i_load(s.start);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      acc[i] = f_fma(f_from_i(i_pairs(start, x[i][n].half_sums)), minimum * f_set(x[i][n].scale), acc[i]);
    }
  } else {
    PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(f_set(x[i][n].scaled_sum), minimum, acc[i]);
  }
}

// acc [M] += the products of a group with a float scale for each 16 columns, first those of the first 16.
template <int M>
PS_INLINE void add_float_halves(int32_t layout, const uint8_t* q, const Slot& s, const RoundedGroup* const (&x)[M],
                                int64_t n, F16 (&acc)[M]) {
  PS_UNROLL for (int h = 0; h < 2; ++h) {
    U16 part[M];
    PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_zero();
    PS_UNROLL for (int j = h * kGroupLines; j < (h + 1) * kGroupLines; ++j) {
      const U8 v = u8_load(q + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_dot(part[i], v, x[i][n].q + kRowBytes * j);
    }
    const F16 scale = f_load(h ? s.last_scale : s.scale);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      const I16 sum = u8_sum(part[i]) - i_set(zero_of(layout) * x[i][n].half_sums[h]);
      acc[i] = f_fma(f_from_i(sum), scale * f_set(x[i][n].scale), acc[i]);
    }
  }
}

// acc [M] += a group's products.
template <Products kProducts, int M>
PS_INLINE void add_group(int32_t layout, const uint8_t* q, const Slot& s, const RoundedGroup* const (&x)[M], int64_t n,
                         F16 (&acc)[M]) {
  if constexpr (kProducts == FLOAT_HALVES) return add_float_halves<M>(layout, q, s, x, n, acc);
  I16 sum[M];
  group_sums<kProducts, M>(q, s, x, n, sum);
  add_sums<kProducts, M>(layout, s, x, n, sum, acc);
}

// y [M] += the products of a chunk that begins with group g.
template <Products kProducts, int M>
__attribute__((noinline)) void chunk_rows(int32_t layout, const Chunk& chunk, int64_t g, const BlockRows& rows,
                                          const TilePrefetch& prefetcher, F16* y) {
  const RoundedGroup* x[M];
  F16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) x[i] = rows.row(i) + g, acc[i] = y[i];
  for (int n = 0; n < chunk.count; ++n) {
    prefetcher.step(n);
    add_group<kProducts, M>(layout, chunk.q[n], chunk.slots[n], x, n, acc);
  }
  PS_UNROLL for (int i = 0; i < M; ++i) y[i] = acc[i];
}

constexpr int kBlockRows = kIntRows >= 8 ? 8 : kIntRows >= 4 ? 4 : 2;

// y [rows.count, rounded up to kBlockRows] += the products of a chunk.  Each block of rows prefetches its share of the
// bytes of a later chunk, so memory is never idle.
template <Products kProducts>
__attribute__((noinline)) void all_rows(int32_t layout, const Chunk& chunk, const Pass& pass, int64_t g, BlockRows rows,
                                        F16* y) {
  const int blocks = (rows.count + kBlockRows - 1) / kBlockRows;
  TilePrefetch prefetcher = {pass.tile + pass.group_bytes * g + pass.ahead, (pass.group_bytes + blocks - 1) / blocks};
  int done;  // more than remain, at the end
  for (; rows.count > 0;
       rows.count -= done, rows.x += done * rows.stride, y += done, prefetcher.from += prefetcher.bytes * chunk.count) {
    if (rows.count > 6 && kBlockRows > 4)
      chunk_rows<kProducts, kBlockRows>(layout, chunk, g, rows, prefetcher, y), done = kBlockRows;
    else if (rows.count > 2 && kBlockRows > 2)
      chunk_rows<kProducts, 4>(layout, chunk, g, rows, prefetcher, y), done = 4;
    else chunk_rows<kProducts, 2>(layout, chunk, g, rows, prefetcher, y), done = 2;
  }
}

// The product of one row: values go from the tile to registers without a copy in memory.
template <int32_t kLayout>
__attribute__((noinline)) void one_row(const Pass& pass, const uint8_t* row, F16* y) {
  const RoundedGroup* const x[1] = {(const RoundedGroup*)row};
  const TilePrefetch prefetcher = {pass.tile + pass.ahead, pass.group_bytes};
  F16 acc[1] = {f_set(0.f)};
  for (int64_t g = 0; g < pass.groups; ++g) {
    Slot own;
    prefetcher.step(g);
    const uint8_t* const q = put_group(kLayout, pass.tile, g, &own);
    add_group<products_of(kLayout), 1>(kLayout, q, own, x, g, acc);
  }
  *y = acc[0];
}

// If the level can multiply nibbles without unpacking them, up to this many rows do so.
constexpr int kNibbleRows = 4;
constexpr bool as_nibbles(int32_t layout) {
  return kGroupRows >= kNibbleRows && products_of(layout) == NIBBLES && !is_low_bit(layout);
}

template <int32_t kLayout>
__attribute__((noinline)) void nibble_rows(const Pass& pass, const BlockRows& rows, F16* y) {
  constexpr int M = kNibbleRows;
  const TilePrefetch prefetcher = {pass.tile + pass.ahead, pass.group_bytes};
  const RoundedGroup* x[M];
  F16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) x[i] = rows.row(i), acc[i] = f_set(0.f);
  for (int64_t g = 0; g < pass.groups; ++g) {
    prefetcher.step(g);
    Slot own;
    put_group(kLayout, pass.tile, g, &own);  // only for its parameters: the values are not read
    const uint8_t* const p = nibbles_of(kLayout, place_of(kLayout, pass.tile, g), g);
    G16 part[M];
    I16 sum[M];
    PS_UNROLL for (int i = 0; i < M; ++i) part[i] = w4_zero();
#pragma GCC unroll 1
    for (int j = 0; j < kGroupLines; ++j) {  // unrolled, it would keep products in memory
      const W4 v = w4_load(p + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) {
        const int8_t* const x4 = x[i][g].q + kRowBytes * j;
        part[i] = w4_dot(part[i], v, x4, x4 + 16);
      }
    }
    PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w4_sum(part[i]);
    add_sums<NIBBLES, M>(kLayout, own, x, g, sum, acc);
  }
  PS_UNROLL for (int i = 0; i < M; ++i) y[i] = acc[i];
}

// To keep the generic level small, it computes one row of NVFP4 and of low-bit layouts like several rows.
constexpr bool has_one_row(int32_t layout) { return kIntRows > 2 || layout < PS_T16_NVFP4; }

// y [rows.count, rounded up to kBlockRows]: rows by one tile.
template <int32_t kLayout>
PS_INLINE void tile_rows(const Pass& pass, const BlockRows& rows, F16* y) {
  if constexpr (has_one_row(kLayout)) {
    if (rows.count == 1) return one_row<kLayout>(pass, rows.x, y);
  }
  if constexpr (as_nibbles(kLayout)) {
    if (rows.count <= kNibbleRows) return nibble_rows<kLayout>(pass, rows, y);
  }
  for (int i = 0; i < rows.count + kBlockRows - 1; ++i) y[i] = f_set(0.f);
  Chunk chunk;
  for (int64_t g = 0; g < pass.groups; g += kChunkGroups) {
    fill_chunk<kLayout>(pass, g, &chunk);
    all_rows<products_of(kLayout)>(kLayout, chunk, pass, g, rows, y);
  }
}

// Tiles [begin, end) of the output, that is of the weight, or of its gate half if the op is gated.  Blocks of rows are
// the outer loop: their activations stay in the L2 cache, and weights are unpacked once per block.
void linear_blocks(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t blocks = (a.m + kPanelRows - 1) / kPanelRows,
                tile_bytes = tile_bytes_of(a.weight.layout, a.weight.cols);
  const int64_t ahead = prefetch_distance(a, a.m, kI8PrefetchBytes);
  for (int64_t b = 0; b < blocks; ++b) {
    const RowBlock block = row_block(a.m, blocks, b);
    const BlockRows rows = {(const uint8_t*)a.qx.q + block.first * a.qx.stride, a.qx.stride, block.count};
    for (int64_t tile = begin; tile < end; ++tile) {
      F16 y[2][kPanelRows + kBlockRows];
      StoreLines(a, block.first, tile, block.count, 1).prefetch_all();
      for (int t = 0; t < 1 + a.gated; ++t)
        with_layout(a.weight.layout, [&](auto layout) {
          tile_rows<decltype(layout)::value>(
              Pass(a.weight, a.weight.data + (tile + t * (a.weight.rows / 32)) * tile_bytes, ahead), rows, y[t]);
        });
      if (a.gated) store_gated(a, block.first, tile, block.count, 1, y[0], y[1]);
      else store_block(a, block.first, tile, block.count, 1, y[0]);
    }
  }
}

// ---- rows as float32: the values of the file, rounded like the format's reference ----------------------------------

inline void group_to_f32(int32_t layout, const uint8_t* q, const Slot& s, int lane, float* y) {
  for (int i = 0; i < kGroupColumns; ++i) {
    float scale = layout == PS_T16_NVFP4 && i >= 16 ? s.last_scale[lane] : s.scale[lane];
    if (has_halves(layout)) scale = scale * float(s.step[i / 16][lane][0]);
    const int zero = layout == PS_T16_UINT4 ? -s.start[lane][0] : zero_of(layout);
    y[i] = scale * float(int8_t(q[byte_at(i, lane)]) - zero);
    if (!has_minimum(layout)) continue;
    const float minimum = s.minimum[lane];
    y[i] = y[i] + (layout == PS_T16_Q2_K ? minimum * float(s.start[lane][i / 16]) : minimum);
  }
}

inline void blocks_to_f32(const WeightView& w, const uint8_t* tile, int lane, float* y) {
  const Pass pass(w, tile, 0);
  Chunk chunk;
  for (int64_t g = 0; g < pass.groups; g += kChunkGroups) {
    with_layout(w.layout, [&](auto layout) { fill_chunk<decltype(layout)::value>(pass, g, &chunk); });
    for (int n = 0; n < chunk.count; ++n, y += kGroupColumns)
      group_to_f32(w.layout, chunk.q[n], chunk.slots[n], lane, y);
  }
}

}  // namespace
}  // namespace ps

#endif
