// The geometry of weight tiles with integers, T16_I8 and T16_I4G32 of penstock_dev.h: how many rows and columns, how many
// bytes, in which order.  Sizes, packing and kernels all take it from here.
//
// A tile is 16 rows of a weight: their scales first, then lines of 64 bytes that hold 4 bytes of each row.
//   8 bit: a line for each 4 columns.
//   4 bit: for each pair of groups of 32 columns a line of parameters, 2 bytes for a row's step and offset in each group,
//          then 4 lines of nibbles for each group.
// Kernels include this header, so it defines only constants and constexpr functions of internal linkage.
#ifndef PENSTOCK_BASE_TILES_H
#define PENSTOCK_BASE_TILES_H

#include <stdint.h>

namespace ps {
namespace {

constexpr int kTileRows = 16;
constexpr int kRowBytes = 4;  // of a row in a line
constexpr int kLineBytes = kTileRows * kRowBytes;
constexpr int kScaleBytes = kTileRows * 4;  // f32, before the columns

constexpr int kI8LineColumns = kRowBytes;

constexpr int kGroupColumns = 32, kPairColumns = 2 * kGroupColumns;
constexpr int kParameterBytes = kLineBytes;  // of a pair
constexpr int kGroupLines = kGroupColumns / 2 / kRowBytes, kGroupNibbleBytes = kGroupLines * kLineBytes;
constexpr int kPairBytes = kParameterBytes + 2 * kGroupNibbleBytes;
constexpr int kMaxStep = 17, kMaxNibble = 15;

constexpr int64_t num_pairs(int64_t cols) { return (cols + kPairColumns - 1) / kPairColumns; }
constexpr int64_t num_i8_lines(int64_t cols) { return (cols + kI8LineColumns - 1) / kI8LineColumns; }
constexpr int64_t i4_tile_bytes(int64_t cols) { return kScaleBytes + num_pairs(cols) * kPairBytes; }
constexpr int64_t i8_tile_bytes(int64_t cols) { return kScaleBytes + num_i8_lines(cols) * kLineBytes; }

// Where a row of a tile has its scale, and in a pair its step and offset of group 0 or 1; its nibbles of a line.
constexpr int64_t scale_at(int64_t lane) { return lane * 4; }
constexpr int64_t parameters_at(int64_t group, int64_t lane) { return lane * kRowBytes + group % 2 * 2; }
// Byte b, 0 to 15, of a group holds columns b and 16 + b in its low and its high half.
constexpr int64_t nibbles_at(int64_t group) { return kParameterBytes + group % 2 * kGroupNibbleBytes; }
constexpr int64_t byte_at(int64_t b, int64_t lane) { return b / kRowBytes * kLineBytes + lane * kRowBytes + b % kRowBytes; }

}  // namespace
}  // namespace ps

#endif
