// The kernels of convolutions, pools, resizing, group norm and recurrent layers (kernels/general/windows.h).  Like
// base/kernels.h, which includes it, this header defines only types.
#ifndef PENSTOCK_BASE_WINDOW_KERNELS_H
#define PENSTOCK_BASE_WINDOW_KERNELS_H

#include <stdint.h>

namespace ps {

struct Activation {  // a kind of `unary` that a kernel applies before it stores
  int32_t kind;      // UnaryKind
  float alpha, beta;
};

// A block of output pixels, and for each tap of each pixel the input pixel that it reads.  Taps outside the input read
// zeros, so that all pixels add in the same order.
struct TapBlock {
  const void* const* x;    // [taps][rows]: float, or int8 for conv_int8
  const int64_t* columns;  // [taps] first weight column (depthwise: row) of a tap; null: in order of the taps
  const int64_t* pixels;   // [rows] output pixels
  int32_t rows, taps;
  int64_t channels;  // per tap
};

struct ConvArgs {
  const uint8_t* weight;  // t16_f32 [groups * padded rows, cols]; depthwise: rows_f32 [taps, channels]
  int64_t cols;
  const float* bias;      // [out_channels] or null
  float* y;               // [pixels, out_channels]
  const float* residual;  // like y, added after the bias; or null
  int64_t out_channels;
  int64_t group_rows, group_tiles;  // outputs of a group; tiles of 16 that they fill
  int64_t group_channels;           // inputs of a group
  Activation act;
};

// A convolution of int8 x.  Sums times scales give values; bias, residual and activation are those of `conv`.  Values
// are rounded to int8 again if y is not null.
struct Int8ConvArgs {
  ConvArgs conv;  // weight t16_i8, depthwise: rows_f32; y and residual are null if they are int8
  float x_scale, residual_scale;
  const int8_t* residual;  // or null
  int8_t* y;               // or null
  float inverse, least;    // 1 / the scale of y, and the minimum of y, 0 or -127
  bool is_signed;          // whether x is -127 to 127 or 0 to 127
};

// Pixels of an output row of a depthwise convolution, sixteen channels of them or the last ones.  The input was widened
// to float [16] for each pixel, with the pads as zeros.
struct Int8DepthwiseRow {
  const float* const* rows;  // [height] of the input, from the first tap of the first pixel on
  const float* weight;       // [height * width, 16]
  int64_t height, width;
  int64_t pixel_step, tap_step;  // in floats
  int64_t pixel, count;          // the first output pixel and their number
  int64_t channel;
};

// A step of a recurrent layer: the gates of the input and of the state, with biases, `stride` apart.
struct CellArgs {
  float *x, *h;
  int64_t stride, hidden;
  float* state;  // [hidden]: h
  float* cell;   // [hidden]: c of lstm; of gru r * h
  int32_t linear_before_reset;
};

struct WindowKernels {
  int32_t conv_rows, conv_tiles;  // the maximum rows of a block of conv, and the best number of tiles to compute
                                  // together
  int32_t depthwise_rows;         // the maximum rows of a block of depthwise
  void (*conv)(const ConvArgs&, const TapBlock* blocks, int64_t num_blocks, int64_t tile_begin, int64_t tile_end);
  void (*depthwise)(const ConvArgs&, const TapBlock&);
  // Transforms each tile [16] of pointers to pixels to B^T d B.  Place j of tile i goes to y + i * pitch + j * step.
  void (*winograd_input)(const float* const* x, int64_t count, int64_t channels, float* y, int64_t pitch, int64_t step);
  // Transforms each tile to A^T m A, and stores with bias, residual and activation those of its four `targets` that are
  // not -1.  Place j of tile i lies at m + i * pitch + j * step.  Outputs are sixteen columns.
  void (*winograd_output)(const ConvArgs&, const float* m, int64_t pitch, int64_t step, const int64_t* targets,
                          int64_t count, int64_t column);
  void (*conv_int8)(const Int8ConvArgs&, const TapBlock* blocks, int64_t num_blocks, int64_t tile_begin,
                    int64_t tile_end);
  void (*depthwise_int8)(const Int8ConvArgs&, const Int8DepthwiseRow&);
  // Widens n channels of each pixel to float [16].  Pixels lie `channels` bytes apart.
  void (*widen_pixels)(const int8_t* x, int64_t pixels, int64_t channels, int n, float* y);
  // x times `inverse`, rounded half to even, clamped to `least`...127.
  void (*to_int8)(const float* x, int64_t n, float inverse, float least, int8_t* y);
  void (*from_int8)(const int8_t* x, int64_t n, float scale, float* y);
  // The maximum of n rows; NaN propagates.
  void (*pool_max)(const float* const* x, int64_t n, int64_t channels, float* y);
  // The sum of n rows times their weights (null: 1), added in order, divided by `divisor`.
  void (*weighted_sum)(const float* const* x, const float* weights, int64_t n, int64_t channels, float divisor,
                       float* y);
  // Sums each column over the rows, or (x - mean)^2 if mean is not null.
  void (*column_sums)(const float* x, int64_t rows, int64_t cols, const float* mean, float* y);
  // (x - mean) * scale + shift, each per column
  void (*normalize_columns)(const float* x, int64_t rows, int64_t cols, const float* mean, const float* scale,
                            const float* shift, float* y);
  void (*lstm_cell)(const CellArgs&);  // gates i, o, f, c
  void (*gru_gates)(const CellArgs&);  // gates z, r, h: overwrites x by z and r, writes cell
  void (*gru_cell)(const CellArgs&);   // writes state
};

}  // namespace ps

#endif
