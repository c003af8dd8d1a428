// Op of general networks: conv_winograd, a 3x3 convolution of stride 1 by Winograd's F(2x2, 3x3) (Lavin and Gray, 2015,
// "Fast Algorithms for Convolutional Neural Networks").
//
// A tile is 2x2 outputs, and the 4x4 inputs that they read.  Both sides are transformed, after which each of the 16
// positions of a tile is a product over channels only: 16 multiplications for 4 outputs instead of 36.  A chunk of
// tiles is transformed once; then the block kernel of `conv` multiplies it by one weight tile after another, and each
// product is transformed back.
// Hot: runs in every step.
#include <string.h>

#include <algorithm>

#include "arrays/kinds.h"
#include "base/memory.h"
#include "general/conv.h"

namespace ps {
namespace {

constexpr int32_t kWeight = argument_at(OP_CONV_WINOGRAD, "Weight weight");
constexpr int32_t kBias = argument_at(OP_CONV_WINOGRAD, "Weight? bias");
constexpr int32_t kResidualInput = argument_at(OP_CONV_WINOGRAD, "Tensor? residual");
constexpr int32_t kOutChannels = attr_at(OP_CONV_WINOGRAD, "int out_channels");
constexpr int32_t kPads = attr_at(OP_CONV_WINOGRAD, "int[] pads");
constexpr int32_t kAct = attr_at(OP_CONV_WINOGRAD, "str act");

constexpr int64_t kPlaces = 16;      // of a tile's 4x4 inputs
constexpr int64_t kChunkTiles = 12;  // their products by a weight tile take 12 KiB: they stay in the first cache

// The tiles of an output.
struct Tiles { int64_t down, across, count; };
Tiles tiles_of(const Shape& out) {
  const int64_t down = (out.height + 1) / 2, across = (out.width + 1) / 2;
  return Tiles{down, across, out.images * down * across};
}

// Floats from the transformed inputs of a tile to those of the next.
int64_t pitch(const Call& c) { return round_up(c.in[0].dims[3], 16); }
int64_t chunk_tiles(const Call& c) {
  const int64_t rows = c.kernels->windows.conv_rows;
  return kChunkTiles / rows * rows;
}
int64_t num_chunks(const Call& c) { return (tiles_of(shape_of(c.out[0])).count + chunk_tiles(c) - 1) / chunk_tiles(c); }

// The memory of a thread.  A row lies between the places of a tile, which else were in the same set of a cache.
struct Memory {
  float* zeros;        // [channels]
  float* inputs;       // [places][chunk][pitch], 16 floats between places
  float* products;     // [places][chunk + 1][weight tiles * 16]
  const float** taps;  // [chunk][places]
  int64_t* targets;    // [chunk][4]: the outputs of a tile; -1 outside the image
  const void** rows;   // [places][chunk]: the rows of `inputs` in order
  int64_t* pixels;     // [places][chunk]: numbers in order
  TapBlock* blocks;
  int64_t bytes;
};

Memory memory_at(uintptr_t begin, int64_t chunk, int64_t pitch, int64_t wide) {
  uintptr_t end = begin;
  const auto take = [&end](int64_t bytes) {
    const uintptr_t at = end;
    end += static_cast<uintptr_t>(round_up(bytes, 64));
    return at;
  };
  Memory m;
  m.zeros = reinterpret_cast<float*>(take(pitch * 4));
  m.inputs = reinterpret_cast<float*>(take(kPlaces * (chunk * pitch + 16) * 4));
  m.products = reinterpret_cast<float*>(take(kPlaces * (chunk + 1) * wide * 64));
  m.taps = reinterpret_cast<const float**>(take(chunk * kPlaces * 8));
  m.targets = reinterpret_cast<int64_t*>(take(chunk * 4 * 8));
  m.rows = reinterpret_cast<const void**>(take(kPlaces * chunk * 8));
  m.pixels = reinterpret_cast<int64_t*>(take(kPlaces * chunk * 8));
  m.blocks = reinterpret_cast<TapBlock*>(take(kPlaces * chunk * static_cast<int64_t>(sizeof(TapBlock))));
  m.bytes = static_cast<int64_t>(end - begin);
  return m;
}

class Winograd {
 public:
  Winograd(const Call& c, int32_t thread)
      : kernels_(c.kernels->windows),
        in_(shape_of(c.in[0])),
        out_(shape_of(c.out[0])),
        tiles_(tiles_of(out_)),
        x_(f32_data(c.in[0])),
        weight_(c.in[kWeight].data),
        pads_(c.attrs[kPads].list),
        pitch_(pitch(c)),
        chunk_(chunk_tiles(c)),
        step_(chunk_ * pitch_ + 16),
        m_(memory_at(reinterpret_cast<uintptr_t>(c.thread_scratch + thread * c.thread_scratch_bytes), chunk_, pitch_,
                     kernels_.conv_tiles)) {
    target_.bias = f32_data(c.in[kBias]);
    target_.residual = f32_data(c.in[kResidualInput]);
    target_.y = f32_data(c.out[0]);
    target_.out_channels = out_.channels;
    target_.act = {static_cast<int32_t>(c.attrs[kAct].i), static_cast<float>(c.attrs[kAct + 1].f),
                   static_cast<float>(c.attrs[kAct + 2].f)};
    memset(m_.zeros, 0, static_cast<size_t>(pitch_ * 4));
    for (int64_t at = 0; at < kPlaces; ++at) {
      columns_[at] = at * in_.channels;
      for (int64_t i = 0; i < chunk_; ++i) {
        m_.rows[at * chunk_ + i] = m_.inputs + at * step_ + i * pitch_;
        m_.pixels[at * chunk_ + i] = at * (chunk_ + 1) + i;
      }
    }
  }

