// Convolutions over tables of pixels, pools, weighted sums of pixels, columns of norms, and the cells of recurrent
// layers.
#ifndef PENSTOCK_KERNELS_GENERAL_WINDOWS_H
#define PENSTOCK_KERNELS_GENERAL_WINDOWS_H

namespace ps {
namespace {

// Activations that are applied while a block is stored; map_unary applies the others.
PS_INLINE bool is_quick(const Activation& act) {
  return act.kind == UNARY_NONE || act.kind == UNARY_RELU || act.kind == UNARY_CLIP;
}
PS_INLINE F16 quick(const Activation& act, F16 y) {
  if (act.kind == UNARY_RELU) return unary_value(UNARY_RELU, y, y, y);
  if (act.kind == UNARY_CLIP) return unary_value(UNARY_CLIP, y, f_set(act.alpha), f_set(act.beta));
  return y;
}

// Stores the first eight lanes or all.
template <bool kHalf>
PS_INLINE F16 load_lanes(const float* p) {
  return kHalf ? f_load_n(p, 8) : f_load(p);
}
template <bool kHalf>
PS_INLINE void store_lanes(float* p, F16 x) {
  if constexpr (kHalf) f_store_half(p, x);
  else f_store(p, x);
}

// Adds bias and residual to a block [rows][n] of tiles, applies the activation and stores it.  The last tile has
// `width` outputs.
__attribute__((noinline)) void store_pixels(const ConvArgs& a, const TapBlock& b, int64_t column, int width, int n,
                                            F16* v) {
  const bool silu = a.act.kind == UNARY_SILU;
  for (int i = 0; i < b.rows; ++i)
    for (int t = 0; t < n; ++t) {
      const int64_t at = column + t * 16;
      const int rows = t + 1 < n ? 16 : width;
      F16 y = v[i * n + t];
      if (a.bias) y = y + f_load_n(a.bias + at, rows);
      if (a.residual) y = y + f_load_n(a.residual + b.pixels[i] * a.out_channels + at, rows);
      v[i * n + t] = silu ? unary_value(UNARY_SILU, y, y, y) : quick(a.act, y);
    }
  if (!silu && !is_quick(a.act))
    map_unary(a.act.kind, a.act.alpha, a.act.beta, (const float*)v, (float*)v, b.rows * n * 16);
  for (int i = 0; i < b.rows; ++i)
    for (int t = 0; t < n; ++t) {
      float* const y = a.y + b.pixels[i] * a.out_channels + column + t * 16;
      if (t + 1 < n || width == 16) f_store(y, v[i * n + t]);
      else f_store_n(y, v[i * n + t], width);
    }
}

// The same for a block in registers, with a quick activation and whole tiles.  `kHalf`: tiles of eight outputs.
template <int M, int N, bool kHalf>
PS_INLINE void store_quick(const ConvArgs& a, const TapBlock& b, int64_t column, F16 (&v)[M][N]) {
  if (a.bias) PS_UNROLL for (int t = 0; t < N; ++t) {
      const F16 bias = load_lanes<kHalf>(a.bias + column + t * 16);
      PS_UNROLL for (int i = 0; i < M; ++i) v[i][t] = v[i][t] + bias;
    }
  if (a.residual) PS_UNROLL for (int i = 0; i < M; ++i) {
      const float* const from = a.residual + b.pixels[i] * a.out_channels + column;
      PS_UNROLL for (int t = 0; t < N; ++t) v[i][t] = v[i][t] + load_lanes<kHalf>(from + t * 16);
    }
  if (a.act.kind == UNARY_RELU)
    PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) v[i][t] =
        unary_value(UNARY_RELU, v[i][t], v[i][t], v[i][t]);
  if (a.act.kind == UNARY_CLIP) {
    const F16 low = f_set(a.act.alpha), high = f_set(a.act.beta);
    PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) v[i][t] =
        unary_value(UNARY_CLIP, v[i][t], low, high);
  }
  PS_UNROLL for (int i = 0; i < M; ++i) {
    float* const to = a.y + b.pixels[i] * a.out_channels + column;
    PS_UNROLL for (int t = 0; t < N; ++t) store_lanes<kHalf>(to + t * 16, v[i][t]);
  }
}

// The place of a block of tiles.  `width`: number of outputs of the last tile.
struct TileBlock {
  int64_t tile, offset, column;
  int width;
};

