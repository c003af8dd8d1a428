// Panels of columns.
// Hot: runs in every step.
#include "general/panel.h"

#include <string.h>

#include <algorithm>

namespace ps {
namespace {

void pack_tile(const float* from, int64_t stride, int64_t inner, int64_t width, float* tile) {
  if (width == 16) {
    for (int64_t k = 0; k < inner; ++k) memcpy(tile + k * 16, from + k * stride, 64);
    return;
  }
  for (int64_t k = 0; k < inner; ++k) {
    for (int64_t j = 0; j < 16; ++j) tile[k * 16 + j] = j < width ? from[k * stride + j] : 0;
  }
}

void pack_row_tile(const float* from, int64_t stride, int64_t width, int64_t inner, float* tile) {
  if (width < 16) memset(tile, 0, static_cast<size_t>(inner) * 64);
  for (int64_t first = 0; first < inner; first += 16) {  // one cache line of each row at a time
    const int64_t last = std::min(first + 16, inner);
    for (int64_t j = 0; j < width; ++j) {
      const float* const row = from + j * stride;
      for (int64_t k = first; k < last; ++k) tile[k * 16 + j] = row[k];
    }
  }
}

}  // namespace

void pack_columns(const float* from, int64_t stride, int64_t inner, int64_t width, float* panel) {
  for (int64_t j = 0; j < width; j += 16)
    pack_tile(from + j, stride, inner, std::min<int64_t>(16, width - j), panel + j * inner);
}

void pack_rows(const float* from, int64_t stride, int64_t width, int64_t inner, float* panel) {
  for (int64_t j = 0; j < width; j += 16)
    pack_row_tile(from + j * stride, stride, std::min<int64_t>(16, width - j), inner, panel + j * inner);
}

void multiply(const Kernels& kernels, const PanelRows& x, const float* panel, int64_t inner, int64_t width, float* y,
              int64_t y_stride) {
  LinearArgs args{};
  args.weight = WeightView{reinterpret_cast<const uint8_t*>(panel), PS_T16_F32, width, inner};
  args.x = x.data;
  args.x_stride = x.stride;
  args.y = y;
  args.y_stride = y_stride;
  args.m = static_cast<int32_t>(x.count);
  args.short_prefetch = kernels.short_prefetch;
  kernels.linear[LINEAR_F32](args, 0, (width + 15) / 16);
}

}  // namespace ps
