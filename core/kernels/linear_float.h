// Linear with float32 (or bf16-rounded) activations: acc = fma(x[k], w[k], acc), k ascending.
#ifndef PENSTOCK_KERNELS_LINEAR_FLOAT_H
#define PENSTOCK_KERNELS_LINEAR_FLOAT_H

namespace ps {
namespace {

// Each format: bytes of a tile for K columns, bytes before the first column, columns and bytes a step, and
// column j of a step as 16 floats.
struct WeightF32 {
  static constexpr int kStep = 1, kStepBytes = 64, kHeader = 0;
  PS_INLINE static F16 load(const uint8_t* p, int) { return f_load((const float*)p); }
  PS_INLINE static F16 activation(float x) { return f_set(x); }
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightF16 {
  static constexpr int kStep = 1, kStepBytes = 32, kHeader = 0;
  PS_INLINE static F16 load(const uint8_t* p, int) { return f_load_f16((const uint16_t*)p); }
  PS_INLINE static F16 activation(float x) { return f_set(x); }
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightBf16 {
  static constexpr int kStep = 2, kStepBytes = 64, kHeader = 0;
  PS_INLINE static F16 load(const uint8_t* p, int j) {
    I16 w = i_load(p);
    return f_bits(j ? w & i_set(int32_t(0xffff0000u)) : i_shl<16>(w));
  }
  PS_INLINE static F16 activation(float x) {
    // Round to nearest even; a NaN may lose its payload, so it is kept whole.
    uint32_t u = bits_of(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return f_set(x == x ? float_of(r) : x);
  }
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightI8 {
  static constexpr int kStep = 4, kStepBytes = 64, kHeader = 128;
  PS_INLINE static F16 load(const uint8_t* p, int j) {
    I16 w = i_load(p);
    return f_from_i(i_sra<24>(j == 0 ? i_shl<24>(w) : j == 1 ? i_shl<16>(w) : j == 2 ? i_shl<8>(w) : w));
  }
  PS_INLINE static F16 activation(float x) { return f_set(x); }
  PS_INLINE static F16 finish(const uint8_t* tile, F16 acc) { return acc * f_load((const float*)tile); }
};

template <class W>
struct LinearFloat {
  static constexpr int kM = kFloatM, kN = kFloatN;

  template <int M, int N>
  PS_INLINE static void column(F16 (&acc)[M][N], const float* const (&x)[M], int64_t k, const uint8_t* w,
                               int64_t tile_bytes, int j) {
    F16 v[N];
    PS_UNROLL for (int t = 0; t < N; ++t) v[t] = W::load(w + t * tile_bytes, j);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      F16 b = W::activation(x[i][k]);
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_fma(b, v[t], acc[i][t]);
    }
  }

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile) {
    const int64_t k_end = a.weight.cols, steps = k_end / W::kStep;
    const int64_t tile_bytes = (k_end + W::kStep - 1) / W::kStep * W::kStepBytes + W::kHeader;
    const uint8_t* first = a.weight.data + tile * tile_bytes;
    const uint8_t* w = first + W::kHeader;
    const float* x[M];
    F16 acc[M][N];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = a.x + (row + i) * a.x_stride;
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_set(0.f);
    }
    int64_t k = 0;
    for (int64_t s = 0; s < steps; ++s, k += W::kStep, w += W::kStepBytes) {
      if (M <= 2)
        PS_UNROLL for (int t = 0; t < N; ++t) prefetch(w + t * tile_bytes + kPrefetchBytes);
      PS_UNROLL for (int j = 0; j < W::kStep; ++j) column<M, N>(acc, x, k + j, w, tile_bytes, j);
    }
    if (W::kStep > 1)
      PS_UNROLL for (int j = 0; j < W::kStep; ++j)
        if (k + j < k_end) column<M, N>(acc, x, k + j, w, tile_bytes, j);
    PS_UNROLL for (int i = 0; i < M; ++i)
      PS_UNROLL for (int t = 0; t < N; ++t)
        store_tile(a, row + i, tile + t, W::finish(first + t * tile_bytes, acc[i][t]));
  }
};

}  // namespace
}  // namespace ps

#endif
