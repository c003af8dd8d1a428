// The two element types that AMX tiles multiply, and the conversion of their sums to outputs.
#ifndef PENSTOCK_KERNELS_LINEAR_AMX_SUMS_H
#define PENSTOCK_KERNELS_LINEAR_AMX_SUMS_H

namespace ps {
namespace {

// Tiles that are multiplied together: two neighbours, or one of the gate and the matching one of `up`.
struct TilePair {
  int count;
  const uint8_t *data[2], *next[2];
};

// The sums of whole tiles without bias, row after row: two tiles side by side, or gate and up.
template <class Type, bool kGated, bool kResidual>
__attribute__((noinline)) void finish_whole(const LinearArgs& a, const RowBlock& block, int64_t tile,
                                            const TilePair& pair, const typename Type::Sum* sums) {
  const typename Type::Scales scales(a, pair);
  float* y = a.y + block.first * a.y_stride + tile * 16;
  const float* residual = kResidual ? a.residual + block.first * a.residual_stride + tile * 16 : nullptr;
  for (int64_t row = block.first; row < block.first + block.count; ++row, sums += 2, y += a.y_stride) {
    F16 v[2] = {scales.value(sums[0], row, 0), scales.value(sums[1], row, 1)};
    if (kGated) v[0] = SiluMul::of(v[0], v[1]);
    for (int t = 0; t < (kGated ? 1 : 2); ++t) f_store(y + 16 * t, kResidual ? v[t] + f_load(residual + 16 * t) : v[t]);
    if (kResidual) residual += a.residual_stride;
  }
}

// Calls finish_whole if it fits; returns whether it did.
template <class Type>
PS_INLINE bool finished_whole(const LinearArgs& a, const RowBlock& block, int64_t tile, const TilePair& pair,
                              const typename Type::Sum* sums) {
  const int64_t stop = (tile + (a.gated ? 1 : 2)) * 16;
  if (a.bias || a.qx.planes == 2 || pair.count != 2 || stop > (a.gated ? a.weight.rows / 2 : a.weight.rows))
    return false;
  if (a.gated) {
    if (a.residual) finish_whole<Type, true, true>(a, block, tile, pair, sums);
    else finish_whole<Type, true, false>(a, block, tile, pair, sums);
  } else {
    if (a.residual) finish_whole<Type, false, true>(a, block, tile, pair, sums);
    else finish_whole<Type, false, false>(a, block, tile, pair, sums);
  }
  return true;
}

struct Integers {
  using Sum = I16;
  static constexpr bool kFour = true;
  struct Scales {
    F16 weight[2];
    const float* token;
    PS_INLINE Scales(const LinearArgs& a, const TilePair& pair)
        : weight{f_load((const float*)pair.data[0]), f_load((const float*)pair.data[1])}, token(a.qx.scale) {}
    PS_INLINE F16 value(I16 sum, int64_t row, int t) const { return f_from_i(sum) * (weight[t] * f_set(token[row])); }
  };
  PS_INLINE static void dot0() { _tile_dpbssd(0, 4, 6); }
  PS_INLINE static void dot1() { _tile_dpbssd(1, 4, 7); }
  PS_INLINE static void dot2() { _tile_dpbssd(2, 5, 6); }
  PS_INLINE static void dot3() { _tile_dpbssd(3, 5, 7); }
  static void finish(const LinearArgs& a, const RowBlock& block, int64_t tile, const TilePair& pair, I16* sums) {
    if (finished_whole<Integers>(a, block, tile, pair, sums)) return;
    const F16 first = f_load((const float*)pair.data[0]), second = f_load((const float*)pair.data[1]);
    if (a.gated) return finish_gated(a, block, {tile * 16, first, sums}, {0, second, sums + 1});
    finish_tile(a, block, {tile * 16, first, sums}, pair.count);
    if (pair.count == 2) finish_tile(a, block, {tile * 16 + 16, second, sums + 1}, 2);
  }
};

struct Halves {
  using Sum = F16;
  static constexpr bool kFour = false;
  struct Scales {
    PS_INLINE Scales(const LinearArgs&, const TilePair&) {}
    PS_INLINE F16 value(F16 sum, int64_t, int) const { return sum; }
  };
  PS_INLINE static void dot0() { _tile_dpbf16ps(0, 4, 6); }
  PS_INLINE static void dot1() { _tile_dpbf16ps(1, 4, 7); }
  PS_INLINE static void dot2() { _tile_dpbf16ps(2, 5, 6); }
  PS_INLINE static void dot3() { _tile_dpbf16ps(3, 5, 7); }
  static void finish(const LinearArgs& a, const RowBlock& block, int64_t tile, const TilePair& pair, F16* sums) {
    if (finished_whole<Halves>(a, block, tile, pair, sums)) return;
    if (a.gated) store_gated(a, block.first, tile, block.count, 2, sums, sums + 1);
    else store_block(a, block.first, tile, block.count, pair.count, sums);
  }
};

// Sums that still have to be scaled and stored.  This is done a few rows at a time between the products of the next
// sums.
template <class Type>
struct Waiting {
  const LinearArgs* args;
  int64_t tile;
  TilePair pair;
  int planes, rows, done;  // tokens
  RowBlock blocks[2];
  typename Type::Sum* sums;  // [2][16][pair.count]

  PS_INLINE void finish_until(int row) {
    while (done < row) {
      const int b = done >= blocks[0].count, from = b ? done - blocks[0].count : done;
      const int left = blocks[b].count - from, count = row - done < left ? row - done : left;
      Type::finish(*args, {blocks[b].first + from, count}, tile, pair, sums + (16 * b + from * planes) * pair.count);
      done += count;
    }
  }
};

}  // namespace
}  // namespace ps

#endif
