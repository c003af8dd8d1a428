// Ops of general networks: max_pool, avg_pool.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "general/window.h"

namespace ps {
namespace {

constexpr int32_t kKernel = attr_at(OP_MAX_POOL, "int[] kernel");
constexpr int32_t kMaxCeil = attr_at(OP_MAX_POOL, "bool ceil");
constexpr int32_t kCountPads = attr_at(OP_AVG_POOL, "bool count_pads");
static_assert(kKernel == attr_at(OP_AVG_POOL, "int[] kernel") && kMaxCeil == attr_at(OP_AVG_POOL, "bool ceil"), "");

constexpr int64_t kChannels = 256;  // per item

// The taps of a window inside the image, and the number of taps inside the image and its pads.
struct Taps { int64_t first, count, padded; };
Taps taps_along(const Window& w, int axis, int64_t size, int64_t out) {
  const int64_t begin = out * w.strides[axis] - w.pads[axis], step = w.dilations[axis], taps = w.kernel[axis];
  const int64_t first = begin < 0 ? std::min(taps, (-begin + step - 1) / step) : 0;
  const int64_t end = begin < size ? std::min(taps, (size - begin + step - 1) / step) : 0;
  const int64_t padded = std::min(taps, (size + w.pads[2 + axis] - begin + step - 1) / step);
  return Taps{first, std::max<int64_t>(0, end - first), padded};
}

int64_t blocks(const Call& c) { return (c.in[0].dims[3] + kChannels - 1) / kChannels; }
int64_t pool_items(const Call& c) { return c.out[0].dims[0] * c.out[0].dims[1] * c.out[0].dims[2] * blocks(c); }
int64_t tap_count(const Call& c) { return c.attrs[kKernel].list[0] * c.attrs[kKernel].list[1]; }

void max_bytes(const Tensor& x, int64_t from, const int64_t* taps, int64_t n, int64_t count, uint8_t* y) {
  const uint8_t flip = x.dtype == PS_I8 ? 128 : 0;
  const uint8_t least = flip && !n ? 1 : 0;  // -127 for a window that lies in the pads: int8 convolutions have no -128
  for (int64_t i = 0; i < count; ++i) {
    uint8_t most = least;
    for (int64_t t = 0; t < n; ++t) most = std::max<uint8_t>(most, x.data[taps[t] + from + i] ^ flip);
    y[i] = most ^ flip;
  }
}

// One kind of pool over items: each is a block of channels of an output pixel.
void run_pool(const Call& c, int64_t begin, int64_t end, int32_t thread, bool average) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const Window w = window_of(c.attrs + kKernel);
  int64_t* const taps = reinterpret_cast<int64_t*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  const float** const pointers = reinterpret_cast<const float**>(taps + tap_count(c));
  const int64_t height = x.dims[1], width = x.dims[2], channels = x.dims[3], num_blocks = blocks(c);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t pixel = item / num_blocks, from = item % num_blocks * kChannels;
    const int64_t row = pixel / y.dims[2] % y.dims[1], column = pixel % y.dims[2];
    const int64_t image = pixel / (y.dims[2] * y.dims[1]) * height * width;
    const Taps down = taps_along(w, 0, height, row), across = taps_along(w, 1, width, column);
    const int64_t top = row * w.strides[0] - w.pads[0], left = column * w.strides[1] - w.pads[1];
    int64_t n = 0;
    for (int64_t i = down.first; i < down.first + down.count; ++i)
      for (int64_t j = across.first; j < across.first + across.count; ++j)
        taps[n++] = (image + (top + i * w.dilations[0]) * width + left + j * w.dilations[1]) * channels;
    const int64_t count = std::min(kChannels, channels - from);
    if (x.dtype != PS_F32) {
      max_bytes(x, from, taps, n, count, y.data + pixel * channels + from);
      continue;
    }
    for (int64_t t = 0; t < n; ++t) pointers[t] = f32_data(x) + taps[t] + from;
    float* const to = f32_data(y) + pixel * channels + from;
    if (!average) {
      c.kernels->windows.pool_max(pointers, n, count, to);
      continue;
    }
    const int64_t divisor = c.attrs[kCountPads].i ? down.padded * across.padded : n;
    c.kernels->windows.weighted_sum(pointers, nullptr, n, count, static_cast<float>(divisor), to);
  }
}

void run_max_pool(const Call& c, int64_t begin, int64_t end, int32_t thread) { run_pool(c, begin, end, thread, false); }
void run_avg_pool(const Call& c, int64_t begin, int64_t end, int32_t thread) { run_pool(c, begin, end, thread, true); }

constexpr Phase kMaxPool = {
    .split = SPLIT_ITEMS, .items = pool_items, .run = run_max_pool, .reads_all = operands(0), .writes_outputs = true};
constexpr Phase kAvgPool = {
    .split = SPLIT_ITEMS, .items = pool_items, .run = run_avg_pool, .reads_all = operands(0), .writes_outputs = true};

ps_status infer_pool(const Spec* in, const AttrValue* attrs, Spec* out) {
  PS_TRY(check_window(attrs + kKernel));
  const Window w = window_of(attrs + kKernel);
  int64_t dims[4] = {dim(in[0], 0), 0, 0, dim(in[0], 3)};
  for (int axis = 0; axis < 2; ++axis)
    PS_TRY(count_windows(w, axis, dim(in[0], 1 + axis), attrs[kMaxCeil].i, &dims[1 + axis]));
  return set_output(out, in[0].dtype, 4, dims);
}

ps_status pool_scratch(const Call& c, Scratch* out) {
  out->per_thread = tap_count(c) * 16 + 64;
  return PS_OK;
}

}  // namespace

ps_status infer_max_pool(const Spec* in, AttrValue* attrs, Spec* out) {
  if (!is_tensor(in[0], PS_U8, 4, 4) && !is_tensor(in[0], PS_I8, 4, 4)) PS_TRY(expect_f32(in[0], "x", 4, 4));
  return infer_pool(in, attrs, out);
}
Phases max_pool_phases(const Call&) { return Phases{&kMaxPool, 1}; }
ps_status max_pool_scratch(const Call& c, Scratch* out) { return pool_scratch(c, out); }

ps_status infer_avg_pool(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 4, 4));
  return infer_pool(in, attrs, out);
}
Phases avg_pool_phases(const Call&) { return Phases{&kAvgPool, 1}; }
ps_status avg_pool_scratch(const Call& c, Scratch* out) { return pool_scratch(c, out); }

}  // namespace ps