// M pixels by N tiles.  Each output is summed in order of the taps and their channels, as a linear sums over columns.
// The compiler removes the arithmetic of lanes that a half tile does not store.
template <int M, int N, bool kHalf>
void conv_block(const ConvArgs& a, const TapBlock& b, const TileBlock& at) {
  const int64_t tile_bytes = a.cols * 64;
  const uint8_t* const weight = a.weight + at.tile * tile_bytes;
  F16 acc[M][N];
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_set(0.f);
  for (int32_t tap = 0; tap < b.taps; ++tap) {
    const float* x[M];
    PS_UNROLL for (int i = 0; i < M; ++i) x[i] = (const float*)b.x[tap * M + i] + at.offset;
    const int64_t column = b.columns ? b.columns[tap] : tap * b.channels;
    LinearFloat<WeightF32>::columns<M, N>(acc, x, b.channels, weight + column * 64, tile_bytes);
  }
  if (at.width == (kHalf ? 8 : 16) && is_quick(a.act)) return store_quick<M, N, kHalf>(a, b, at.column, acc);
  F16 y[M * N];
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) {
    if (kHalf) y[i * N + t] = f_set(0.f);
    store_lanes<kHalf>((float*)(y + i * N + t), acc[i][t]);
  }
  store_pixels(a, b, at.column, at.width, N, y);
}

template <int N, bool kHalf>
void conv_block_of(const ConvArgs& a, const TapBlock& b, const TileBlock& at) {
  switch (b.rows) {
    case 1: return conv_block<1, N, kHalf>(a, b, at);
    case 2: return conv_block<2, N, kHalf>(a, b, at);
    case 3:
      if constexpr (kFloatM >= 3) return conv_block<3, N, kHalf>(a, b, at);
      break;
    case 4:
      if constexpr (kFloatM >= 4) return conv_block<4, N, kHalf>(a, b, at);
      break;
    case 5:
      if constexpr (kFloatM >= 5) return conv_block<5, N, kHalf>(a, b, at);
      break;
    case 6:
      if constexpr (kFloatM >= 6) return conv_block<6, N, kHalf>(a, b, at);
      break;
  }
}

void conv(const ConvArgs& a, const TapBlock* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end;) {
    const int64_t group = tile / a.group_tiles, first = tile % a.group_tiles;
    const bool wide = kFloatN > 1 && tile + kFloatN <= end && first + kFloatN <= a.group_tiles;
    const int n = wide ? kFloatN : 1;
    const TileBlock at{tile, group * a.group_channels, group * a.group_rows + first * 16,
                       tail(a.group_rows, (first + n - 1) * 16)};
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (i + 1 < num_blocks)
        for (int row = 0; row < blocks[i + 1].rows; ++row)
          prefetch_for_write(a.y + blocks[i + 1].pixels[row] * a.out_channels + at.column);
      if (wide) conv_block_of<kFloatN, false>(a, blocks[i], at);
      else if (kHalfTiles && at.width <= 8) conv_block_of<1, kHalfTiles>(a, blocks[i], at);
      else conv_block_of<1, false>(a, blocks[i], at);
    }
    tile += n;
  }
}

// Winograd's F(2x2, 3x3): transforms the inputs d of a tile to B^T d B, column by column to stay in registers.
template <bool kWhole>
PS_INLINE void winograd_columns(const float* const* x, int64_t c, int n, float* y, int64_t step) {
  const auto load = [&](int row, int column) {
    const float* const p = x[row * 4 + column] + c;
    return kWhole ? f_load(p) : f_load_n(p, n);
  };
  PS_UNROLL for (int j = 0; j < 4; ++j) {
    F16 t[4];
    PS_UNROLL for (int i = 0; i < 4; ++i) {
      const F16 a = load(i, j == 0 ? 0 : j == 2 ? 2 : 1), b = load(i, j == 0 || j == 1 ? 2 : j == 2 ? 1 : 3);
      t[i] = j == 1 ? a + b : a - b;
    }
    float* const to = y + j * step + c;
    f_store(to, t[0] - t[2]);
    f_store(to + 4 * step, t[1] + t[2]);
    f_store(to + 8 * step, t[2] - t[1]);
    f_store(to + 12 * step, t[1] - t[3]);
  }
}

