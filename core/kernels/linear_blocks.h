// How a range of weight tiles and the rows of a batch are cut into register blocks.  Every block runs the same
// chain for each output, so the cut changes no bit.
#ifndef PENSTOCK_KERNELS_LINEAR_BLOCKS_H
#define PENSTOCK_KERNELS_LINEAR_BLOCKS_H

namespace ps {
namespace {

PS_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }
constexpr int kPrefetchBytes = 1024;  // how far ahead a pass over weights that serves few rows asks for them

// Adds the bias and stores a block [m][n] of tiles: what is past the last weight row is left alone.
__attribute__((noinline)) void store_block(const LinearArgs& a, int64_t row, int64_t tile, int m, int n, const F16* v) {
  for (int i = 0; i < m; ++i)
    for (int t = 0; t < n; ++t) {
      const int64_t column = (tile + t) * 16;
      const int rows = tail(a.weight.rows, column);
      F16 y = v[i * n + t];
      if (a.bias) y = y + f_load_n(a.bias + column, rows);
      f_store_n(a.y + (row + i) * a.y_stride + column, y, rows);
    }
}

// Scheme::template block<M, N>(args, row, tile) computes M rows by N tiles.
template <class Scheme, int N>
void block_of(const LinearArgs& a, int rows, int64_t row, int64_t tile) {
  switch (rows) {
    case 1: return Scheme::template block<1, N>(a, row, tile);
    case 2: return Scheme::template block<2, N>(a, row, tile);
    case 3: if constexpr (Scheme::kM >= 3) return Scheme::template block<3, N>(a, row, tile); break;
    case 4: if constexpr (Scheme::kM >= 4) return Scheme::template block<4, N>(a, row, tile); break;
    case 5: if constexpr (Scheme::kM >= 5) return Scheme::template block<5, N>(a, row, tile); break;
    case 6: if constexpr (Scheme::kM >= 6) return Scheme::template block<6, N>(a, row, tile); break;
  }
}

template <class Scheme>
void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t blocks = (a.m + Scheme::kM - 1) / Scheme::kM;
  for (int64_t tile = begin; tile < end;) {
    const bool wide = Scheme::kN > 1 && tile + Scheme::kN <= end;
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; ++b) {  // rows are spread evenly, so that no block is left with one
      int64_t next = a.m * (b + 1) / blocks;
      if (wide) block_of<Scheme, Scheme::kN>(a, int(next - row), row, tile);
      else block_of<Scheme, 1>(a, int(next - row), row, tile);
      row = next;
    }
    tile += wide ? Scheme::kN : 1;
  }
}

}  // namespace
}  // namespace ps

#endif
