// 4-bit weights in groups of 32 columns, with int8 activations (w4a8) and float32 activations (w4a16).
#ifndef PENSTOCK_KERNELS_LINEAR_INT4_H
#define PENSTOCK_KERNELS_LINEAR_INT4_H

namespace ps {
namespace {

constexpr int kGroupBytes = 32 + 4 * 64;  // one group of one tile: 16 f16 scales, then 4 x 64 bytes of nibbles

struct LinearW4A8 {
  static constexpr int kM = kInt4M, kN = kInt4N;

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile, F16* y) {
    const int64_t groups = (a.weight.cols + 31) / 32, tile_bytes = groups * kGroupBytes;
    const int64_t sums_stride = a.qx.stride / 32;
    const uint8_t* w = a.weight.data + tile * tile_bytes;
    const int32_t* sums = a.qx.group_sums + row * sums_stride;
    const int8_t* x[M];
    F16 acc[M][N];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = a.qx.q + (row + i) * a.qx.stride;
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = f_set(0.f);
    }
    for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
      G16 sum[M][N];
      PS_UNROLL for (int i = 0; i < M; ++i)
        PS_UNROLL for (int t = 0; t < N; ++t) sum[i][t] = w4_zero();
      PS_UNROLL for (int j = 0; j < 4; ++j)
        PS_UNROLL for (int t = 0; t < N; ++t) {
          const uint8_t* p = w + t * tile_bytes + 32 + 64 * j;
          if (M <= 2) prefetch(p + kPrefetchBytes);
          W4 v = w4_load(p);
          PS_UNROLL for (int i = 0; i < M; ++i) {
            const int8_t* q = x[i] + 32 * g + 4 * j;
            sum[i][t] = w4_dot(sum[i][t], v, q, q + 16);
          }
        }
      PS_UNROLL for (int t = 0; t < N; ++t) {
        F16 scale = f_load_f16((const uint16_t*)(w + t * tile_bytes));
        PS_UNROLL for (int i = 0; i < M; ++i)
          acc[i][t] = f_fma(f_from_i(w4_finish(sum[i][t], sums[i * sums_stride + g])), scale, acc[i][t]);
      }
    }
    PS_UNROLL for (int i = 0; i < M; ++i)
      PS_UNROLL for (int t = 0; t < N; ++t) y[i * N + t] = acc[i][t] * f_set(a.qx.scale[row + i]);
  }
};

struct LinearW4A16 {
  static constexpr int kM = kInt4M, kN = 1;

  // Four columns: byte b of a lane's word, low or high nibble.
  template <int M, int kShift>
  PS_INLINE static void columns(F16 (&sum)[M], const float* const (&x)[M], int64_t k, int64_t k_end, I16 v) {
    const F16 w[4] = {f_nibble<kShift>(v), f_nibble<kShift + 8>(v), f_nibble<kShift + 16>(v), f_nibble<kShift + 24>(v)};
    PS_UNROLL for (int b = 0; b < 4; ++b) {
      if (k + b >= k_end) break;
      PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = f_fma(f_set(x[i][k + b]), w[b], sum[i]);
    }
  }

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile, F16* y) {
    const int64_t k_end = a.weight.cols, groups = (k_end + 31) / 32;
    const uint8_t* w = a.weight.data + tile * groups * kGroupBytes;
    const float* x[M];
    F16 acc[M];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = a.x + (row + i) * a.x_stride;
      acc[i] = f_set(0.f);
    }
    for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
      F16 sum[M];
      PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = f_set(0.f);
      for (int j = 0; j < 4; ++j) columns<M, 0>(sum, x, 32 * g + 4 * j, k_end, i_load(w + 32 + 64 * j));
      for (int j = 0; j < 4; ++j) columns<M, 4>(sum, x, 32 * g + 16 + 4 * j, k_end, i_load(w + 32 + 64 * j));
      F16 scale = f_load_f16((const uint16_t*)w);
      PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(sum[i], scale, acc[i]);
    }
    PS_UNROLL for (int i = 0; i < M; ++i) y[i] = acc[i];
  }
};

}  // namespace
}  // namespace ps

#endif
