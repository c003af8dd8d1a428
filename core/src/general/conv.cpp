// Ops of general networks: conv, conv_int8.
// Hot: runs in every step.
#include "general/conv.h"

#include <string.h>

#include <algorithm>

#include "base/memory.h"
#include "base/tiles.h"
#include "arrays/kinds.h"
#include "general/requantize.h"

namespace ps {
namespace {

constexpr int32_t kWeight = argument_at(OP_CONV, "Weight weight");
constexpr int32_t kBias = argument_at(OP_CONV, "Weight? bias");
constexpr int32_t kResidualInput = argument_at(OP_CONV, "Tensor? residual");
constexpr int32_t kOutChannels = attr_at(OP_CONV, "int out_channels");
constexpr int32_t kKernel = attr_at(OP_CONV, "int[] kernel");
constexpr int32_t kGroups = attr_at(OP_CONV, "int groups");
constexpr int32_t kAct = attr_at(OP_CONV, "str act");
constexpr int32_t kXScale = attr_at(OP_CONV_INT8, "float x_scale");
constexpr int32_t kResidualScale = attr_at(OP_CONV_INT8, "float residual_scale");
constexpr int32_t kYScale = attr_at(OP_CONV_INT8, "float y_scale");
constexpr int32_t kDtype = attr_at(OP_CONV_INT8, "str dtype");
static_assert(kWeight == argument_at(OP_CONV_INT8, "Weight weight") &&
                  kResidualInput == argument_at(OP_CONV_INT8, "Tensor? residual") &&
                  kKernel == attr_at(OP_CONV_INT8, "int[] kernel") && kAct == attr_at(OP_CONV_INT8, "str act"),
              "");
static_assert(kWeight == argument_at(OP_CONV_TRANSPOSE, "Weight weight") &&
                  kBias == argument_at(OP_CONV_TRANSPOSE, "Weight? bias"),
              "");

bool is_depthwise(const Call& c) { return c.in[kWeight].layout == PS_ROWS_F32; }
bool is_int8(const Call& c) { return c.in[0].dtype != PS_F32; }

// A walk over output pixels.
struct Pixel { int64_t image, y, x; };
Pixel pixel_at(const Shape& out, int64_t index) {
  return Pixel{index / (out.height * out.width), index / out.width % out.height, index % out.width};
}
void advance(const Shape& out, Pixel* p) {
  if (++p->x < out.width) return;
  p->x = 0;
  if (++p->y < out.height) return;
  p->y = 0;
  ++p->image;
}

// Whether each output pixel reads only the input pixel at the same position.
bool is_pointwise(const Window& w) {
  bool plain = true;
  for (int i = 0; i < 2; ++i) plain = plain && w.kernel[i] == 1 && w.strides[i] == 1 && !w.pads[i] && !w.pads[2 + i];
  return plain;
}

// Fills the tables of blocks of output pixels.
class TapTable {
 public:
  TapTable(const Call& c, const ConvMemory& memory)
      : x_(c.in[0].data),
        element_bytes_(is_int8(c) ? 1 : 4),
        zeros_(memory.zeros),
        offsets_(memory.offsets),
        in_(shape_of(c.in[0])),
        out_(shape_of(c.out[0])),
        window_(window_of(c.attrs + kKernel)),
        groups_(c.attrs[kGroups].i),
        joins_taps_(groups_ == 1 && !is_depthwise(c)),
        pointwise_(is_pointwise(window_)) {
    fill_offsets(memory.offsets);
  }

  Pixel at(int64_t index) const { return pixel_at(out_, index); }

