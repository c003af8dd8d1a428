// Ops of general networks: conv_transpose.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "general/conv.h"
#include "arrays/kinds.h"

namespace ps {
namespace {

constexpr int32_t kWeight = argument_at(OP_CONV_TRANSPOSE, "Weight weight");
constexpr int32_t kBias = argument_at(OP_CONV_TRANSPOSE, "Weight? bias");
constexpr int32_t kOutChannels = attr_at(OP_CONV_TRANSPOSE, "int out_channels");
constexpr int32_t kKernel = attr_at(OP_CONV_TRANSPOSE, "int[] kernel");
constexpr int32_t kOutputPads = attr_at(OP_CONV_TRANSPOSE, "int[] output_pads");
constexpr int32_t kGroups = attr_at(OP_CONV_TRANSPOSE, "int groups");
constexpr int32_t kAct = attr_at(OP_CONV_TRANSPOSE, "str act");
constexpr int64_t kMaxStride = 64;

// Output pixels whose coordinates have the same remainders modulo the strides read the same taps.  Each such class is
// computed as a convolution with these taps.
struct Class {
  int64_t first_y, first_x, height, width;  // of the class's output pixels
  int64_t chunks;
};

bool is_depthwise(const Call& c) { return c.in[kWeight].layout == PS_ROWS_F32; }
int64_t block_rows(const Call& c) {
  return is_depthwise(c) ? c.kernels->windows.depthwise_rows : c.kernels->windows.conv_rows;
}
int64_t chunk_pixels(const Call& c) { return block_rows(c) * kChunkBlocks / 2; }

Class class_at(const Call& c, int64_t index) {
  const Window w = window_of(c.attrs + kKernel);
  const Shape out = shape_of(c.out[0]);
  Class k{index / w.strides[1], index % w.strides[1], 0, 0, 0};
  k.height = k.first_y < out.height ? (out.height - k.first_y + w.strides[0] - 1) / w.strides[0] : 0;
  k.width = k.first_x < out.width ? (out.width - k.first_x + w.strides[1] - 1) / w.strides[1] : 0;
  k.chunks = (out.images * k.height * k.width + chunk_pixels(c) - 1) / chunk_pixels(c);
  return k;
}
int64_t num_classes(const Call& c) {
  const Window w = window_of(c.attrs + kKernel);
  return w.strides[0] * w.strides[1];
}

// A tap of a class along one axis: its index in the kernel, and the input coordinate that the class's first pixel
// reads.
struct AxisTap { int64_t place, start; };
int64_t axis_taps(const Window& w, int axis, int64_t first, AxisTap* out) {
  int64_t n = 0;
  for (int64_t k = 0; k < w.kernel[axis]; ++k) {
    const int64_t at = first + w.pads[axis] - k * w.dilations[axis], stride = w.strides[axis];
    if ((at % stride + stride) % stride) continue;
    out[n++] = AxisTap{k, at / stride};
  }
  return n;
}

// The memory of a thread: taps of both axes and the columns of their weights, then the memory of conv.
struct Taps {
  AxisTap *down, *across;
  int64_t* columns;
  int64_t num_down, num_across;
};
int64_t taps_bytes(const Window& w) {
  const int64_t bytes =
      (w.kernel[0] + w.kernel[1]) * static_cast<int64_t>(sizeof(AxisTap)) + w.kernel[0] * w.kernel[1] * 8;
  return round_up(bytes, 64);
}
Taps taps_memory(const Call& c, const Window& w, int32_t thread) {
  Taps t{};
  t.down = reinterpret_cast<AxisTap*>(c.thread_scratch + (thread + 1) * c.thread_scratch_bytes - taps_bytes(w));
  t.across = t.down + w.kernel[0];
  t.columns = reinterpret_cast<int64_t*>(t.across + w.kernel[1]);
  return t;
}

void find_taps(const Call& c, const Window& w, const Class& k, Taps* t) {
  const int64_t columns = is_depthwise(c) ? 1 : c.in[0].dims[3] / c.attrs[kGroups].i;  // per tap
  t->num_down = axis_taps(w, 0, k.first_y, t->down);
  t->num_across = axis_taps(w, 1, k.first_x, t->across);
  for (int64_t i = 0; i < t->num_down; ++i) {
    for (int64_t j = 0; j < t->num_across; ++j)
      t->columns[i * t->num_across + j] = (t->down[i].place * w.kernel[1] + t->across[j].place) * columns;
  }
}

// Fills the table of the pixels [begin, end) of a class.  Returns the number of pointers written.
int64_t fill_block(const Call& c, const Class& k, const Taps& t, const ConvMemory& m, int64_t begin, int64_t end,
                   const void** taps, int64_t* pixels, TapBlock* block) {
  const Shape in = shape_of(c.in[0]), out = shape_of(c.out[0]);
  const Window w = window_of(c.attrs + kKernel);
  const int64_t rows = end - begin;
  int64_t image = begin / (k.height * k.width), y = begin / k.width % k.height, x = begin % k.width;
  for (int64_t r = 0; r < rows; ++r) {
    pixels[r] = (image * out.height + k.first_y + y * w.strides[0]) * out.width + k.first_x + x * w.strides[1];
    const void** tap = taps + r;
    for (int64_t i = 0; i < t.num_down; ++i) {
      const int64_t from_y = t.down[i].start + y;
      for (int64_t j = 0; j < t.num_across; ++j, tap += rows) {
        const int64_t from_x = t.across[j].start + x;
        const bool inside = from_y >= 0 && from_y < in.height && from_x >= 0 && from_x < in.width;
        *tap = m.zeros;
        if (inside) *tap = f32_data(c.in[0]) + ((image * in.height + from_y) * in.width + from_x) * in.channels;
      }
    }
    if (++x < k.width) continue;
    x = 0;
    if (++y < k.height) continue;
    y = 0;
    ++image;
  }
  const int64_t num_taps = t.num_down * t.num_across;
  *block = TapBlock{taps,
                    t.columns,
                    pixels,
                    static_cast<int32_t>(rows),
                    static_cast<int32_t>(num_taps),
                    in.channels / c.attrs[kGroups].i};
  return rows * num_taps;
}

int64_t num_taps(const Call& c) { return c.attrs[kKernel].list[0] * c.attrs[kKernel].list[1]; }

int64_t items(const Call& c) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < num_classes(c); ++i) chunks += class_at(c, i).chunks;
  return chunks * (is_depthwise(c) ? 1 : conv_work(c.attrs[kOutChannels].i, c.attrs[kGroups].i).tile_groups);
}