  // Transforms the inputs of these tiles.
  void load(int64_t begin, int64_t end) {
    int64_t image = begin / (tiles_.down * tiles_.across), y = begin / tiles_.across % tiles_.down * 2;
    int64_t x = begin % tiles_.across * 2;
    for (int64_t i = 0; i < end - begin; ++i) {
      place_inputs(image, y - pads_[0], x - pads_[1], m_.taps + i * kPlaces);
      place_outputs(image, y, x, m_.targets + i * 4);
      if ((x += 2) < out_.width) continue;
      x = 0;
      if ((y += 2) < out_.height) continue;
      y = 0;
      ++image;
    }
    if (end - begin != count_) fill_blocks(end - begin);
    kernels_.winograd_input(m_.taps, count_, in_.channels, m_.inputs, pitch_, step_);
  }

  // Multiplies them by weight tiles and stores their outputs.
  void multiply(int64_t tile, int64_t tile_end) const {
    const int64_t cols = kPlaces * in_.channels;
    for (; tile < tile_end;) {
      const int64_t wide = tile + kernels_.conv_tiles <= tile_end ? kernels_.conv_tiles : 1;
      ConvArgs product{};
      product.weight = weight_ + tile * cols * 64;
      product.cols = cols;
      product.y = m_.products;
      product.out_channels = product.group_rows = wide * 16;
      product.group_tiles = wide;
      product.group_channels = in_.channels;
      kernels_.conv(product, m_.blocks, num_blocks_, 0, wide);
      for (int64_t i = 0; i < wide; ++i, ++tile)
        kernels_.winograd_output(target_, m_.products + i * 16, wide * 16, (chunk_ + 1) * wide * 16, m_.targets, count_,
                                 tile * 16);
    }
  }

 private:
  // The pixels that the tile at (top, left) reads.
  void place_inputs(int64_t image, int64_t top, int64_t left, const float** tap) const {
    const float* const x = x_ + image * in_.height * in_.width * in_.channels;
    const bool inside = top >= 0 && left >= 0 && top + 4 <= in_.height && left + 4 <= in_.width;
    for (int64_t row = top; row < top + 4; ++row)
      for (int64_t column = left; column < left + 4; ++column) {
        const bool is_pixel = inside || (row >= 0 && row < in_.height && column >= 0 && column < in_.width);
        *tap++ = is_pixel ? x + (row * in_.width + column) * in_.channels : m_.zeros;
      }
  }

