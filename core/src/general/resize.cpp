// Ops of general networks: resize.
// Hot: runs in every step.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "base/memory.h"
#include "general/window.h"

namespace ps {
namespace {

constexpr int32_t kSizes = attr_at(OP_RESIZE, "int[] sizes"), kScaleH = attr_at(OP_RESIZE, "float scale_h");
constexpr int32_t kMode = attr_at(OP_RESIZE, "str mode"), kCoordinates = attr_at(OP_RESIZE, "str coordinates");
constexpr int32_t kRounding = attr_at(OP_RESIZE, "str rounding"), kCubicA = attr_at(OP_RESIZE, "float cubic_a");
constexpr int32_t kExcludeOutside = attr_at(OP_RESIZE, "bool exclude_outside");

enum Mode { NEAREST, LINEAR, CUBIC };
constexpr const char* kModes[] = {"nearest", "linear", "cubic"};
enum Coordinates { HALF_PIXEL, PYTORCH_HALF_PIXEL, ASYMMETRIC, ALIGN_CORNERS, HALF_PIXEL_SYMMETRIC, TF_HALF_PIXEL };
constexpr const char* kCoordinateNames[] = {"half_pixel",    "pytorch_half_pixel",   "asymmetric",
                                            "align_corners", "half_pixel_symmetric", "tf_half_pixel_for_nn"};
enum Rounding { PREFER_FLOOR, PREFER_CEIL, FLOOR, CEIL };
constexpr const char* kRoundings[] = {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"};

constexpr int kMaxAxisTaps = 4;
constexpr int kAxisTaps[] = {1, 2, 4};  // by mode: nearest, linear, cubic

// The taps of an output coordinate along an axis.
struct AxisTaps {
  int64_t index[kMaxAxisTaps];
  float weight[kMaxAxisTaps];
};

// The input coordinate of an output coordinate, as defined by ONNX's Resize.
double source_of(const Call& c, int axis, int64_t at) {
  const double in = static_cast<double>(c.in[0].dims[1 + axis]), out = static_cast<double>(c.out[0].dims[1 + axis]);
  const double scale = c.attrs[kScaleH + axis].f > 0 ? c.attrs[kScaleH + axis].f : out / in;
  const double width = scale * in, x = static_cast<double>(at);
  switch (c.attrs[kCoordinates].i) {
    case ALIGN_CORNERS: return width == 1 ? 0 : x * (in - 1) / (width - 1);
    case ASYMMETRIC: return x / scale;
    case TF_HALF_PIXEL: return (x + 0.5) / scale;
    case PYTORCH_HALF_PIXEL: return width == 1 ? -0.5 : (x + 0.5) / scale - 0.5;
    case HALF_PIXEL_SYMMETRIC: return in / 2 * (1 - out / width) + (x + 0.5) / scale - 0.5;
    default: return (x + 0.5) / scale - 0.5;
  }
}

double rounded(double x, int64_t rounding) {
  switch (rounding) {
    case PREFER_FLOOR: return ceil(x - 0.5);
    case PREFER_CEIL: return floor(x + 0.5);
    case FLOOR: return floor(x);
    default: return ceil(x);
  }
}

// Weights of the pixels from floor(x) - 1 on, where x is `r` past a pixel.
void cubic_weights(double a, double r, double* w) {
  const double s = 1 - r;
  w[0] = ((a * (r + 1) - 5 * a) * (r + 1) + 8 * a) * (r + 1) - 4 * a;
  w[1] = ((a + 2) * r - (a + 3)) * r * r + 1;
  w[2] = ((a + 2) * s - (a + 3)) * s * s + 1;
  w[3] = ((a * (s + 1) - 5 * a) * (s + 1) + 8 * a) * (s + 1) - 4 * a;
}

AxisTaps taps_of(const Call& c, int axis, int64_t at) {
  const int64_t mode = c.attrs[kMode].i, last = c.in[0].dims[1 + axis] - 1;
  double x = source_of(c, axis, at);
  x = x >= -4.e9 && x <= 4.e9 ? x : x > 0 ? 4.e9 : -4.e9;  // clamped to fit an integer; a NaN becomes the minimum
  AxisTaps t{};
  if (mode == NEAREST) {
    const double nearest = rounded(x, c.attrs[kRounding].i);
    t.index[0] = std::max<int64_t>(0, std::min(last, static_cast<int64_t>(nearest)));
    return t;
  }
  const double whole = floor(x), r = x - whole;
  double w[kMaxAxisTaps] = {1 - r, r};
  if (mode == CUBIC) cubic_weights(c.attrs[kCubicA].f, r, w);
  const int64_t first = static_cast<int64_t>(whole) - (mode == CUBIC ? 1 : 0);
  double sum = 0;
  for (int i = 0; i < kAxisTaps[mode]; ++i) {
    const int64_t index = first + i;
    if (c.attrs[kExcludeOutside].i && (index < 0 || index > last)) w[i] = 0;
    sum += w[i];
    t.index[i] = std::max<int64_t>(0, std::min(last, index));
  }
  if (!c.attrs[kExcludeOutside].i || sum == 0) sum = 1;
  for (int i = 0; i < kAxisTaps[mode]; ++i) t.weight[i] = static_cast<float>(w[i] / sum);
  return t;
}

bool is_empty(const Call& c) { return row_elements(c.out[0]) * c.out[0].dims[0] == 0; }

// Shared scratch: the taps of all rows, then of all columns.
AxisTaps* all_taps(const Call& c) { return reinterpret_cast<AxisTaps*>(c.scratch); }
int64_t tap_items(const Call& c) { return is_empty(c) ? 0 : c.out[0].dims[1] + c.out[0].dims[2]; }
void run_taps(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t height = c.out[0].dims[1];
  for (int64_t i = begin; i < end; ++i) all_taps(c)[i] = taps_of(c, i >= height, i >= height ? i - height : i);
}

int64_t row_items(const Call& c) { return is_empty(c) ? 0 : c.out[0].dims[0] * c.out[0].dims[1]; }

void run_nearest(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const int64_t bytes = x.dims[3] * dtype_bytes(x.dtype), width = y.dims[2];
  const AxisTaps* const across = all_taps(c) + y.dims[1];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / y.dims[1];
    const uint8_t* const row =
        x.data + (image * x.dims[1] + all_taps(c)[item % y.dims[1]].index[0]) * x.dims[2] * bytes;
    uint8_t* to = y.data + item * width * bytes;
    for (int64_t j = 0; j < width; ++j, to += bytes)
      memcpy(to, row + across[j].index[0] * bytes, static_cast<size_t>(bytes));
  }
}

void run_weighted(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const int64_t channels = x.dims[3];
  const int taps = kAxisTaps[c.attrs[kMode].i];
  const AxisTaps* const across = all_taps(c) + y.dims[1];
  for (int64_t item = begin; item < end; ++item) {
    const AxisTaps& down = all_taps(c)[item % y.dims[1]];
    const float* const image = f32_data(x) + item / y.dims[1] * x.dims[1] * x.dims[2] * channels;
    for (int64_t j = 0; j < y.dims[2]; ++j) {
      const float* pixels[kMaxAxisTaps * kMaxAxisTaps];
      float weights[kMaxAxisTaps * kMaxAxisTaps];
      int64_t n = 0;
      for (int a = 0; a < taps; ++a) {
        for (int b = 0; b < taps; ++b, ++n) {
          pixels[n] = image + (down.index[a] * x.dims[2] + across[j].index[b]) * channels;
          weights[n] = down.weight[a] * across[j].weight[b];
        }
      }
      c.kernels->windows.weighted_sum(pixels, weights, n, channels, 1, f32_data(y) + (item * y.dims[2] + j) * channels);
    }
  }
}

constexpr Phase kTapsPhase = {.split = SPLIT_ITEMS, .items = tap_items, .run = run_taps, .writes_scratch = true};
constexpr Phase kNearest[] = {kTapsPhase,
                              {.split = SPLIT_ITEMS,
                               .items = row_items,
                               .run = run_nearest,
                               .reads_all = operands(0),
                               .writes_outputs = true,
                               .reads_scratch = true}};
constexpr Phase kWeighted[] = {kTapsPhase,
                               {.split = SPLIT_ITEMS,
                                .items = row_items,
                                .run = run_weighted,
                                .reads_all = operands(0),
                                .writes_outputs = true,
                                .reads_scratch = true}};

template <size_t N>
ps_status parse_name(const char* const (&names)[N], const char* name, AttrValue* attr) {
  for (size_t i = 0; i < N; ++i) {
    if (!equal(attr->s, names[i])) continue;
    attr->i = static_cast<int64_t>(i);
    return PS_OK;
  }
  return fail(PS_UNSUPPORTED, "%s: \"%.*s\" is not known", name, PS_STR(attr->s));
}

}  // namespace

ps_status infer_resize(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(parse_name(kModes, "mode", &attrs[kMode]));
  PS_TRY(parse_name(kCoordinateNames, "coordinates", &attrs[kCoordinates]));
  PS_TRY(parse_name(kRoundings, "rounding", &attrs[kRounding]));
  const Spec& x = in[0];
  if (x.rank != 4 || (attrs[kMode].i != NEAREST && x.dtype != PS_F32) || !dtype_bytes(x.dtype))
    return fail(PS_INVALID_ARGUMENT, "x: expected f32 with 4 dims, got %s", describe(x).text);
  PS_TRY(expect_list(attrs[kSizes], "sizes", 2, 0, kMaxDim));
  for (int32_t i = 0; i < 2; ++i) {
    if (!(attrs[kScaleH + i].f >= 0) || attrs[kScaleH + i].f > 1e9)
      return fail(PS_INVALID_ARGUMENT, "scale_%c: expected 0 to 1e9, got %g", i ? 'w' : 'h', attrs[kScaleH + i].f);
    if (!dim(x, 1 + i) && attrs[kSizes].list[i])
      return fail(PS_INVALID_ARGUMENT, "x: expected a %s of at least 1, got 0", i ? "width" : "height");
  }
  const int64_t dims[4] = {dim(x, 0), attrs[kSizes].list[0], attrs[kSizes].list[1], dim(x, 3)};
  return set_output(out, x.dtype, 4, dims);
}

Phases resize_phases(const Call& c) { return Phases{c.attrs[kMode].i == NEAREST ? kNearest : kWeighted, 2}; }

ps_status resize_scratch(const Call& c, Scratch* out) {
  out->shared = (c.out[0].dims[1] + c.out[0].dims[2]) * static_cast<int64_t>(sizeof(AxisTaps));
  return PS_OK;
}

}  // namespace ps