ConvArgs conv_args(const Call& c, const ConvWork& work) {
  ConvArgs a{};
  a.weight = c.in[kWeight].data;
  a.cols = c.in[kWeight].dims[1];
  a.bias = f32_data(c.in[kBias]);
  a.y = f32_data(c.out[0]);
  a.out_channels = c.attrs[kOutChannels].i;
  a.group_rows = work.group_rows;
  a.group_tiles = work.group_tiles;
  a.group_channels = c.in[0].dims[3] / c.attrs[kGroups].i;
  a.act = Activation{static_cast<int32_t>(c.attrs[kAct].i), static_cast<float>(c.attrs[kAct + 1].f),
                     static_cast<float>(c.attrs[kAct + 2].f)};
  return a;
}

// Returns the class of chunk number `chunk` of all classes, and its number within the class.
Class find_class(const Call& c, int64_t* chunk) {
  int64_t index = 0;
  Class k = class_at(c, 0);
  for (; *chunk >= k.chunks; k = class_at(c, ++index)) *chunk -= k.chunks;
  return k;
}

void run(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Window w = window_of(c.attrs + kKernel);
  const ConvWork work = conv_work(c.attrs[kOutChannels].i, c.attrs[kGroups].i);
  const ConvMemory memory = conv_memory(c, thread, c.in[0].dims[3], num_taps(c), chunk_pixels(c));
  const ConvArgs args = conv_args(c, work);
  Taps taps = taps_memory(c, w, thread);
  const int64_t rows = block_rows(c), tile_groups = is_depthwise(c) ? 1 : work.tile_groups;
  int64_t filled = -1, blocks = 0;
  for (int64_t item = begin; item < end; ++item) {
    if (item / tile_groups != filled) {
      filled = item / tile_groups;
      int64_t chunk = filled;
      const Class k = find_class(c, &chunk);
      find_taps(c, w, k, &taps);
      const int64_t pixels = c.out[0].dims[0] * k.height * k.width;
      const int64_t first = share_begin(pixels, chunk, k.chunks), last = share_begin(pixels, chunk + 1, k.chunks);
      blocks = (last - first + rows - 1) / rows;
      const void** at = memory.taps;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t from = first + share_begin(last - first, i, blocks);
        const int64_t to = first + share_begin(last - first, i + 1, blocks);
        at += fill_block(c, k, taps, memory, from, to, at, memory.pixels + (from - first), memory.blocks + i);
      }
    }
    if (is_depthwise(c)) {
      for (int64_t i = 0; i < blocks; ++i) c.kernels->windows.depthwise(args, memory.blocks[i]);
      continue;
    }
    const int64_t tile = item % tile_groups * work.tile_step;
    c.kernels->windows.conv(args, memory.blocks, blocks, tile, std::min(tile + work.tile_step, work.tiles));
  }
}

constexpr Phase kPhase = {
    .split = SPLIT_SHARES, .items = items, .run = run, .reads_all = operands(0), .writes_outputs = true};

}  // namespace

ps_status infer_conv_transpose(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 4, 4));
  PS_TRY(check_window(attrs + kKernel));
  PS_TRY(expect_list(attrs[kKernel + 1], "strides", 2, 1, kMaxStride));
  PS_TRY(expect_list(attrs[kOutputPads], "output_pads", 2, 0, kMaxDim));
  const Window w = window_of(attrs + kKernel);
  PS_TRY(check_groups(in[0], in[kWeight], in[kBias],
                      ConvGroups{attrs[kOutChannels].i, attrs[kGroups].i, w.kernel[0] * w.kernel[1], PS_T16_F32}));
  PS_TRY(parse_activation(&attrs[kAct]));
  int64_t dims[4] = {dim(in[0], 0), 0, 0, attrs[kOutChannels].i};
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t size = (dim(in[0], 1 + axis) - 1) * w.strides[axis] - w.pads[axis] - w.pads[2 + axis] +
                         w.dilations[axis] * (w.kernel[axis] - 1) + attrs[kOutputPads].list[axis] + 1;
    if (size < 1) {
      return fail(PS_INVALID_ARGUMENT, "x: expected a %s that leaves an output, got %lld", axis ? "width" : "height",
                  static_cast<long long>(dim(in[0], 1 + axis)));
    }
    dims[1 + axis] = size;
  }
  return set_output(out, PS_F32, 4, dims);
}

Phases conv_transpose_phases(const Call&) { return Phases{&kPhase, 1}; }

ps_status conv_transpose_scratch(const Call& c, Scratch* out) {
  PS_TRY(conv_memory_bytes(c.in[0].dims[3], num_taps(c), chunk_pixels(c), &out->per_thread));
  if (checked_align(out->per_thread, 64, &out->per_thread) &&
      checked_add(out->per_thread, taps_bytes(window_of(c.attrs + kKernel)), &out->per_thread))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: the pixels of a window do not fit in memory");
}

}  // namespace ps