  // The pixels that the tile whose first output is (y, x) writes.
  void place_outputs(int64_t image, int64_t y, int64_t x, int64_t* target) const {
    const int64_t first = (image * out_.height + y) * out_.width + x;
    const bool right = x + 1 < out_.width, below = y + 1 < out_.height;
    target[0] = first;
    target[1] = right ? first + 1 : -1;
    target[2] = below ? first + out_.width : -1;
    target[3] = right && below ? first + out_.width + 1 : -1;
  }

  // Divides the products of `count` tiles into blocks.
  void fill_blocks(int64_t count) {
    const int64_t rows = kernels_.conv_rows, parts = (count + rows - 1) / rows;
    TapBlock* block = m_.blocks;
    for (int64_t at = 0; at < kPlaces; ++at)
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = share_begin(count, part, parts), last = share_begin(count, part + 1, parts);
        *block++ = TapBlock{m_.rows + at * chunk_ + first,
                            columns_ + at,
                            m_.pixels + at * chunk_ + first,
                            static_cast<int32_t>(last - first),
                            1,
                            in_.channels};
      }
    count_ = count;
    num_blocks_ = kPlaces * parts;
  }

  const WindowKernels& kernels_;
  const Shape in_, out_;
  const Tiles tiles_;
  const float* const x_;
  const uint8_t* const weight_;
  const int64_t* const pads_;
  const int64_t pitch_, chunk_, step_;
  const Memory m_;
  ConvArgs target_{};
  int64_t columns_[kPlaces];
  int64_t count_ = 0, num_blocks_ = 0;
};

int64_t winograd_items(const Call& c) { return num_chunks(c) * conv_work(c.attrs[kOutChannels].i, 1).tile_groups; }

void run_winograd(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const ConvWork work = conv_work(c.attrs[kOutChannels].i, 1);
  const int64_t count = tiles_of(shape_of(c.out[0])).count, chunks = num_chunks(c);
  Winograd winograd(c, thread);
  for (int64_t item = begin, loaded = -1; item < end; ++item) {
    const int64_t chunk = item / work.tile_groups, tile = item % work.tile_groups * work.tile_step;
    if (chunk != loaded) winograd.load(share_begin(count, chunk, chunks), share_begin(count, chunk + 1, chunks));
    loaded = chunk;
    winograd.multiply(tile, std::min(tile + work.tile_step, work.tiles));
  }
}

constexpr Phase kPhase = {.split = SPLIT_SHARES,
                          .items = winograd_items,
                          .run = run_winograd,
                          .reads_all = operands(0, kResidualInput),
                          .writes_outputs = true};

}  // namespace

ps_status infer_conv_winograd(const Spec* in, AttrValue* attrs, Spec* out) {
  static constexpr int64_t kKernel[2] = {3, 3}, kOnes[2] = {1, 1};
  PS_TRY(expect_f32(in[0], "x", 4, 4));
  PS_TRY(expect_list(attrs[kPads], "pads", 4, 0, kMaxDim));
  if (in[kWeight].layout == PS_ROWS_F32)  // else a depthwise weight of one channel would be taken
    return fail(PS_INVALID_ARGUMENT, "weight: expected layout %s, got %s", layout_name(PS_T16_F32),
                layout_name(PS_ROWS_F32));
  PS_TRY(check_groups(in[0], in[kWeight], in[kBias], ConvGroups{attrs[kOutChannels].i, 1, kPlaces, PS_T16_F32}));
  PS_TRY(parse_activation(&attrs[kAct]));
  const Window w{kKernel, kOnes, attrs[kPads].list, kOnes};
  int64_t dims[4] = {dim(in[0], 0), 0, 0, attrs[kOutChannels].i};
  for (int axis = 0; axis < 2; ++axis) PS_TRY(count_windows(w, axis, dim(in[0], 1 + axis), false, &dims[1 + axis]));
  PS_TRY(set_output(out, PS_F32, 4, dims));
  return in[kResidualInput].kind == OPERAND_NONE ? PS_OK : expect_same(in[kResidualInput], *out, "residual", "output");
}

Phases conv_winograd_phases(const Call&) { return Phases{&kPhase, 1}; }

ps_status conv_winograd_scratch(const Call& c, Scratch* out) {
  out->per_thread = memory_at(0, chunk_tiles(c), pitch(c), c.kernels->windows.conv_tiles).bytes;
  return PS_OK;
}

}  // namespace ps