  // Fills the table of the pixels [begin, end), the first of which is *p, and advances *p to `end`.  Returns the number
  // of pointers written.
  int64_t fill(Pixel* p, int64_t begin, int64_t end, const void** taps, int64_t* pixels, TapBlock* block) const {
    const int64_t rows = end - begin, kw = window_.kernel[1];
    if (pointwise_) {
      const uint8_t* x = x_ + begin * in_.channels * element_bytes_;
      for (int64_t i = 0; i < rows; ++i, x += in_.channels * element_bytes_) {
        taps[i] = x;
        pixels[i] = begin + i;
      }
      *block = TapBlock{taps, nullptr, pixels, static_cast<int32_t>(rows), 1, in_.channels / groups_};
      return rows;
    }
    bool inside = joins_taps_ && window_.dilations[1] == 1;  // the taps of a window's row are adjacent in memory
    Pixel each = *p;
    for (int64_t i = 0; i < rows && inside; ++i) {
      const int64_t x = each.x * window_.strides[1] - window_.pads[1];
      inside = x >= 0 && x + kw <= in_.width;
      advance(out_, &each);
    }
    const int64_t columns = inside ? 1 : kw;
    for (int64_t i = 0; i < rows; ++i) {
      fill_row(*p, columns, taps + i, rows);
      pixels[i] = begin + i;
      advance(out_, p);
    }
    *block = TapBlock{taps,
                      nullptr,
                      pixels,
                      static_cast<int32_t>(rows),
                      static_cast<int32_t>(window_.kernel[0] * columns),
                      in_.channels / groups_ * (inside ? kw : 1)};
    return rows * block->taps;
  }

 private:
  void fill_row(const Pixel& p, int64_t columns, const void** taps, int64_t step) const {
    const int64_t top = p.y * window_.strides[0] - window_.pads[0], left = p.x * window_.strides[1] - window_.pads[1];
    const int64_t pixel_bytes = in_.channels * element_bytes_;
    const uint8_t* const image = x_ + p.image * in_.height * in_.width * pixel_bytes;
    const int64_t height = window_.kernel[0], kw = window_.kernel[1];
    if (top >= 0 && left >= 0 && top + (height - 1) * window_.dilations[0] < in_.height &&
        left + (kw - 1) * window_.dilations[1] < in_.width) {
      const uint8_t* const first = image + (top * in_.width + left) * pixel_bytes;
      for (int64_t i = 0; i < height * kw; i += columns == 1 ? kw : 1, taps += step) *taps = first + offsets_[i];
      return;
    }
    for (int64_t ky = 0, y = top; ky < height; ++ky, y += window_.dilations[0]) {
      const bool row_inside = y >= 0 && y < in_.height;
      const uint8_t* const row = row_inside ? image + y * in_.width * pixel_bytes : nullptr;
      for (int64_t kx = 0, x = left; kx < columns; ++kx, x += window_.dilations[1], taps += step)
        *taps = row_inside && x >= 0 && x < in_.width ? row + x * pixel_bytes : zeros_;
    }
  }

  // Offsets in bytes of all taps from the first.
  void fill_offsets(int64_t* offsets) const {
    for (int64_t ky = 0; ky < window_.kernel[0]; ++ky) {
      for (int64_t kx = 0; kx < window_.kernel[1]; ++kx)
        *offsets++ =
            (ky * window_.dilations[0] * in_.width + kx * window_.dilations[1]) * in_.channels * element_bytes_;
    }
  }

