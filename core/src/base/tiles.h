// The geometry of the weight tiles of T16_I8, T16_I4G32 and T16_Q* of penstock_dev.h: rows, columns, bytes and order.
// Size computation, packing and kernels all use it.
//
// A tile is 16 rows of a weight: first their scales, then lines of 64 bytes that hold 4 bytes of each row.
//   - 8 bit: a line for each 4 columns.
//   - 4 bit: for each pair of groups of 32 columns a line of parameters, 2 bytes for a row's step and offset in each
//     group, then 4 lines of nibbles for each group.
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

// GGUF's blocks.  A pair of groups of 32 columns has 4 bytes of parameters for each row (two f16 scales, or four bytes
// of scales), then its values; 256 columns of the K types begin with a line of f16 scales.
constexpr int kBlockColumns = 256, kBlockPairs = kBlockColumns / kPairColumns;
constexpr int kQ80PairBytes = kParameterBytes + kPairColumns * kTileRows;
constexpr int kFifthBytes = kLineBytes;      // of a group: the fifth bits of Q5_K
constexpr int kSixthBytes = 2 * kLineBytes;  // of a group: the fifth and sixth bits of Q6_K
constexpr int kQ5KPairBytes = kPairBytes + 2 * kFifthBytes, kQ6KPairBytes = kPairBytes + 2 * kSixthBytes;
constexpr int kQ4KBlockBytes = kLineBytes + kBlockPairs * kPairBytes;
constexpr int kQ5KBlockBytes = kLineBytes + kBlockPairs * kQ5KPairBytes;
constexpr int kQ6KBlockBytes = kLineBytes + kBlockPairs * kQ6KPairBytes;
// Four groups of 32 columns.  MXFP4: a line of exponents, one byte per group and row, then the nibbles.  UINT4: two
// lines of f16 scales, a line of zero points, one byte per group and row, then the nibbles.
constexpr int kQuadColumns = 4 * kGroupColumns, kMxfp4BlockBytes = kLineBytes + 4 * kGroupNibbleBytes;
constexpr int kUint4BlockBytes = 3 * kLineBytes + 4 * kGroupNibbleBytes;
// Pairs of groups with a second line of f16 (minimums), with fifth bits after the nibbles, or with both.
constexpr int kQ41PairBytes = kPairBytes + kLineBytes, kQ50PairBytes = kPairBytes + 2 * kFifthBytes;
constexpr int kQ51PairBytes = kQ41PairBytes + 2 * kFifthBytes;
// Blocks of 256 columns with a line of f16, then byte scales for each 32 or 16 columns of a row, then eight groups of
// nibbles, of 2-bit values, or of 2-bit values and third bits.
constexpr int kBlockGroups = kBlockColumns / kGroupColumns, kGroupPairBytes = 2 * kLineBytes, kThirdBytes = kLineBytes;
constexpr int kIq4XsHeadBytes = 3 * kLineBytes, kIq4XsBlockBytes = kIq4XsHeadBytes + kBlockGroups * kGroupNibbleBytes;
constexpr int kQ2KHeadBytes = 5 * kLineBytes, kQ2KBlockBytes = kQ2KHeadBytes + kBlockGroups * kGroupPairBytes;
constexpr int kQ3KGroupBytes = kGroupPairBytes + kThirdBytes;
constexpr int kQ3KBlockBytes = kQ2KHeadBytes + kBlockGroups * kQ3KGroupBytes;
// NVFP4: a line of f32 scales, then e4m3 scales, one byte per 16 columns of a row, then the nibbles.
constexpr int kNvfp4BlockBytes = kQ2KHeadBytes + kBlockGroups * kGroupNibbleBytes;
// Low-bit values after a line of scales: f32 for 256 columns (TQ2_0, TQ1_0), two f16 for 128 (Q2_0) or for 256 (Q1_0).
// TQ1_0 has a line with two bits of each remaining value, then three lines for each pair of groups.
constexpr int kTq20BlockBytes = kLineBytes + kBlockGroups * kGroupPairBytes;
constexpr int kTq1PairBytes = 3 * kLineBytes, kTq10BlockBytes = 2 * kLineBytes + kBlockPairs * kTq1PairBytes;
constexpr int kQ20BlockBytes = kLineBytes + 4 * kGroupPairBytes;
constexpr int kQ10BlockBytes = kLineBytes + kBlockGroups * kLineBytes;

constexpr int64_t num_pairs(int64_t cols) { return (cols + kPairColumns - 1) / kPairColumns; }
constexpr int64_t num_i8_lines(int64_t cols) { return (cols + kI8LineColumns - 1) / kI8LineColumns; }
constexpr int64_t i4_tile_bytes(int64_t cols) { return kScaleBytes + num_pairs(cols) * kPairBytes; }
constexpr int64_t i8_tile_bytes(int64_t cols) { return kScaleBytes + num_i8_lines(cols) * kLineBytes; }

// Offsets of a row in a tile: of its scale, of its step and offset for group 0 or 1 of a pair, of its nibbles in a
// line.
constexpr int64_t scale_at(int64_t lane) { return lane * 4; }
constexpr int64_t parameters_at(int64_t group, int64_t lane) { return lane * kRowBytes + group % 2 * 2; }
// Byte b, 0 to 15, of a group holds column b in its low half and column 16 + b in its high half.
constexpr int64_t nibbles_at(int64_t group) { return kParameterBytes + group % 2 * kGroupNibbleBytes; }
constexpr int64_t byte_at(int64_t b, int64_t lane) {
  return b / kRowBytes * kLineBytes + lane * kRowBytes + b % kRowBytes;
}

}  // namespace
}  // namespace ps

#endif
