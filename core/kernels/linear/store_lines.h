// Prefetch of the cache lines that the store of a block of rows will touch.
#ifndef PENSTOCK_KERNELS_LINEAR_STORE_LINES_H
#define PENSTOCK_KERNELS_LINEAR_STORE_LINES_H

namespace ps {
namespace {

// The cache lines of a block's outputs and residual. Other threads wrote them last, and rows are far apart and map to
// few sets of the L1 cache, so the block's weights evict them.  Therefore each of the last pieces of a multiplication
// prefetches one row.
class StoreLines {
 public:
  PS_INLINE StoreLines(const LinearArgs& a, int64_t row, int64_t tile, int rows, int tiles)
      : y_(a.y + row * a.y_stride + tile * 16),
        residual_(a.residual ? a.residual + row * a.residual_stride + tile * 16 : nullptr),
        y_stride_(a.y_stride),
        residual_stride_(a.residual_stride),
        tiles_(tiles),
        left_(rows) {}

  // Called before a piece of the multiplication; `pieces` remain, this one included.
  PS_INLINE void prefetch_pieces(int64_t pieces) {
    for (; left_ >= pieces && left_ > 0; --left_) {
      for (int t = 0; t < tiles_; ++t) __builtin_prefetch(y_ + 16 * t, 1, 3);
      y_ += y_stride_;
      if (!residual_) continue;
      for (int t = 0; t < tiles_; ++t) __builtin_prefetch(residual_ + 16 * t, 0, 3);
      residual_ += residual_stride_;
    }
  }
  PS_INLINE void prefetch_all() { prefetch_pieces(0); }

 private:
  const float *y_, *residual_;
  int64_t y_stride_, residual_stride_;
  int tiles_, left_;
};

}  // namespace
}  // namespace ps

#endif