  const uint8_t* const x_;
  const int64_t element_bytes_;
  const void* const zeros_;
  const int64_t* const offsets_;
  const Shape in_, out_;
  const Window window_;
  const int64_t groups_;
  const bool joins_taps_, pointwise_;
};

int64_t num_taps(const Call& c) { return c.attrs[kKernel].list[0] * c.attrs[kKernel].list[1]; }
int64_t num_pixels(const Call& c) { return c.out[0].dims[0] * c.out[0].dims[1] * c.out[0].dims[2]; }
// A row of taps beyond the image's edges reads zeros for all its columns.
int64_t num_zeros(const Call& c) { return c.in[0].dims[3] * (c.attrs[kGroups].i == 1 ? c.attrs[kKernel].list[1] : 1); }

int64_t chunk_pixels(const Call& c) {
  return is_depthwise(c) ? c.kernels->windows.depthwise_rows * 16
                         : c.kernels->windows.conv_rows * blocks_of_chunk(num_taps(c));
}
int64_t num_chunks(const Call& c) { return (num_pixels(c) + chunk_pixels(c) - 1) / chunk_pixels(c); }

ConvArgs conv_args(const Call& c) {
  const int64_t groups = c.attrs[kGroups].i, out_channels = c.attrs[kOutChannels].i;
  const ConvWork work = conv_work(out_channels, groups);
  return ConvArgs{c.in[kWeight].data,
                  c.in[kWeight].dims[1],
                  f32_data(c.in[kBias]),
                  f32_data(c.out[0]),
                  f32_data(c.in[kResidualInput]),
                  out_channels,
                  work.group_rows,
                  work.group_tiles,
                  c.in[0].dims[3] / groups,
                  {static_cast<int32_t>(c.attrs[kAct].i), static_cast<float>(c.attrs[kAct + 1].f),
                   static_cast<float>(c.attrs[kAct + 2].f)}};
}

// Returns null for a float32 tensor.
int8_t* int8_data(const Tensor& t) { return t.dtype == PS_F32 ? nullptr : reinterpret_cast<int8_t*>(t.data); }

int64_t conv_items(const Call& c) {
  if (!num_pixels(c)) return 0;
  return num_chunks(c) * (is_depthwise(c) ? 1 : conv_work(c.attrs[kOutChannels].i, c.attrs[kGroups].i).tile_groups);
}

void run_conv(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const ConvWork work = conv_work(c.attrs[kOutChannels].i, c.attrs[kGroups].i);
  const ConvMemory memory = conv_memory(c, thread, num_zeros(c), num_taps(c), chunk_pixels(c));
  const bool int8 = is_int8(c);
  const Int8ConvArgs args = int8_conv_args(c);
  const TapTable table(c, memory);
  const int64_t pixels = num_pixels(c), chunks = num_chunks(c), rows = c.kernels->windows.conv_rows;
  int64_t chunk = -1, blocks = 0;
  for (int64_t item = begin; item < end; ++item) {
    if (item / work.tile_groups != chunk) {
      chunk = item / work.tile_groups;
      const int64_t first = share_begin(pixels, chunk, chunks), last = share_begin(pixels, chunk + 1, chunks);
      blocks = (last - first + rows - 1) / rows;
      const void** taps = memory.taps;
      Pixel p = table.at(first);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t from = first + share_begin(last - first, i, blocks);
        const int64_t to = first + share_begin(last - first, i + 1, blocks);
        taps += table.fill(&p, from, to, taps, memory.pixels + (from - first), memory.blocks + i);
      }
    }
    const int64_t tile = item % work.tile_groups * work.tile_step;
    const int64_t tile_end = std::min(tile + work.tile_step, work.tiles);
    if (int8) c.kernels->windows.conv_int8(args, memory.blocks, blocks, tile, tile_end);
    else c.kernels->windows.conv(args.conv, memory.blocks, blocks, tile, tile_end);
  }
}

void run_depthwise(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const ConvMemory memory = conv_memory(c, thread, num_zeros(c), num_taps(c), chunk_pixels(c));
  const ConvArgs args = conv_args(c);
  const TapTable table(c, memory);
  const int64_t pixels = num_pixels(c), chunks = num_chunks(c), rows = c.kernels->windows.depthwise_rows;
  const int64_t first = share_begin(pixels, begin, chunks), last = share_begin(pixels, end, chunks);
  Pixel p = table.at(first);
  for (int64_t from = first; from < last; from += rows) {
    table.fill(&p, from, std::min(from + rows, last), memory.taps, memory.pixels, memory.blocks);
    c.kernels->windows.depthwise(args, *memory.blocks);
  }
}

constexpr Phase kConvPhase = {.split = SPLIT_SHARES,
                              .items = conv_items,
                              .run = run_conv,
                              .reads_all = operands(0, kResidualInput),
                              .writes_outputs = true};
constexpr Phase kDepthwisePhase = {.split = SPLIT_SHARES,
                                   .items = conv_items,
                                   .run = run_depthwise,
                                   .reads_all = operands(0, kResidualInput),
                                   .writes_outputs = true};

}  // namespace

