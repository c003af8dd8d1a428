// w8a8: exact integer sums over all of K, then one multiplication by both scales.
#ifndef PENSTOCK_KERNELS_LINEAR_INT8_H
#define PENSTOCK_KERNELS_LINEAR_INT8_H

namespace ps {
namespace {

struct LinearInt8 {
  static constexpr int kM = kInt8M, kN = kInt8N;

  template <int M, int N>
  static void block(const LinearArgs& a, int64_t row, int64_t tile, F16* y) {
    const int64_t steps = (a.weight.cols + 3) / 4, tile_bytes = 128 + steps * 64;
    const uint8_t* first = a.weight.data + tile * tile_bytes;
    const uint8_t* w = first + 128;
    const int8_t* x[M];
    I16 acc[M][N];
    PS_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = a.qx.q + (row + i) * a.qx.stride;
      PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = i_set(0);
    }
    for (int64_t s = 0; s < steps; ++s, w += 64) {
      W8 v[N];
      PS_UNROLL for (int t = 0; t < N; ++t) {
        v[t] = w8_load(w + t * tile_bytes);
        if (M <= 2) prefetch(w + t * tile_bytes + kPrefetchBytes);
      }
      PS_UNROLL for (int i = 0; i < M; ++i)
        PS_UNROLL for (int t = 0; t < N; ++t) acc[i][t] = w8_dot(acc[i][t], v[t], x[i] + 4 * s);
    }
    PS_UNROLL for (int t = 0; t < N; ++t) {
      F16 scale = f_load((const float*)(first + t * tile_bytes));
      I16 row_sum = i_load(first + t * tile_bytes + 64);
      PS_UNROLL for (int i = 0; i < M; ++i) {
        F16 sum = f_from_i(w8_finish(acc[i][t], row_sum));
        y[i * N + t] = sum * (scale * f_set(a.qx.scale[row + i]));
      }
    }
  }
};

}  // namespace
}  // namespace ps

#endif
