// The windows of convolutions and pools over NHWC images: attributes and output sizes.
#ifndef PENSTOCK_GENERAL_WINDOW_H
#define PENSTOCK_GENERAL_WINDOW_H

#include "ops/expect.h"

namespace ps {

constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr int64_t kMaxTaps = 1 << 16;

struct Window {
  const int64_t *kernel, *strides, *pads, *dilations;  // (h, w), pads (top, left, bottom, right)
};

// Reads the attributes of a window from `kernel` on: kernel, strides, pads, dilations.
Window window_of(const AttrValue* kernel);
ps_status check_window(const AttrValue* kernel);
ps_status expect_list(const AttrValue& attr, const char* name, int32_t length, int64_t min, int64_t max);
// The outputs along an axis of `size` inputs. `ceil`: a window may begin inside the image and end beyond its pads.
ps_status count_windows(const Window& w, int axis, int64_t size, bool ceil, int64_t* out);

// An f32 output with these dims, at most 2^40 elements.
ps_status set_output(Spec* out, int32_t dtype, int32_t rank, const int64_t* dims);
inline int64_t dim(const Spec& s, int32_t i) { return s.dims[i].offset; }
inline float* f32_data(const Tensor& t) { return reinterpret_cast<float*>(t.data); }

// Part i of `count`, split into `parts` as evenly as possible.
inline int64_t share_begin(int64_t count, int64_t i, int64_t parts) {
  return count / parts * i + count % parts * i / parts;
}

}  // namespace ps

#endif
