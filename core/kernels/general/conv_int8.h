// Convolutions of int8 activations.  Sums are exact integers, or float32 in order of the taps if depthwise.  The kernel
// converts a block of sums to float, adds bias and residual, applies the activation, and rounds to int8 as it stores.
#ifndef PENSTOCK_KERNELS_GENERAL_CONV_INT8_H
#define PENSTOCK_KERNELS_GENERAL_CONV_INT8_H

namespace ps {
namespace {

// Parameters of the stores of a tile.
struct Int8Store {
  F16 scale, bias;
  F16 inverse;
  int32_t least;  // minimum of the stored integers; if `quick`, the activation's minimum included
  bool quick;     // stores int8, and the activation is at most a minimum
};

// The maximum of a clip is left out where the maximum of int8, 127, has the same effect.
PS_INLINE Int8Store int8_store(const Int8ConvArgs& a) {
  Int8Store s;
  s.inverse = f_set(a.inverse);
  s.least = int32_t(a.least);
  s.quick = a.y && !a.conv.residual;
  if (a.conv.act.kind == UNARY_CLIP) {
    const float low = a.conv.act.alpha > -kLargest ? a.conv.act.alpha * a.inverse : a.least;
    s.quick = s.quick && a.conv.act.beta * a.inverse > 126.5f && low < 127;
    if (s.quick && low > a.least) s.least = int32_t((low + kRoundMagic) - kRoundMagic);
  } else if (a.conv.act.kind == UNARY_RELU) {
    s.least = 0;
  } else {
    s.quick = s.quick && a.conv.act.kind == UNARY_NONE;
  }
  if (!s.quick) s.least = int32_t(a.least);
  return s;
}

PS_INLINE void set_tile(const Int8ConvArgs& a, F16 scale, int64_t column, int width, Int8Store* s) {
  s->scale = scale;
  s->bias = a.conv.bias ? f_load_n(a.conv.bias + column, width) : f_set(0.f);
}

// A NaN becomes 127.
PS_INLINE void store_rounded(int8_t* y, F16 x, F16 inverse, int32_t least, int n) {
  f_store_round_i8_n(y, f_min(x * inverse, f_set(127.f)), least, n);
}

// Stores the sums v [rows] of a tile, of which `width` outputs exist.
__attribute__((noinline)) void store_int8(const Int8ConvArgs& a, const Int8Store& s, const int64_t* pixels, int rows,
                                          int64_t column, int width, F16* v) {
  const ConvArgs& conv = a.conv;
  const F16 residual_scale = f_set(a.residual_scale);
  for (int i = 0; i < rows; ++i) {
    const int64_t at = pixels[i] * conv.out_channels + column;
    F16 y = f_fma(v[i], s.scale, s.bias);
    if (a.residual) y = f_fma(f_load_i8_n(a.residual + at, width), residual_scale, y);
    else if (conv.residual) y = y + f_load_n(conv.residual + at, width);
    v[i] = quick(conv.act, y);
  }
  if (!is_quick(conv.act))
    map_unary(conv.act.kind, conv.act.alpha, conv.act.beta, (const float*)v, (float*)v, rows * 16);
  for (int i = 0; i < rows; ++i) {
    const int64_t at = pixels[i] * conv.out_channels + column;
    if (a.y) store_rounded(a.y + at, v[i], s.inverse, s.least, width);
    else f_store_n(conv.y + at, v[i], width);
  }
}

// The same for sums in registers.
template <int M>
PS_INLINE void store_sums(const Int8ConvArgs& a, const Int8Store& s, const int64_t* pixels, int64_t column, int width,
                          F16 (&v)[M]) {
  if (!s.quick) {
    F16 y[M];
    PS_UNROLL for (int i = 0; i < M; ++i) y[i] = v[i];
    return store_int8(a, s, pixels, M, column, width, y);
  }
  PS_UNROLL for (int i = 0; i < M; ++i) {
    const int64_t at = pixels[i] * a.conv.out_channels + column;
    F16 y = f_fma(v[i], s.scale, s.bias);
    if (a.residual) y = f_fma(f_load_i8_n(a.residual + at, width), f_set(a.residual_scale), y);
    store_rounded(a.y + at, y, s.inverse, s.least, width);
  }
}

// M pixels by N tiles, four channels of a tap at a time, or eight with `kPairs`.
template <int M, int N, bool kSigned, bool kPairs>
void conv_int8_block(const Int8ConvArgs& a, const TapBlock& b, const TileBlock& at, const I16* start,
                     const Int8Store* store) {
  using Dot = Int8Dot<kSigned>;
  const int64_t tile_bytes = i8_tile_bytes(a.conv.cols);
  const uint8_t* const tile = a.conv.weight + at.tile * tile_bytes;
  const uint8_t* w = tile + kScaleBytes;
  I16 acc[M][N];
  PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = start[t];
  for (int32_t tap = 0; tap < b.taps; ++tap) {
    const int8_t* x[M];
    PS_UNROLL for (int i = 0; i < M; ++i) x[i] = (const int8_t*)b.x[tap * M + i] + at.offset;
    if constexpr (kPairs) {
      static_assert(N == 1, "");
      for (int64_t c = 0; c < b.channels; c += 2 * kRowBytes, w += 2 * kLineBytes) {
        const typename Dot::Weight v = Dot::load(w), next = Dot::load(w + kLineBytes);
        PS_UNROLL for (int i = 0; i < M; ++i) acc[i][0] = Dot::dot_pair(acc[i][0], v, next, x[i] + c);
      }
      continue;
    }
    for (int64_t c = 0; c < b.channels; c += kRowBytes, w += kLineBytes) {
      typename Dot::Weight v[N];
      PS_UNROLL for (int t = 0; t < N; ++t) v[t] = Dot::load(w + t * tile_bytes);
      PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] =
          Dot::dot(acc[i][t], v[t], x[i] + c);
    }
  }
  for (int t = 0; t < N; ++t) {
    F16 y[M];
    PS_UNROLL for (int i = 0; i < M; ++i) y[i] = f_from_i(acc[i][t]);
    store_sums<M>(a, store[t], b.pixels, at.column + 16 * t, t + 1 < N ? 16 : at.width, y);
  }
}

template <int N, bool kSigned, bool kPairs>
void conv_int8_block_of(const Int8ConvArgs& a, const TapBlock& b, const TileBlock& at, const I16* start,
                        const Int8Store* store) {
  switch (b.rows) {
    case 1: return conv_int8_block<1, N, kSigned, kPairs>(a, b, at, start, store);
    case 2: return conv_int8_block<2, N, kSigned, kPairs>(a, b, at, start, store);
    case 3:
      if constexpr (kFloatM >= 3) return conv_int8_block<3, N, kSigned, kPairs>(a, b, at, start, store);
      break;
    case 4:
      if constexpr (kFloatM >= 4) return conv_int8_block<4, N, kSigned, kPairs>(a, b, at, start, store);
      break;
    case 5:
      if constexpr (kFloatM >= 5) return conv_int8_block<5, N, kSigned, kPairs>(a, b, at, start, store);
      break;
    case 6:
      if constexpr (kFloatM >= 6) return conv_int8_block<6, N, kSigned, kPairs>(a, b, at, start, store);
      break;
  }
}

template <bool kSigned>
void conv_int8_tiles(const Int8ConvArgs& a, const TapBlock* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
  using Dot = Int8Dot<kSigned>;
  const int64_t tile_bytes = i8_tile_bytes(a.conv.cols), lines = num_i8_lines(a.conv.cols);
  const Int8Store shared = int8_store(a);
  for (int64_t tile = begin; tile < end;) {
    const int64_t group = tile / a.conv.group_tiles, first = tile % a.conv.group_tiles;
    const bool wide = kFloatN > 1 && tile + kFloatN <= end && first + kFloatN <= a.conv.group_tiles;
    const int n = wide ? kFloatN : 1;
    const TileBlock at{tile, group * a.conv.group_channels, group * a.conv.group_rows + first * 16,
                       tail(a.conv.group_rows, (first + n - 1) * 16)};
    I16 start[kFloatN];
    Int8Store store[kFloatN];
    const uint8_t* const weight = a.conv.weight + tile * tile_bytes + kScaleBytes;
    for (int t = 0; t < n; ++t) {
      start[t] = Dot::start(weight + t * tile_bytes, lines);
      store[t] = shared;
      const F16 scale = f_load((const float*)(weight + t * tile_bytes - kScaleBytes)) * f_set(a.x_scale);
      set_tile(a, scale, at.column + 16 * t, t + 1 < n ? 16 : at.width, &store[t]);
    }
    bool pairs = false;
    if constexpr (Dot::kPairs) pairs = a.conv.group_channels % 8 == 0 && Dot::fits_pairs(weight, lines);
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (pairs) conv_int8_block_of<1, kSigned, Dot::kPairs>(a, blocks[i], at, start, store);
      else if (wide) conv_int8_block_of<kFloatN, kSigned, false>(a, blocks[i], at, start, store);
      else conv_int8_block_of<1, kSigned, false>(a, blocks[i], at, start, store);
    }
    tile += n;
  }
}

