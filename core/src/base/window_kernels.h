// The kernels of convolutions, pools, resizing, group norm and recurrent layers (kernels/general/windows.h).  As
// base/kernels.h, which includes it, it defines nothing but types.
#ifndef PENSTOCK_BASE_WINDOW_KERNELS_H
#define PENSTOCK_BASE_WINDOW_KERNELS_H

#include <stdint.h>

namespace ps {

struct Activation {  // a kind of `unary` that a kernel applies to what it stores
  int32_t kind;      // UnaryKind
  float alpha, beta;
};

// A block of output pixels, and for each tap of each pixel the input pixel that it reads.  Taps outside the input read
// zeros, so that all pixels add in the same order.
struct TapBlock {
  const void* const* x;  // [taps][rows]: float, or the int8 of conv_int8
  const int64_t*
      columns;  // [taps] column (depthwise: row) where the weights of a tap begin; null: one tap after another
  const int64_t* pixels;  // [rows] where the output goes
  int32_t rows, taps;
  int64_t channels;  // of a tap
};

struct ConvArgs {
  const uint8_t* weight;  // t16_f32 [groups * padded rows, cols]; of depthwise ones rows_f32 [taps, channels]
  int64_t cols;
  const float* bias;      // [out_channels] or null
  float* y;               // [pixels, out_channels]
  const float* residual;  // as y, added after the bias; or null
  int64_t out_channels;
  int64_t group_rows, group_tiles;  // outputs of a group, tiles of 16 that they take
  int64_t group_channels;           // inputs of a group
  Activation act;
};

// A convolution of int8 x: sums times scales are values, and bias, residual and activation are those of `conv`.  Values
// become int8 again where y is not null.
struct Int8ConvArgs {
  ConvArgs conv;  // weight t16_i8, of depthwise ones rows_f32; y and residual are null where they are int8
  float x_scale, residual_scale;
  const int8_t* residual;  // or null
  int8_t* y;               // or null
  float inverse, least;    // of y: 1 / its scale, and 0 or -127
  bool is_signed;          // x has -127 to 127, else 0 to 127
};

// A step of a recurrent layer: its gates of the input and of the state, `stride` from one to the next, biases added.
struct CellArgs {
  float *x, *h;
  int64_t stride, hidden;
  float* state;  // [hidden]: h
  float* cell;   // [hidden]: c of lstm; of gru r * h
  int32_t linear_before_reset;
};

struct WindowKernels {
  int32_t conv_rows, conv_tiles;  // the most rows of a block of conv, and tiles that are best computed together
  int32_t depthwise_rows;         // the most rows of a block of depthwise
  void (*conv)(const ConvArgs&, const TapBlock* blocks, int64_t num_blocks, int64_t tile_begin, int64_t tile_end);
  void (*depthwise)(const ConvArgs&, const TapBlock&);
  void (*conv_int8)(const Int8ConvArgs&, const TapBlock* blocks, int64_t num_blocks, int64_t tile_begin,
                    int64_t tile_end);
  void (*depthwise_int8)(const Int8ConvArgs&, const TapBlock&);
  // x times `inverse`, rounded half to even, between `least` and 127.
  void (*to_int8)(const float* x, int64_t n, float inverse, float least, int8_t* y);
  void (*from_int8)(const int8_t* x, int64_t n, float scale, float* y);
  // The maximum of n rows; a NaN stays.
  void (*pool_max)(const float* const* x, int64_t n, int64_t channels, float* y);
  // The sum of n rows times their weights (null: 1), a chain in their order, divided by `divisor`.
  void (*weighted_sum)(const float* const* x, const float* weights, int64_t n, int64_t channels, float divisor,
                       float* y);
  // For each column the sum over rows, or of (x - mean)^2 where there is a mean.
  void (*column_sums)(const float* x, int64_t rows, int64_t cols, const float* mean, float* y);
  // (x - mean) * scale + shift, each of them by column
  void (*normalize_columns)(const float* x, int64_t rows, int64_t cols, const float* mean, const float* scale,
                            const float* shift, float* y);
  void (*lstm_cell)(const CellArgs&);  // gates i, o, f, c
  void (*gru_gates)(const CellArgs&);  // gates z, r, h: x becomes z and r, cell is written
  void (*gru_cell)(const CellArgs&);   // state is written
};

}  // namespace ps

#endif