Int8ConvArgs int8_conv_args(const Call& c) {
  Int8ConvArgs a{};
  a.conv = conv_args(c);
  if (!is_int8(c)) return a;
  a.x_scale = static_cast<float>(c.attrs[kXScale].f);
  a.residual_scale = static_cast<float>(c.attrs[kResidualScale].f);
  a.residual = int8_data(c.in[kResidualInput]);
  if (a.residual) a.conv.residual = nullptr;
  a.y = int8_data(c.out[0]);
  if (a.y) a.conv.y = nullptr;
  a.inverse = a.y ? 1 / static_cast<float>(c.attrs[kYScale].f) : 0;
  a.least = c.out[0].dtype == PS_U8 ? 0.f : -127.f;
  a.is_signed = c.in[0].dtype == PS_I8;
  return a;
}

ConvWork conv_work(int64_t out_channels, int64_t groups) {
  ConvWork w;
  w.group_rows = out_channels / groups;
  w.group_tiles = (w.group_rows + 15) / 16;
  w.tiles = w.group_tiles * groups;
  w.tile_step = std::min<int64_t>(4, w.tiles);
  w.tile_groups = (w.tiles + w.tile_step - 1) / w.tile_step;
  return w;
}

int64_t blocks_of_chunk(int64_t taps) { return std::max<int64_t>(1, std::min<int64_t>(kChunkBlocks, 4096 / taps)); }

ps_status conv_memory_bytes(int64_t zeros, int64_t taps, int64_t rows, int64_t* out) {
  int64_t bytes;
  if (checked_mul(zeros, 4, &bytes) && checked_align(bytes, 64, &bytes) &&
      checked_add(bytes, taps * 8 + rows * (taps + 1) * 8 + rows * static_cast<int64_t>(sizeof(TapBlock)) + 64, out))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: the pixels of a window do not fit in memory");
}

ConvMemory conv_memory(const Call& c, int32_t thread, int64_t zeros, int64_t taps, int64_t rows) {
  uint8_t* p = c.thread_scratch + thread * c.thread_scratch_bytes;
  ConvMemory m;
  memset(p, 0, static_cast<size_t>(zeros * 4));
  m.zeros = p;
  p += round_up(zeros * 4, 64);
  m.offsets = reinterpret_cast<int64_t*>(p);
  p += taps * 8;
  m.taps = reinterpret_cast<const void**>(p);
  p += rows * taps * 8;
  m.pixels = reinterpret_cast<int64_t*>(p);
  m.blocks = reinterpret_cast<TapBlock*>(p + rows * 8);
  return m;
}

ps_status check_groups(const Spec& x, const Spec& w, const Spec& bias, const ConvGroups& g) {
  const int64_t channels = dim(x, 3);
  if (g.out_channels < 1 || g.out_channels > kMaxDim) {
    return fail(PS_INVALID_ARGUMENT, "out_channels: expected 1 to 2^31, got %lld",
                static_cast<long long>(g.out_channels));
  }
  if (g.groups < 1 || channels < 1 || channels % g.groups || g.out_channels % g.groups) {
    return fail(PS_INVALID_ARGUMENT, "groups: expected a divisor of %lld channels and %lld outputs, got %lld",
                static_cast<long long>(channels), static_cast<long long>(g.out_channels),
                static_cast<long long>(g.groups));
  }
  const bool depthwise = w.layout == PS_ROWS_F32;
  if ((depthwise && (g.groups != channels || g.out_channels != channels)) || (!depthwise && w.layout != g.layout)) {
    const char* layout = layout_name(w.layout);
    return fail(PS_INVALID_ARGUMENT, "weight: expected layout %s, got %s", layout_name(g.layout),
                layout ? layout : "unknown");
  }
  const int64_t group_rows = g.out_channels / g.groups;
  const int64_t padded = g.groups == 1 ? group_rows : round_up(group_rows, 16);
  int64_t rows = g.taps, cols = channels;
  const bool fits =
      depthwise || (checked_mul(padded, g.groups, &rows) && checked_mul(g.taps, channels / g.groups, &cols));
  if (!fits || dim(w, 0) != rows || dim(w, 1) != cols) {
    return fail(PS_INVALID_ARGUMENT, "weight: expected [%lld, %lld], got [%lld, %lld]", static_cast<long long>(rows),
                static_cast<long long>(cols), static_cast<long long>(dim(w, 0)), static_cast<long long>(dim(w, 1)));
  }
  return bias.kind == OPERAND_NONE ? PS_OK : expect_vector(bias, "bias", g.out_channels);
}

