// The split of weight tiles and batch rows into register blocks.  Every block computes the same chain of additions for
// each output, so the split does not change a bit.
#ifndef PENSTOCK_KERNELS_LINEAR_BLOCKS_H
#define PENSTOCK_KERNELS_LINEAR_BLOCKS_H

namespace ps {
namespace {

PS_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }
PS_INLINE void prefetch_for_write(const float* p) { __builtin_prefetch(p, 1, 3); }
// The distance in bytes at which a pass prefetches weights from memory: `far`, which is many cache lines; a few lines
// on processors that do better with that (short_prefetch); and fewer still if a line feeds only a few dot products.
PS_INLINE int64_t prefetch_distance(const LinearArgs& a, int64_t products, int64_t far) {
  return !a.short_prefetch ? far : products <= 8 ? 256 : 4096;
}
constexpr int kPrefetchBytes = 1024;  // prefetch distance of a pass over weights with few rows

// Adds bias and residual to a block [m][n] of tiles and stores it.  Memory past the last weight row is unchanged.
__attribute__((noinline)) void store_block(const LinearArgs& a, int64_t row, int64_t tile, int m, int n, const F16* v) {
  for (int i = 0; i < m; ++i)
    for (int t = 0; t < n; ++t) {
      const int64_t column = (tile + t) * 16;
      const int rows = tail(a.weight.rows, column);
      F16 y = v[i * n + t];
      if (a.bias) y = y + f_load_n(a.bias + column, rows);
      if (a.residual) y = y + f_load_n(a.residual + (row + i) * a.residual_stride + column, rows);
      f_store_n(a.y + (row + i) * a.y_stride + column, y, rows);
    }
}

// The gated form: gate and up are [m], `step` apart from row to row.
__attribute__((noinline)) void store_gated(const LinearArgs& a, int64_t row, int64_t tile, int m, int step, F16* gate,
                                           F16* up) {
  const int64_t column = tile * 16, half = a.weight.rows / 2;
  const int rows = tail(half, column);
  for (int i = 0; i < m; ++i) {
    F16 g = gate[i * step], u = up[i * step];
    if (a.bias) {
      g = g + f_load_n(a.bias + column, rows);
      u = u + f_load_n(a.bias + half + column, rows);
    }
    F16 y = SiluMul::of(g, u);
    if (a.residual) y = y + f_load_n(a.residual + (row + i) * a.residual_stride + column, rows);
    f_store_n(a.y + (row + i) * a.y_stride + column, y, rows);
  }
}

// Scheme::template block<M, N>(args, row, tile, y) computes M rows by N tiles into y [M][N].
template <class Scheme, int N>
void block_of(const LinearArgs& a, int rows, int64_t row, int64_t tile, F16* y) {
  switch (rows) {
    case 1: return Scheme::template block<1, N>(a, row, tile, y);
    case 2: return Scheme::template block<2, N>(a, row, tile, y);
    case 3:
      if constexpr (Scheme::kM >= 3) return Scheme::template block<3, N>(a, row, tile, y);
      break;
    case 4:
      if constexpr (Scheme::kM >= 4) return Scheme::template block<4, N>(a, row, tile, y);
      break;
    case 5:
      if constexpr (Scheme::kM >= 5) return Scheme::template block<5, N>(a, row, tile, y);
      break;
    case 6:
      if constexpr (Scheme::kM >= 6) return Scheme::template block<6, N>(a, row, tile, y);
      break;
  }
}

// Tiles [begin, end) of the output: of the weight, or of its gate half when the op is gated.
template <class Scheme>
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t blocks = (a.m + Scheme::kM - 1) / Scheme::kM;
  for (int64_t tile = begin; tile < end;) {
    const bool wide = !a.gated && Scheme::kN > 1 && tile + Scheme::kN <= end;
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; ++b) {  // rows are split evenly, so that no block has only one
      const int64_t next = a.m * (b + 1) / blocks;
      const int m = int(next - row);
      F16 y[Scheme::kM * Scheme::kN], up[Scheme::kM];
      if (wide) block_of<Scheme, Scheme::kN>(a, m, row, tile, y);
      else block_of<Scheme, 1>(a, m, row, tile, y);
      if (a.gated) {
        block_of<Scheme, 1>(a, m, row, tile + a.weight.rows / 32, up);
        store_gated(a, row, tile, m, 1, y, up);
      } else {
        store_block(a, row, tile, m, wide ? Scheme::kN : 1, y);
      }
      row = next;
    }
    tile += wide ? Scheme::kN : 1;
  }
}

}  // namespace
}  // namespace ps

#endif