void conv_int8(const Int8ConvArgs& a, const TapBlock* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
  if (a.is_signed) conv_int8_tiles<true>(a, blocks, num_blocks, begin, end);
  else conv_int8_tiles<false>(a, blocks, num_blocks, begin, end);
}

// Weights stay float32: there are few, and int8 weights would not save instructions.
template <int M>
PS_INLINE void depthwise_int8_block(const Int8ConvArgs& a, const Int8DepthwiseRow& r, const Int8Store& s, int64_t at) {
  F16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_set(0.f);
  const float* w = r.weight;
  for (int64_t ky = 0; ky < r.height; ++ky) {
    const float* x = r.rows[ky] + at * r.pixel_step;
    for (int64_t kx = 0; kx < r.width; ++kx, x += r.tap_step, w += 16) {
      const F16 v = f_load(w);
      PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(f_load(x + i * r.pixel_step), v, acc[i]);
    }
  }
  int64_t pixels[M];
  PS_UNROLL for (int i = 0; i < M; ++i) pixels[i] = r.pixel + at + i;
  store_sums<M>(a, s, pixels, r.channel, tail(a.conv.out_channels, r.channel), acc);
}

// The last block overlaps the previous one, so that all blocks have kPixels.
void depthwise_int8(const Int8ConvArgs& a, const Int8DepthwiseRow& r) {
  Int8Store s = int8_store(a);
  set_tile(a, f_set(a.x_scale), r.channel, tail(a.conv.out_channels, r.channel), &s);
  constexpr int kPixels = 4;
  if (r.count < kPixels) {
    for (int64_t i = 0; i < r.count; ++i) depthwise_int8_block<1>(a, r, s, i);
    return;
  }
  for (int64_t i = 0; i < r.count; i += kPixels)
    depthwise_int8_block<kPixels>(a, r, s, i + kPixels <= r.count ? i : r.count - kPixels);
}

void widen_pixels(const int8_t* x, int64_t pixels, int64_t channels, int n, float* y) {
  for (int64_t i = 0; i < pixels; ++i, x += channels, y += 16) f_store(y, f_load_i8_n(x, n));
}

void values_to_int8(const float* x, int64_t n, float inverse, float least, int8_t* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const int width = tail(n, i);
    store_rounded(y + i, f_load_n(x + i, width), f_set(inverse), int32_t(least), width);
  }
}

void int8_to_values(const int8_t* x, int64_t n, float scale, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const int width = tail(n, i);
    f_store_n(y + i, f_load_i8_n(x + i, width) * f_set(scale), width);
  }
}

}  // namespace
}  // namespace ps

#endif