namespace {

// The shape rule that conv and conv_int8 share; `out` is f32.
ps_status infer_any(const Spec* in, AttrValue* attrs, int32_t layout, Spec* out) {
  PS_TRY(check_window(attrs + kKernel));
  const Window w = window_of(attrs + kKernel);
  PS_TRY(check_groups(in[0], in[kWeight], in[kBias],
                      ConvGroups{attrs[kOutChannels].i, attrs[kGroups].i, w.kernel[0] * w.kernel[1], layout}));
  PS_TRY(parse_activation(&attrs[kAct]));
  int64_t dims[4] = {dim(in[0], 0), 0, 0, attrs[kOutChannels].i};
  for (int axis = 0; axis < 2; ++axis) PS_TRY(count_windows(w, axis, dim(in[0], 1 + axis), false, &dims[1 + axis]));
  return set_output(out, PS_F32, 4, dims);
}

}  // namespace

ps_status infer_conv(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 4, 4));
  PS_TRY(infer_any(in, attrs, PS_T16_F32, out));
  return in[kResidualInput].kind == OPERAND_NONE ? PS_OK : expect_same(in[kResidualInput], *out, "residual", "output");
}

ps_status infer_conv_int8(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_int8(in[0], "x", 4, 4));
  PS_TRY(infer_any(in, attrs, PS_T16_I8, out));
  if (in[kWeight].layout == PS_T16_I8) {
    const int64_t channels = dim(in[0], 3) / attrs[kGroups].i;
    if (channels % kRowBytes)
      return fail(PS_INVALID_ARGUMENT, "x: expected a multiple of 4 channels in a group, got %lld",
                  static_cast<long long>(channels));
    if (dim(in[kWeight], 1) > kMaxInt8Columns)
      return fail(PS_INVALID_ARGUMENT, "weight: expected at most 65536 columns, got %lld",
                  static_cast<long long>(dim(in[kWeight], 1)));
  }
  PS_TRY(check_scale("x_scale", attrs[kXScale]));
  if (in[kResidualInput].kind != OPERAND_NONE) {
    Spec residual = in[kResidualInput];
    if (residual.dtype != PS_F32) {
      PS_TRY(expect_int8(residual, "residual", 4, 4));
      PS_TRY(check_scale("residual_scale", attrs[kResidualScale]));
      residual.dtype = PS_F32;
    }
    PS_TRY(expect_same(residual, *out, "residual", "output"));
  }
  return int8_output(&attrs[kDtype], attrs[kYScale], out);
}

Phases conv_phases(const Call& c) { return Phases{is_depthwise(c) ? &kDepthwisePhase : &kConvPhase, 1}; }

Phases conv_int8_phases(const Call& c) { return is_depthwise(c) ? depthwise_int8_phases() : conv_phases(c); }

ps_status conv_scratch(const Call& c, Scratch* out) {
  return conv_memory_bytes(num_zeros(c), num_taps(c), chunk_pixels(c), &out->per_thread);
}
ps_status conv_int8_scratch(const Call& c, Scratch* out) {
  return is_depthwise(c) ? depthwise_int8_scratch(c, out) : conv_scratch(c, out);
}

}  // namespace ps