void winograd_input(const float* const* x, int64_t count, int64_t channels, float* y, int64_t pitch, int64_t step) {
  for (int64_t i = 0; i < count; ++i, x += 16, y += pitch) {
    int64_t c = 0;
    for (; c + 16 <= channels; c += 16) winograd_columns<true>(x, c, 16, y, step);
    if (c < channels) winograd_columns<false>(x, c, int(channels - c), y, step);
  }
}

// Transforms the products m of the sixteen places of a tile to A^T m A.
void winograd_output(const ConvArgs& a, const float* m, int64_t pitch, int64_t step, const int64_t* targets,
                     int64_t count, int64_t column) {
  const int width = tail(a.out_channels, column);
  const bool fast = width == 16 && is_quick(a.act);
  for (int64_t i = 0; i < count; ++i, m += pitch, targets += 4) {
    F16 y[4][1];
    PS_UNROLL for (int j = 0; j < 4; ++j) {
      const float* const from = m + j * step;
      const F16 b = f_load(from + 4 * step), c = f_load(from + 8 * step);
      const F16 s[2] = {f_load(from) + b + c, b - c - f_load(from + 12 * step)};
      PS_UNROLL for (int k = 0; k < 2; ++k) {
        F16 &left = y[2 * k][0], &right = y[2 * k + 1][0];
        if (j < 3) left = j ? left + s[k] : s[k];
        if (j > 0) right = j > 1 ? right - s[k] : s[k];
      }
    }
    if (fast && targets[3] >= 0) {
      store_quick<4, 1, false>(a, TapBlock{nullptr, nullptr, targets, 4, 0, 0}, column, y);
      continue;
    }
    int64_t pixels[4];
    F16 rows[4];
    int n = 0;
    for (int j = 0; j < 4; ++j) {
      if (targets[j] < 0) continue;
      rows[n] = y[j][0];
      pixels[n++] = targets[j];
    }
    store_pixels(a, TapBlock{nullptr, nullptr, pixels, n, 0, 0}, column, width, 1, rows);
  }
}

constexpr int kDepthwiseRows = 4;

// Sixteen channels from c on, or n of them.
template <int M, bool kWhole>
PS_INLINE void depthwise_columns(const ConvArgs& a, const TapBlock& b, int first, int64_t c, int n) {
  const auto load = [n](const float* p) { return kWhole ? f_load(p) : f_load_n(p, n); };
  const float *const weight = (const float*)a.weight + c, *const *x = (const float* const*)b.x + first;
  F16 acc[M], y[M];
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_set(0.f);
  for (int32_t tap = 0; tap < b.taps; ++tap, x += b.rows) {
    const F16 w = load(weight + (b.columns ? b.columns[tap] : tap) * a.out_channels);
    PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(load(x[i] + c), w, acc[i]);
  }
  if (a.bias) PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = acc[i] + load(a.bias + c);
  if (a.residual)
    PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = acc[i] + load(a.residual + b.pixels[first + i] * a.out_channels + c);
  PS_UNROLL for (int i = 0; i < M; ++i) y[i] = quick(a.act, acc[i]);
  if (!is_quick(a.act)) map_unary(a.act.kind, a.act.alpha, a.act.beta, (const float*)y, (float*)y, M * 16);
  PS_UNROLL for (int i = 0; i < M; ++i) {
    float* const to = a.y + b.pixels[first + i] * a.out_channels + c;
    if (kWhole) f_store(to, y[i]);
    else f_store_n(to, y[i], n);
  }
}

template <int M>
void depthwise_block(const ConvArgs& a, const TapBlock& b, int first) {
  int64_t c = 0;
  for (; c + 16 <= a.out_channels; c += 16) depthwise_columns<M, true>(a, b, first, c, 16);
  if (c < a.out_channels) depthwise_columns<M, false>(a, b, first, c, int(a.out_channels - c));
}

void depthwise(const ConvArgs& a, const TapBlock& b) {
  if (b.rows == kDepthwiseRows) return depthwise_block<kDepthwiseRows>(a, b, 0);
  for (int i = 0; i < b.rows; ++i) depthwise_block<1>(a, b, i);
}

void pool_max(const float* const* x, int64_t n, int64_t channels, float* y) {
  for (int64_t c = 0; c < channels; c += 16) {
    const int width = tail(channels, c);
    F16 m = f_set(-kInfinity);
    for (int64_t i = 0; i < n; ++i) m = f_max_nan(m, f_load_n(x[i] + c, width));
    f_store_n(y + c, m, width);
  }
}

