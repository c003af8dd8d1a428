// Products of values: columns of a matrix are copied to a panel of tiles of sixteen, which the kernels of linear
// multiply as a weight.  So an output is one chain with ascending inner index, as that of a linear.
#ifndef PENSTOCK_GENERAL_PANEL_H
#define PENSTOCK_GENERAL_PANEL_H

#include "general/window.h"

namespace ps {

// Columns that are best multiplied together.
inline int64_t panel_columns(const Kernels& kernels) { return kernels.windows.conv_tiles * 16; }
// `width` columns of [inner, ...], `stride` from one row to the next, to tiles [inner][16].
void pack_columns(const float* from, int64_t stride, int64_t inner, int64_t width, float* panel);
// The transpose of `width` rows of `inner`, `stride` apart.
void pack_rows(const float* from, int64_t stride, int64_t width, int64_t inner, float* panel);

struct PanelRows {
  const float* data;
  int64_t stride, count;
};
// y = x * panel
void multiply(const Kernels& kernels, const PanelRows& x, const float* panel, int64_t inner, int64_t width, float* y,
              int64_t y_stride);

}  // namespace ps

#endif
