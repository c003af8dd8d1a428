// Linear with integer weights and integer activations: w8a8, w4a8, and the a16 schemes with two int8 rows for each
// token.  Sums over K are exact, so the methods below may add in any order and still agree to the last bit:
//   - 8 bit: rows of activations against two tiles at a time.
//   - 4 bit, few rows: nibbles are multiplied as they are.  Each group's sum is scaled by its parameters (step, offset)
//     afterwards.
//   - 4 bit, one block of rows (more than others have: see kLoneRows): nibbles are dequantized to int8 in registers.
//   - 4 bit, more rows: two tiles are dequantized once, into a panel that is then an 8-bit weight.
#ifndef PENSTOCK_KERNELS_LINEAR_INTEGER_H
#define PENSTOCK_KERNELS_LINEAR_INTEGER_H

namespace ps {
namespace {

// Prefetch distance in bytes: bandwidth times latency, and more, because a few rows consume a line faster than it
// arrives.
constexpr int kI8PrefetchBytes = 8192, kI4PrefetchBytes = 16384;
constexpr int kStreamRows = 2;  // up to this many int8 rows read one tile at a time, as one sequential stream

// One block of rows: see QuantizedRows.
struct Activations {
  const int8_t* q;            // [stride / 64][rows][64]
  const int32_t* sums;        // [rows]
  const int16_t* group_sums;  // [stride / 64][rows][2]
  int rows;
};

// The prefetch of a pass over tiles: one address per tile, which advances by `step` bytes in each step.
struct Prefetch {
  const uint8_t* at[2];
  int64_t step;
};

template <int n>
struct Rows {
  static constexpr int value = n;
};
// Calls f(Rows<rows>{}).
template <class F>
PS_INLINE void with_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(Rows<1>{});
    case 2: return f(Rows<2>{});
    case 3:
      if constexpr (kIntRows >= 3) return f(Rows<3>{});
      break;
    case 4:
      if constexpr (kIntRows >= 4) return f(Rows<4>{});
      break;
    case 5:
      if constexpr (kIntRows >= 5) return f(Rows<5>{});
      break;
    case 6:
      if constexpr (kIntRows >= 6) return f(Rows<6>{});
      break;
    case 7:
      if constexpr (kIntRows >= 7) return f(Rows<7>{});
      break;
    case 8:
      if constexpr (kIntRows >= 8) return f(Rows<8>{});
      break;
    case 9:
      if constexpr (kIntRows >= 9) return f(Rows<9>{});
      break;
    case 10:
      if constexpr (kIntRows >= 10) return f(Rows<10>{});
      break;
    case 11:
      if constexpr (kIntRows >= 11) return f(Rows<11>{});
      break;
    case 12:
      if constexpr (kIntRows >= 12) return f(Rows<12>{});
      break;
  }
}