template <int N>
PS_INLINE void weighted_block(const float* const* x, const float* weights, int64_t n, int64_t c, int width,
                              float divisor, float* y) {
  F16 sum[N];
  PS_UNROLL for (int t = 0; t < N; ++t) sum[t] = f_set(0.f);
  for (int64_t i = 0; i < n; ++i) {
    const F16 w = f_set(weights ? weights[i] : 1.f);
    PS_UNROLL for (int t = 0; t < N; ++t) {
      const float* const from = x[i] + c + 16 * t;
      sum[t] = f_fma(N > 1 ? f_load(from) : f_load_n(from, width), w, sum[t]);  // times 1: a sum
    }
  }
  if (divisor != 1.f) PS_UNROLL for (int t = 0; t < N; ++t) sum[t] = sum[t] / f_set(divisor);
  PS_UNROLL for (int t = 0; t < N; ++t) f_store_n(y + c + 16 * t, sum[t], N > 1 ? 16 : width);
}

void weighted_sum(const float* const* x, const float* weights, int64_t n, int64_t channels, float divisor, float* y) {
  int64_t c = 0;
  for (; c + 64 <= channels; c += 64) weighted_block<4>(x, weights, n, c, 16, divisor, y);
  for (; c < channels; c += 16) weighted_block<1>(x, weights, n, c, tail(channels, c), divisor, y);
}

void column_sums(const float* x, int64_t rows, int64_t cols, const float* mean, float* y) {
  for (int64_t c = 0; c < cols; c += 16) {
    const int n = tail(cols, c);
    const F16 shift = mean ? f_load_n(mean + c, n) : f_set(0.f);
    F16 sum = f_set(0.f);
    for (int64_t i = 0; i < rows; ++i) {
      const F16 v = f_load_n(x + i * cols + c, n);
      sum = mean ? f_fma(v - shift, v - shift, sum) : sum + v;
    }
    f_store_n(y + c, sum, n);
  }
}

void normalize_columns(const float* x, int64_t rows, int64_t cols, const float* mean, const float* scale,
                       const float* shift, float* y) {
  for (int64_t i = 0; i < rows; ++i, x += cols, y += cols)
    for (int64_t c = 0; c < cols; c += 16) {
      const int n = tail(cols, c);
      f_store_n(y + c,
                f_fma(f_load_n(x + c, n) - f_load_n(mean + c, n), f_load_n(scale + c, n), f_load_n(shift + c, n)), n);
    }
}

// Returns the sum of a gate's two parts.
PS_INLINE F16 gate(const CellArgs& a, int index, int64_t j, int n) {
  const int64_t at = index * a.stride + j;
  return f_load_n(a.x + at, n) + f_load_n(a.h + at, n);
}

void lstm_cell(const CellArgs& a) {
  for (int64_t j = 0; j < a.hidden; j += 16) {
    const int n = tail(a.hidden, j);
    const F16 in = f_sigmoid(gate(a, 0, j, n)), out = f_sigmoid(gate(a, 1, j, n));
    const F16 cell = f_fma(f_sigmoid(gate(a, 2, j, n)), f_load_n(a.cell + j, n), in * f_tanh(gate(a, 3, j, n)));
    f_store_n(a.cell + j, cell, n);
    f_store_n(a.state + j, out * f_tanh(cell), n);
  }
}

void gru_gates(const CellArgs& a) {
  for (int64_t j = 0; j < a.hidden; j += 16) {
    const int n = tail(a.hidden, j);
    const F16 z = f_sigmoid(gate(a, 0, j, n)), r = f_sigmoid(gate(a, 1, j, n));
    f_store_n(a.x + j, z, n);
    f_store_n(a.x + a.stride + j, r, n);
    f_store_n(a.cell + j, r * f_load_n(a.state + j, n), n);
  }
}

void gru_cell(const CellArgs& a) {
  for (int64_t j = 0; j < a.hidden; j += 16) {
    const int n = tail(a.hidden, j);
    F16 h = f_load_n(a.h + 2 * a.stride + j, n);
    if (a.linear_before_reset) h = f_load_n(a.x + a.stride + j, n) * h;
    const F16 candidate = f_tanh(f_load_n(a.x + 2 * a.stride + j, n) + h);
    f_store_n(a.state + j, f_fma(f_load_n(a.x + j, n), f_load_n(a.state + j, n) - candidate, candidate), n);
  }
}

}  // namespace
}  // namespace ps

#endif
