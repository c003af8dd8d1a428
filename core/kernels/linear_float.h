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
  static constexpr bool kRounds = false;
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightF16 {
  static constexpr int kStep = 1, kStepBytes = 32, kHeader = 0;
  PS_INLINE static F16 load(const uint8_t* p, int) { return f_load_f16((const uint16_t*)p); }
  static constexpr bool kRounds = false;
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightBf16 {
  static constexpr int kStep = 2, kStepBytes = 64, kHeader = 0;
  PS_INLINE static F16 load(const uint8_t* p, int j) {
    I16 w = i_load(p);
    return f_bits(j ? w & i_set(int32_t(0xffff0000u)) : i_shl<16>(w));
  }
  static constexpr bool kRounds = true;
  PS_INLINE static F16 finish(const uint8_t*, F16 acc) { return acc; }
};
struct WeightI8 {
  static constexpr int kStep = 4, kStepBytes = 64, kHeader = 128;
  PS_INLINE static F16 load(const uint8_t* p, int j) {
    I16 w = i_load(p);
    return f_from_i(i_sra<24>(j == 0 ? i_shl<24>(w) : j == 1 ? i_shl<16>(w) : j == 2 ? i_shl<8>(w) : w));
  }
  static constexpr bool kRounds = false;
  PS_INLINE static F16 finish(const uint8_t* tile, F16 acc) { return acc * f_load((const float*)tile); }
};

constexpr int kRoundedColumns = 256;

inline void round_to_bf16(const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    uint16_t h[16];
    f_store_bf16_n(h, f_load_n(x + i, tail(n, i)), 16);
    f_store(y + i, f_load_bf16(h));
  }
}

template <class W>
struct LinearFloat {
  // Formats that widen several columns a step need registers for it where there are sixteen only.
  static constexpr int kM = W::kStep > 1 && kFloatN == 1 && kFloatM > 4 ? 4 : kFloatM, kN = kFloatN;

  template <int M, int N>
  PS_INLINE static void column(F16 (&acc)[M][N], const float* const (&x)[M], int64_t k, const uint8_t* w,
                               int64_t tile_bytes, int j) {
    F16 v[N];
    PS_UNROLL for (int t = 0; t < N; ++t) v[t] = W::load(w + t * tile_bytes, j);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      F16 b = f_set(x[i][k]);
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_fma(b, v[t], acc[i][t]);
    }
  }

  // The first `count` elements of x against as many columns of w.
  template <int M, int N>
  PS_INLINE static void columns(F16 (&acc)[M][N], const float* const (&x)[M], int64_t count, const uint8_t* w,
                                int64_t tile_bytes) {
    int64_t k = 0;
    for (; k + W::kStep <= count; k += W::kStep, w += W::kStepBytes) {
      if (M <= 2)
        PS_UNROLL for (int t = 0; t < N; ++t) prefetch(w + t * tile_bytes + kPrefetchBytes);
      PS_UNROLL for (int j = 0; j < W::kStep; ++j) column<M, N>(acc, x, k + j, w, tile_bytes, j);
    }
    if (W::kStep > 1)
      PS_UNROLL for (int j = 0; j < W::kStep; ++j)
        if (k + j < count) column<M, N>(acc, x, k + j, w, tile_bytes, j);
  }

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile, F16* y) {
    const int64_t k_end = a.weight.cols;
    const int64_t tile_bytes = (k_end + W::kStep - 1) / W::kStep * W::kStepBytes + W::kHeader;
    const uint8_t* first = a.weight.data + tile * tile_bytes;
    const uint8_t* w = first + W::kHeader;
    const float* x[M];
    F16 acc[M][N];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = a.x + (row + i) * a.x_stride;
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_set(0.f);
    }
    if constexpr (W::kRounds) {  // in pieces that fit a small buffer; the chains run on from one to the next
      float rounded[M][kRoundedColumns];
      const float* buffers[M];
      PS_UNROLL for (int i = 0; i < M; ++i) buffers[i] = rounded[i];
      for (int64_t k = 0; k < k_end; k += kRoundedColumns, w += kRoundedColumns / W::kStep * W::kStepBytes) {
        const int64_t count = k_end - k < kRoundedColumns ? k_end - k : kRoundedColumns;
        for (int i = 0; i < M; ++i) round_to_bf16(x[i] + k, count, rounded[i]);
        columns<M, N>(acc, buffers, count, w, tile_bytes);
      }
    } else {
      columns<M, N>(acc, x, k_end, w, tile_bytes);
    }
    PS_UNROLL for (int i = 0; i < M; ++i)
      PS_UNROLL for (int t = 0; t < N; ++t) y[i * N + t] = W::finish(first + t * tile_bytes, acc[i][t]);
  }
};

}  // namespace
}  // namespace ps

#endif
