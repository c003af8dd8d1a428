// Linear with float32 (or bf16-rounded) activations: acc = fma(x[k], w[k], acc), k ascending.
#ifndef PENSTOCK_KERNELS_LINEAR_FLOAT32_H
#define PENSTOCK_KERNELS_LINEAR_FLOAT32_H

namespace ps {
namespace {

// Each format defines the columns and bytes of a step, and column j of a step as 16 floats.
struct WeightF32 {
  static constexpr int kStep = 1, kStepBytes = 64;
  static constexpr bool kRounded = false;
  PS_INLINE static F16 load(const uint8_t* p, int) { return f_load((const float*)p); }
};
struct WeightF16 {
  static constexpr int kStep = 1, kStepBytes = 32;
  static constexpr bool kRounded = false;
  PS_INLINE static F16 load(const uint8_t* p, int) { return f_load_f16((const uint16_t*)p); }
};
struct WeightBf16 {
  static constexpr int kStep = 2, kStepBytes = 64;
  static constexpr bool kRounded = true;
  PS_INLINE static F16 load(const uint8_t* p, int j) {
    I16 w = i_load(p);
    return f_bits(j ? w & i_set(int32_t(0xffff0000u)) : i_shl<16>(w));
  }
};

// For levels without a dot product of bf16: its values as f32.
void round_rows_bf16(const float* x, int64_t x_stride, int64_t cols, int64_t, const QuantizedRows& out, int64_t begin,
                     int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* src = x + row * x_stride;
    float* y = (float*)(out.q + row * out.stride);
    for (int64_t i = 0; i < out.stride / 4; i += 16) {
      const int n = cols - i >= 16 ? 16 : cols > i ? int(cols - i) : 0;
      uint16_t h[16];
      f_store_bf16_n(h, n > 0 ? f_load_n(src + i, n) : f_set(0.f), 16);
      f_store(y + i, f_load_bf16(h));
    }
  }
}

template <class W>
struct LinearFloat {
  // Rounded rows are in the scratch memory, as floats.
  PS_INLINE static const float* row_of(const LinearArgs& a, int64_t row) {
    if constexpr (W::kRounded) return (const float*)(a.qx.q + row * a.qx.stride);
    else return a.x + row * a.x_stride;
  }
  // Formats that widen several columns a step need more registers: not on levels that have only sixteen.
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
      if (M <= 2) PS_UNROLL for (int t = 0; t < N; ++t) prefetch(w + t * tile_bytes + kPrefetchBytes);
      PS_UNROLL for (int j = 0; j < W::kStep; ++j) column<M, N>(acc, x, k + j, w, tile_bytes, j);
    }
    if (W::kStep > 1)
      PS_UNROLL for (int j = 0; j < W::kStep; ++j) if (k + j < count) column<M, N>(acc, x, k + j, w, tile_bytes, j);
  }

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile, F16* y) {
    const int64_t k_end = a.weight.cols;
    const int64_t tile_bytes = (k_end + W::kStep - 1) / W::kStep * W::kStepBytes;
    const uint8_t* w = a.weight.data + tile * tile_bytes;
    const float* x[M];
    F16 acc[M][N];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = row_of(a, row + i);
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_set(0.f);
    }
    columns<M, N>(acc, x, k_end, w, tile_bytes);
    PS_UNROLL for (int i = 0; i < M; ++i) PS_UNROLL for (int t = 0; t < N; ++t) y[i * N + t] = acc[i][t];
  }
};

}  // namespace
}  // namespace ps

#endif
