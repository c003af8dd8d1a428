// Convolutions of int8 activations: sums of integers, which are exact, or of a depthwise one a chain of float32.  A
// block of sums becomes values, gets bias, residual and activation, and is rounded to int8 again while it is stored.
#ifndef PENSTOCK_KERNELS_GENERAL_CONV_INT8_H
#define PENSTOCK_KERNELS_GENERAL_CONV_INT8_H

namespace ps {
namespace {

// NaN becomes 127, as in `to_integer`.
PS_INLINE F16 rounded_int8(F16 x, F16 inverse, F16 least) {
  return f_round(f_max(f_min(x * inverse, f_set(127.f)), least));
}

// Stores the sums v [rows] of a tile, of which `width` outputs exist.
__attribute__((noinline)) void store_int8(const Int8ConvArgs& a, const int64_t* pixels, int rows, int64_t column,
                                          int width, F16 scale, F16* v) {
  const ConvArgs& conv = a.conv;
  const F16 bias = conv.bias ? f_load_n(conv.bias + column, width) : f_set(0.f);
  const F16 residual_scale = f_set(a.residual_scale), inverse = f_set(a.inverse), least = f_set(a.least);
  for (int i = 0; i < rows; ++i) {
    const int64_t at = pixels[i] * conv.out_channels + column;
    F16 y = f_fma(v[i], scale, bias);
    if (a.residual) y = f_fma(f_load_i8_n(a.residual + at, width), residual_scale, y);
    else if (conv.residual) y = y + f_load_n(conv.residual + at, width);
    v[i] = quick(conv.act, y);
  }
  if (!is_quick(conv.act))
    map_unary(conv.act.kind, conv.act.alpha, conv.act.beta, (const float*)v, (float*)v, rows * 16);
  for (int i = 0; i < rows; ++i) {
    const int64_t at = pixels[i] * conv.out_channels + column;
    if (a.y) f_store_i8_n(a.y + at, rounded_int8(v[i], inverse, least), width);
    else f_store_n(conv.y + at, v[i], width);
  }
}

// M pixels by N tiles, four channels of a tap at a time, or with `kPairs` eight.
template <int M, int N, bool kSigned, bool kPairs>
void conv_int8_block(const Int8ConvArgs& a, const TapBlock& b, const TileBlock& at, const I16* start) {
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
    const F16 scale = f_load((const float*)(tile + t * tile_bytes)) * f_set(a.x_scale);
    store_int8(a, b.pixels, M, at.column + 16 * t, t + 1 < N ? 16 : at.width, scale, y);
  }
}

template <int N, bool kSigned, bool kPairs>
void conv_int8_block_of(const Int8ConvArgs& a, const TapBlock& b, const TileBlock& at, const I16* start) {
  switch (b.rows) {
    case 1: return conv_int8_block<1, N, kSigned, kPairs>(a, b, at, start);
    case 2: return conv_int8_block<2, N, kSigned, kPairs>(a, b, at, start);
    case 3:
      if constexpr (kFloatM >= 3) return conv_int8_block<3, N, kSigned, kPairs>(a, b, at, start);
      break;
    case 4:
      if constexpr (kFloatM >= 4) return conv_int8_block<4, N, kSigned, kPairs>(a, b, at, start);
      break;
    case 5:
      if constexpr (kFloatM >= 5) return conv_int8_block<5, N, kSigned, kPairs>(a, b, at, start);
      break;
    case 6:
      if constexpr (kFloatM >= 6) return conv_int8_block<6, N, kSigned, kPairs>(a, b, at, start);
      break;
  }
}

template <bool kSigned>
void conv_int8_tiles(const Int8ConvArgs& a, const TapBlock* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
  using Dot = Int8Dot<kSigned>;
  const int64_t tile_bytes = i8_tile_bytes(a.conv.cols), lines = num_i8_lines(a.conv.cols);
  for (int64_t tile = begin; tile < end;) {
    const int64_t group = tile / a.conv.group_tiles, first = tile % a.conv.group_tiles;
    const bool wide = kFloatN > 1 && tile + kFloatN <= end && first + kFloatN <= a.conv.group_tiles;
    const int n = wide ? kFloatN : 1;
    const TileBlock at{tile, group * a.conv.group_channels, group * a.conv.group_rows + first * 16,
                       tail(a.conv.group_rows, (first + n - 1) * 16)};
    I16 start[kFloatN];
    const uint8_t* const weight = a.conv.weight + tile * tile_bytes + kScaleBytes;
    for (int t = 0; t < n; ++t) start[t] = Dot::start(weight + t * tile_bytes, lines);
    bool pairs = false;
    if constexpr (Dot::kPairs) pairs = a.conv.group_channels % 8 == 0 && Dot::fits_pairs(weight, lines);
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (pairs) conv_int8_block_of<1, kSigned, Dot::kPairs>(a, blocks[i], at, start);
      else if (wide) conv_int8_block_of<kFloatN, kSigned, false>(a, blocks[i], at, start);
      else conv_int8_block_of<1, kSigned, false>(a, blocks[i], at, start);
    }
    tile += n;
  }
}

void conv_int8(const Int8ConvArgs& a, const TapBlock* blocks, int64_t num_blocks, int64_t begin, int64_t end) {
  if (a.is_signed) conv_int8_tiles<true>(a, blocks, num_blocks, begin, end);
  else conv_int8_tiles<false>(a, blocks, num_blocks, begin, end);
}

// Weights stay float32: they are few, and a sum of products with them needs as many steps.
template <int M>
void depthwise_int8_block(const Int8ConvArgs& a, const TapBlock& b, int first) {
  const int8_t* const* const from = (const int8_t* const*)b.x + first;
  for (int64_t c = 0; c < a.conv.out_channels; c += 16) {
    const int n = tail(a.conv.out_channels, c);
    const float* const weight = (const float*)a.conv.weight + c;
    F16 acc[M];
    PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_set(0.f);
    const int8_t* const* x = from;
    for (int32_t tap = 0; tap < b.taps; ++tap, x += b.rows) {
      const F16 w = f_load_n(weight + tap * a.conv.out_channels, n);
      PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(f_load_i8_n(x[i] + c, n), w, acc[i]);
    }
    store_int8(a, b.pixels + first, M, c, n, f_set(a.x_scale), acc);
  }
}

void depthwise_int8(const Int8ConvArgs& a, const TapBlock& b) {
  if (b.rows == kDepthwiseRows) return depthwise_int8_block<kDepthwiseRows>(a, b, 0);
  for (int i = 0; i < b.rows; ++i) depthwise_int8_block<1>(a, b, i);
}

void values_to_int8(const float* x, int64_t n, float inverse, float least, int8_t* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const int width = tail(n, i);
    f_store_i8_n(y + i, rounded_int8(f_load_n(x + i, width), f_set(inverse), f_set(least)), width);
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