// out [M][N]: sums over `steps` times four columns of N tiles of int8; w points to their columns.
template <int M, int N>
__attribute__((noinline)) void dot8(const uint8_t* const* w, const Activations& x, int64_t steps, const Prefetch& ahead,
                                    StoreLines lines, I16* out) {
  const uint8_t *p[N], *next[N];
  const int8_t* q = x.q;
  const int64_t ahead_step = ahead.step;
  I16 acc[M][N];
  PS_UNROLL for (int t = 0; t < N; ++t) p[t] = w[t], next[t] = ahead.at[t];
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = w8_start(x.sums[i]);
  for (int64_t s = 0; s < steps; q += 64 * (M - 1)) {
    lines.prefetch_pieces((steps - s + 15) / 16);
    for (const int64_t stop = s + 16 < steps ? s + 16 : steps; s < stop; ++s, q += 4) {
      W8 v[N];
      PS_UNROLL for (int t = 0; t < N; ++t) {
        v[t] = w8_load(p[t] + 64 * s);
        prefetch(next[t] + s * ahead_step);
      }
      PS_UNROLL for (int i = 0; i < M; ++i) {
        PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = w8_dot(acc[i][t], v[t], q + 64 * i);
      }
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) out[i * N + t] = acc[i][t];
}

// out [M]: one tile of 4-bit weights; w points to its first pair of groups.
template <int M>
__attribute__((noinline)) void dot4(const uint8_t* w, const Activations& x, int64_t pairs, int64_t ahead, I16* out) {
  const int8_t* q = x.q;
  I16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = w8_start(x.sums[i]);
  for (int64_t s = 0; s < pairs; ++s, w += kPairBytes, q += kPairColumns * M) {
    const I16 params = i_load(w);
    prefetch(w + ahead);
    PS_UNROLL for (int g = 0; g < 2; ++g) {
      const GroupParams group = w4_group_params(params, g, true);
      PS_UNROLL for (int j = 0; j < 4; ++j) {
        const uint8_t* p = w + kParameterBytes + kGroupNibbleBytes * g + kLineBytes * j;
        prefetch(p + ahead);
        const I16 bytes = i_load(p);
        const W8 low = w8_ready(w4_low(bytes, group)), high = w8_ready(w4_high(bytes, group));
        PS_UNROLL for (int i = 0; i < M; ++i) {
          const int8_t* const x4 = q + kPairColumns * i + kGroupColumns * g + kRowBytes * j;
          acc[i] = w8_dot(w8_dot(acc[i], low, x4), high, x4 + 16);
        }
      }
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i) out[i] = acc[i];
}

// With one row, prefetch into L2 only: the line is used before a move to L1 would pay.
template <int M>
PS_INLINE void prefetch_weights(const uint8_t* line) {
  __builtin_prefetch(line, 0, M == 1 ? 2 : 3);
}

template <int M>
__attribute__((noinline)) void dot4_by_groups(const uint8_t* w, const Activations& x, int64_t pairs, int64_t ahead,
                                              I16* out) {
  const int8_t* q = x.q;
  const int16_t* group_sums = x.group_sums;
  I16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = i_set(0);
  for (int64_t s = 0; s < pairs; ++s, w += kPairBytes, q += kPairColumns * M, group_sums += 2 * M) {
    const I16 params = i_load(w);
    prefetch_weights<M>(w + ahead);
    PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = w4_offsets(acc[i], params, group_sums + 2 * i);
    PS_UNROLL for (int g = 0; g < 2; ++g) {
      G16 sum[M];
      PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w4_zero();
      PS_UNROLL for (int j = 0; j < 4; ++j) {
        const uint8_t* p = w + kParameterBytes + kGroupNibbleBytes * g + kLineBytes * j;
        prefetch_weights<M>(p + ahead);
        const W4 v = w4_load(p);
        PS_UNROLL for (int i = 0; i < M; ++i) {
          const int8_t* const x4 = q + kPairColumns * i + kGroupColumns * g + kRowBytes * j;
          sum[i] = w4_dot(sum[i], v, x4, x4 + 16);
        }
      }
      const I16 step = w4_steps(params, g);
      PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = acc[i] + i_mul(w4_sum(sum[i]), step);
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i) out[i] = acc[i];
}

// Dequantizes 64 columns of a tile of 4-bit weights: int8 [16][16][4].
PS_INLINE void dequantize_nibbles(const uint8_t* w, int64_t ahead, uint8_t* y) {
  const I16 params = i_load(w);
  prefetch(w + ahead);
  PS_UNROLL for (int g = 0; g < 2; ++g, y += 512) {
    const GroupParams group = w4_group_params(params, g, false);
    PS_UNROLL for (int j = 0; j < 4; ++j) {
      const uint8_t* p = w + kParameterBytes + kGroupNibbleBytes * g + kLineBytes * j;
      prefetch(p + ahead);
      const I16 bytes = i_load(p);
      i_store(y + 64 * j, w4_low(bytes, group));
      i_store(y + 256 + 64 * j, w4_high(bytes, group));
    }
  }
}

// All columns of a tile: int8 [pairs * 16][16][4].
__attribute__((noinline)) void fill_panel(const uint8_t* w, int64_t pairs, int64_t ahead, uint8_t* panel) {
  for (int64_t s = 0; s < pairs; ++s, w += kPairBytes, panel += 1024) dequantize_nibbles(w, ahead, panel);
}

// One or two tiles of int8 for a block of rows: out [rows][n].
inline void dot8_tiles(const uint8_t* const* w, int n, const Activations& x, int64_t steps, const Prefetch& ahead,
                       const StoreLines& lines, I16* out) {
  if (n == 1) return with_rows(x.rows, [&](auto m) { dot8<decltype(m)::value, 1>(w, x, steps, ahead, lines, out); });
  if constexpr (kIntTiles == 2)
    return with_rows(x.rows, [&](auto m) { dot8<decltype(m)::value, 2>(w, x, steps, ahead, lines, out); });
  for (int t = 0; t < n; ++t) {
    I16 one[kIntRows] = {};
    dot8_tiles(w + t, 1, x, steps, Prefetch{{ahead.at[t], nullptr}, ahead.step}, lines, one);
    for (int i = 0; i < x.rows; ++i) out[2 * i + t] = one[i];
  }
}

// One tile by more rows than kIntRows.
inline void dot4_lone(const uint8_t* w, const Activations& x, int64_t pairs, int64_t ahead, I16* out) {
  switch (x.rows) {
    case 13: return dot4<13>(w, x, pairs, ahead, out);
    case 14: return dot4<14>(w, x, pairs, ahead, out);
    case 15: return dot4<15>(w, x, pairs, ahead, out);
    case 16: return dot4<16>(w, x, pairs, ahead, out);
  }
}

inline void dot4_tile(const uint8_t* w, const Activations& x, int64_t pairs, int64_t ahead, I16* out) {
  if (x.rows <= kGroupRows) {
    with_rows(x.rows, [&](auto m) {
      if constexpr (decltype(m)::value <= kGroupRows) dot4_by_groups<decltype(m)::value>(w, x, pairs, ahead, out);
    });
  } else if (x.rows > kIntRows) {
    if constexpr (kLoneRows > kIntRows) dot4_lone(w, x, pairs, ahead, out);
  } else {
    with_rows(x.rows, [&](auto m) {
      if constexpr (decltype(m)::value > kGroupRows) dot4<decltype(m)::value>(w, x, pairs, ahead, out);
    });
  }
}

// The value of a token: its sum, or its two sums for high and low activations, n apart.
PS_INLINE F16 value_of(const LinearArgs& a, int64_t token, const I16* sums, int64_t n, F16 scale) {
  F16 v = f_from_i(sums[0]);
  if (a.qx.planes == 2) v = f_fma(v, f_set(float(kPlaneBase)), f_from_i(sums[n]));
  return v * (scale * f_set(a.qx.scale[token]));
}

struct Tile {
  int64_t column;  // first output column
  F16 scale;
  const I16* sums;  // of its first token
};

__attribute__((noinline)) void finish_tile(const LinearArgs& a, const RowBlock& block, const Tile& tile, int64_t n) {
  const int width = tail(a.weight.rows, tile.column);
  const F16 bias = a.bias ? f_load_n(a.bias + tile.column, width) : f_set(0.f);
  float* y = a.y + block.first * a.y_stride + tile.column;
  const float* residual = a.residual ? a.residual + block.first * a.residual_stride + tile.column : nullptr;
  const I16* sums = tile.sums;
  for (int i = 0; i < block.count; ++i, y += a.y_stride, sums += a.qx.planes * n) {
    F16 v = value_of(a, block.first + i, sums, n, tile.scale);
    if (a.bias) v = v + bias;
    if (residual) v = v + f_load_n(residual + i * a.residual_stride, width);
    if (width == 16) f_store(y, v);
    else f_store_n(y, v, width);
  }
}

__attribute__((noinline)) void finish_gated(const LinearArgs& a, const RowBlock& block, const Tile& gate,
                                            const Tile& up) {
  F16 y[kLoneRows * 2];
  for (int i = 0; i < block.count; ++i) {
    const int64_t at = i * a.qx.planes * 2;
    y[2 * i] = value_of(a, block.first + i, gate.sums + at, 2, gate.scale);
    y[2 * i + 1] = value_of(a, block.first + i, up.sums + at, 2, up.scale);
  }
  store_gated(a, block.first, gate.column / 16, block.count, 2, y, y + 1);
}

// A single block prefetches its own tiles a short distance ahead.  With several blocks only the first would read from
// memory, so each prefetches its share of the next tiles to keep memory busy.
PS_INLINE Prefetch prefetch_of(const LinearArgs& a, const uint8_t* const* w, const uint8_t* const* next, int64_t bytes,
                               int64_t blocks, int64_t b, int64_t steps) {
  const int64_t by = prefetch_distance(a, a.m * a.qx.planes, kI8PrefetchBytes);
  if (blocks == 1) return {{w[0] + by, w[1] + by}, 64};
  return {{next[0] + bytes * b / blocks, next[1] + bytes * b / blocks}, bytes / (blocks * steps)};
}

constexpr int kStreamTiles = 8;
// A few tiles [begin, end) of 4-bit weights by one block of rows, which is bound by memory.  They are read as one
// sequential stream; gated: the tiles of the gate, then those of `up`.
void stream4(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t pairs = num_pairs(a.weight.cols), tile_bytes = i4_tile_bytes(a.weight.cols), half = a.weight.rows / 32;
  const int n = a.gated ? 2 : 1;
  const Activations x = {a.qx.q, a.qx.sums, a.qx.group_sums, a.m * a.qx.planes};
  const int64_t ahead = prefetch_distance(a, 2 * x.rows, kI4PrefetchBytes);
  I16 sums[kStreamTiles][kLoneRows * 2], one[kLoneRows] = {};
  F16 scales[kStreamTiles][2];
  for (int t = 0; t < n; ++t)
    for (int64_t tile = begin; tile < end; ++tile) {
      const uint8_t* const w = a.weight.data + (tile + t * half) * tile_bytes;
      scales[tile - begin][t] = f_load((const float*)w);
      StoreLines(a, 0, tile, a.m, 1).prefetch_all();
      dot4_tile(w + kScaleBytes, x, pairs, ahead, one);
      for (int i = 0; i < x.rows; ++i) sums[tile - begin][n * i + t] = one[i];
    }
  for (int64_t tile = begin; tile < end; ++tile) {
    const I16* const of = sums[tile - begin];
    const F16* const scale = scales[tile - begin];
    if (a.gated) finish_gated(a, {0, a.m}, {tile * 16, scale[0], of}, {0, scale[1], of + 1});
    else finish_tile(a, {0, a.m}, {tile * 16, scale[0], of}, 1);
  }
}

// Tiles [begin, end) of the output, that is of the weight, or of its gate half if the op is gated.
void linear_integer(const LinearArgs& a, int64_t begin, int64_t end) {
  const bool four = is_int4(a.weight.layout);
  const int64_t steps = num_i8_lines(a.weight.cols), pairs = num_pairs(a.weight.cols), stride = a.qx.stride;
  const int64_t tile_bytes = four ? i4_tile_bytes(a.weight.cols) : i8_tile_bytes(a.weight.cols);
  const int64_t blocks = num_int_blocks(a.weight.layout, a.m, a.qx.planes);
  const bool pairwise = kIntTiles == 2 && (four || a.m * a.qx.planes > kStreamRows);
  const bool panel = four && blocks > 1 && kGroupRows < kIntRows;
  if (four && blocks == 1) {
    for (; begin < end; begin += kStreamTiles)
      stream4(a, begin, begin + kStreamTiles < end ? begin + kStreamTiles : end);
    return;
  }
  for (int64_t tile = begin; tile < end;) {
    const int n = a.gated || (pairwise && tile + 2 <= end) ? 2 : 1;
    const uint8_t *tiles[2], *next[2] = {}, *w[2] = {};
    F16 scales[2];
    for (int t = 0; t < n; ++t) {
      const int64_t at = !t ? tile : a.gated ? tile + a.weight.rows / 32 : tile + 1;
      tiles[t] = a.weight.data + at * tile_bytes;
      scales[t] = f_load((const float*)tiles[t]);
      next[t] = tiles[t] + (a.gated ? 1 : n) * tile_bytes;
      w[t] = tiles[t] + kScaleBytes;
      if (panel) {
        uint8_t* const memory = a.panel + t * (pairs * 1024 + 64);  // the extra 64 bytes avoid bank conflicts
        fill_panel(w[t], pairs, prefetch_distance(a, 2, kI4PrefetchBytes), memory);
        w[t] = memory;
      }
    }
    if (n == 1) w[1] = w[0], next[1] = next[0];
    for (int64_t b = 0; b < blocks; ++b) {
      const RowBlock block = row_block(a.m, blocks, b);
      const int64_t first = block.first * a.qx.planes;
      const Activations x = {a.qx.q + first * stride, a.qx.sums + first,
                             a.qx.group_sums + first * (stride / kGroupColumns), block.count * a.qx.planes};
      I16 sums[kIntRows * 2];
      StoreLines lines(a, block.first, tile, block.count, a.gated ? 1 : n);
      if (four && !panel) {
        const int64_t ahead4 = prefetch_distance(a, 2 * x.rows, kI4PrefetchBytes) /
                               (a.gated ? 2 : 1);  // gate and up: two sequential streams
        I16 one[kIntRows] = {};
        lines.prefetch_all();
        for (int t = 0; t < n; ++t) {
          dot4_tile(w[t], x, pairs, ahead4, one);
          for (int i = 0; i < x.rows; ++i) sums[i * n + t] = one[i];
        }
      } else {
        const int64_t count = panel ? pairs * 16 : steps;
        dot8_tiles(w, n, x, count, prefetch_of(a, w, next, tile_bytes, blocks, b, count), lines, sums);
      }
      if (a.gated) {
        finish_gated(a, block, {tile * 16, scales[0], sums}, {0, scales[1], sums + 1});
      } else {
        for (int t = 0; t < n; ++t) finish_tile(a, block, {(tile + t) * 16, scales[t], sums + t}, n);
      }
    }
    tile += a.gated ? 1 : n;
  }
}

// Bytes of panel memory that a call may need.
int64_t linear_panel_bytes(int32_t layout, int64_t cols, int64_t m, int32_t planes) {
  if (layout != PS_T16_I4G32 || kGroupRows >= kIntRows || num_int_blocks(layout, m, planes) <= 1) return 0;
  return num_pairs(cols) * 2048 + 128;
}

}  // namespace
}  // namespace ps

#endif
