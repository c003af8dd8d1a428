// Prefetch of the cache lines that the store of a block of rows will touch.
#ifndef PENSTOCK_KERNELS_LINEAR_STORE_LINES_H
#define PENSTOCK_KERNELS_LINEAR_STORE_LINES_H

namespace ps {
namespace {

// The lines of a block's outputs and residual.  Other threads wrote them last, and rows lie far apart, in few sets of
// the L1 cache, so that the block's weights evict them.  Each of the last pieces of a multiplication therefore
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

  // Before a piece of the multiplication; `pieces` are left with it.
  PS_INLINE void ask(int64_t pieces) {
    for (; left_ >= pieces && left_ > 0; --left_) {
      for (int t = 0; t < tiles_; ++t) __builtin_prefetch(y_ + 16 * t, 1, 3);
      y_ += y_stride_;
      if (!residual_) continue;
      for (int t = 0; t < tiles_; ++t) __builtin_prefetch(residual_ + 16 * t, 0, 3);
      residual_ += residual_stride_;
    }
  }
  PS_INLINE void ask_all() { ask(0); }

 private:
  const float *y_, *residual_;
  int64_t y_stride_, residual_stride_;
  int tiles_, left_;
};

}  // namespace
}  // namespace ps

#endif
