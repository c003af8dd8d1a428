// Depthwise convolutions of conv_int8.
// Hot: runs in every step.
#include <string.h>

#include <algorithm>

#include "base/memory.h"
#include "general/conv.h"

namespace ps {
namespace {

constexpr int32_t kWeight = argument_at(OP_CONV_INT8, "Weight weight");
constexpr int32_t kKernel = attr_at(OP_CONV_INT8, "int[] kernel");
constexpr int64_t kBandRows = 8, kStripColumns = 128, kLanes = 16;

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// An item is a band of output rows, a strip of their columns, and sixteen channels.  A row of the input is widened to
// float once for all windows that read it.  The rows of a window are a ring in the memory of a thread.
struct Depthwise {
  explicit Depthwise(const Call& c)
      : in(shape_of(c.in[0])), out(shape_of(c.out[0])), window(window_of(c.attrs + kKernel)) {
    bands = parts(out.height, kBandRows);
    strips = parts(out.width, kStripColumns);
    blocks = parts(out.channels, kLanes);
    ring_rows = (window.kernel[0] - 1) * window.dilations[0] + 1;
    ring_columns =
        (std::min(out.width, kStripColumns) - 1) * window.strides[1] + (window.kernel[1] - 1) * window.dilations[1] + 1;
    taps = window.kernel[0] * window.kernel[1];
  }

  Shape in, out;
  Window window;
  int64_t bands, strips, blocks, ring_rows, ring_columns, taps;
};

struct Strip { int64_t image, row, row_end, column, width, channel; };

Strip strip_of(const Depthwise& d, int64_t item) {
  Strip s;
  s.channel = item % d.blocks * kLanes;
  item /= d.blocks;
  s.column = share_begin(d.out.width, item % d.strips, d.strips);
  s.width = share_begin(d.out.width, item % d.strips + 1, d.strips) - s.column;
  item /= d.strips;
  s.row = share_begin(d.out.height, item % d.bands, d.bands);
  s.row_end = share_begin(d.out.height, item % d.bands + 1, d.bands);
  s.image = item / d.bands;
  return s;
}

// Widens row y of the input from the first column that the strip reads.  Rows and columns outside the input are zeros.
void widen_row(const Call& c, const Depthwise& d, const Strip& s, int64_t y, float* row) {
  const int64_t columns = (s.width - 1) * d.window.strides[1] + (d.window.kernel[1] - 1) * d.window.dilations[1] + 1;
  const int64_t left = s.column * d.window.strides[1] - d.window.pads[1];
  int64_t first = std::min(columns, std::max<int64_t>(0, -left));
  int64_t end = std::max(first, std::min(columns, d.in.width - left));
  if (y < 0 || y >= d.in.height) first = end = columns;
  memset(row, 0, static_cast<size_t>(first * kLanes) * 4);
  memset(row + end * kLanes, 0, static_cast<size_t>((columns - end) * kLanes) * 4);
  if (first == end) return;
  const int64_t at = ((s.image * d.in.height + y) * d.in.width + left + first) * d.in.channels + s.channel;
  c.kernels->windows.widen_pixels(reinterpret_cast<const int8_t*>(c.in[0].data) + at, end - first, d.in.channels,
                                  static_cast<int>(std::min(kLanes, d.in.channels - s.channel)), row + first * kLanes);
}

void copy_weights(const Call& c, const Depthwise& d, const Strip& s, float* weight) {
  const int64_t n = std::min(kLanes, d.in.channels - s.channel);
  memset(weight, 0, static_cast<size_t>(d.taps * kLanes) * 4);
  for (int64_t tap = 0; tap < d.taps; ++tap)
    memcpy(weight + tap * kLanes, f32_data(c.in[kWeight]) + tap * d.in.channels + s.channel,
           static_cast<size_t>(n) * 4);
}

void run_depthwise_int8(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Depthwise d(c);
  const Int8ConvArgs args = int8_conv_args(c);
  const int64_t row_floats = d.ring_columns * kLanes;
  float* const ring = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  float* const weight = ring + d.ring_rows * row_floats;
  const float** const rows = reinterpret_cast<const float**>(weight + d.taps * kLanes);
  Int8DepthwiseRow r{rows,
                     weight,
                     d.window.kernel[0],
                     d.window.kernel[1],
                     d.window.strides[1] * kLanes,
                     d.window.dilations[1] * kLanes,
                     0,
                     0,
                     0};
  for (int64_t item = begin; item < end; ++item) {
    const Strip s = strip_of(d, item);
    copy_weights(c, d, s, weight);
    r.channel = s.channel;
    r.count = s.width;
    int64_t next = 0;  // the first row that is not yet widened, counted from the band's first row
    for (int64_t y = s.row; y < s.row_end; ++y) {
      const int64_t first = (y - s.row) * d.window.strides[0], top = s.row * d.window.strides[0] - d.window.pads[0];
      for (next = std::max(next, first); next < first + d.ring_rows; ++next)
        widen_row(c, d, s, top + next, ring + next % d.ring_rows * row_floats);
      for (int64_t ky = 0; ky < d.window.kernel[0]; ++ky)
        rows[ky] = ring + (first + ky * d.window.dilations[0]) % d.ring_rows * row_floats;
      r.pixel = (s.image * d.out.height + y) * d.out.width + s.column;
      c.kernels->windows.depthwise_int8(args, r);
    }
  }
}

int64_t depthwise_int8_items(const Call& c) {
  const Depthwise d(c);
  return d.out.images * d.bands * d.strips * d.blocks;
}

constexpr Phase kDepthwiseInt8 = {.split = SPLIT_SHARES,
                                  .items = depthwise_int8_items,
                                  .run = run_depthwise_int8,
                                  .reads_all = operands(0, argument_at(OP_CONV_INT8, "Tensor? residual")),
                                  .writes_outputs = true};

}  // namespace

Phases depthwise_int8_phases() { return Phases{&kDepthwiseInt8, 1}; }

ps_status depthwise_int8_scratch(const Call& c, Scratch* out) {
  const Depthwise d(c);
  int64_t bytes;
  if (checked_mul(d.ring_rows, d.ring_columns, &bytes) && checked_add(bytes, d.taps, &bytes) &&
      checked_mul(bytes, kLanes * 4, &bytes) && checked_add(bytes, d.window.kernel[0] * 8 + 64, &out->per_thread))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: the pixels of a window do not fit in memory");
}

}  // namespace ps
