// The attributes of windows, and output sizes.
#include "general/window.h"

#include "ops/layout.h"

namespace ps {

Window window_of(const AttrValue* kernel) {
  return Window{kernel[0].list, kernel[1].list, kernel[2].list, kernel[3].list};
}

ps_status expect_list(const AttrValue& attr, const char* name, int32_t length, int64_t min, int64_t max) {
  if (attr.i != length) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected %d numbers, got %lld", name, length, static_cast<long long>(attr.i));
  }
  for (int32_t i = 0; i < length; ++i) {
    if (attr.list[i] >= min && attr.list[i] <= max) continue;
    return fail(PS_INVALID_ARGUMENT, "%s: expected %lld to %lld, got %lld", name, static_cast<long long>(min),
                static_cast<long long>(max), static_cast<long long>(attr.list[i]));
  }
  return PS_OK;
}

ps_status check_window(const AttrValue* kernel) {
  PS_TRY(expect_list(kernel[0], "kernel", 2, 1, kMaxTaps));
  PS_TRY(expect_list(kernel[1], "strides", 2, 1, kMaxDim));
  PS_TRY(expect_list(kernel[2], "pads", 4, 0, kMaxDim));
  PS_TRY(expect_list(kernel[3], "dilations", 2, 1, kMaxDim));
  const int64_t taps = kernel[0].list[0] * kernel[0].list[1];
  if (taps <= kMaxTaps) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "kernel: expected at most %lld places, got %lld", static_cast<long long>(kMaxTaps),
              static_cast<long long>(taps));
}

ps_status count_windows(const Window& w, int axis, int64_t size, bool ceil, int64_t* out) {
  const int64_t stride = w.strides[axis], begin = w.pads[axis];
  const int64_t span = w.dilations[axis] * (w.kernel[axis] - 1) + 1, padded = size + begin + w.pads[2 + axis];
  const int64_t spare = padded - span + (ceil ? stride - 1 : 0);
  *out = spare >= 0 ? spare / stride + 1 : 0;
  // A window starts inside the input or the pads before it.
  if (ceil && (*out - 1) * stride >= size + begin) --*out;
  if (*out > 0) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: expected a %s of at least %lld with its pads, got %lld",
              axis ? "width" : "height", static_cast<long long>(span), static_cast<long long>(padded));
}

ps_status set_output(Spec* out, int32_t dtype, int32_t rank, const int64_t* dims) {
  *out = Spec{OPERAND_VALUE, dtype, rank, {}, 0, -1, constant(0)};
  int64_t elements = 1;
  for (int32_t i = 0; i < rank; ++i) {
    if (dims[i] < 0 || dims[i] > kMaxDim)
      return fail(PS_INVALID_ARGUMENT, "output: expected sizes of 0 to 2^31, got %lld",
                  static_cast<long long>(dims[i]));
    const int64_t size = dims[i] ? dims[i] : 1;
    if (elements > kMaxElements / size) return fail(PS_INVALID_ARGUMENT, "output: expected at most 2^40 elements");
    elements *= size;
    out->dims[i] = constant(dims[i]);
  }
  return PS_OK;
}

}  // namespace ps
