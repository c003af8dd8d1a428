// Shared by conv and conv_transpose: blocks of output pixels, and the tables of the input pixels that they read.
#ifndef PENSTOCK_GENERAL_CONV_H
#define PENSTOCK_GENERAL_CONV_H

#include "general/window.h"

namespace ps {

// The tensors of a convolution.
struct Shape { int64_t images, height, width, channels; };
inline Shape shape_of(const Tensor& t) { return Shape{t.dims[0], t.dims[1], t.dims[2], t.dims[3]}; }

// The work of a convolution: chunks of output pixels times groups of weight tiles.  A chunk's table of input pixels
// serves all its tiles, and a tile's weights stay in a cache for all blocks of a chunk.
struct ConvWork {
  int64_t group_rows, group_tiles, tiles;
  int64_t tile_step, tile_groups;  // tiles of an item
};
ConvWork conv_work(int64_t out_channels, int64_t groups);
constexpr int64_t kChunkBlocks = 16;
int64_t blocks_of_chunk(int64_t taps);

// The memory of a thread: zeros that taps outside the image read, and the blocks of a chunk.
struct ConvMemory {
  const void* zeros;
  int64_t* offsets;  // [taps]
  const void** taps;
  int64_t* pixels;
  TapBlock* blocks;
};
ps_status conv_memory_bytes(int64_t zeros, int64_t taps, int64_t rows, int64_t* out);
ConvMemory conv_memory(const Call& c, int32_t thread, int64_t zeros, int64_t taps, int64_t rows);

// The checks of weight, bias and groups that conv and conv_transpose share.
struct ConvGroups {
  int64_t out_channels, groups, taps;
  int32_t layout;  // of a weight that is not depthwise
};
ps_status check_groups(const Spec& x, const Spec& w, const Spec& bias, const ConvGroups& g);

// Returns the kernel arguments of conv_int8.  Only `conv` is set if x is float32.
Int8ConvArgs int8_conv_args(const Call& c);

// Depthwise convolutions of int8.
Phases depthwise_int8_phases();
ps_status depthwise_int8_scratch(const Call& c, Scratch* out);

}  // namespace ps

#endif
