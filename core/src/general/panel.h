// Products of computed values: the columns of a matrix are copied to a panel of tiles of sixteen, which the kernels of
// linear use as a weight.  So an output is one chain with ascending inner index, as in a linear.
#ifndef PENSTOCK_GENERAL_PANEL_H
#define PENSTOCK_GENERAL_PANEL_H

#include "general/window.h"

namespace ps {

// The number of columns that are best multiplied together.
inline int64_t panel_columns(const Kernels& kernels) { return kernels.windows.conv_tiles * 16; }
// Copies `width` columns of [inner, ...], rows `stride` apart, to tiles [inner][16].
void pack_columns(const float* from, int64_t stride, int64_t inner, int64_t width, float* panel);
// The same for the transpose: `width` rows of `inner`, `stride` apart.
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
