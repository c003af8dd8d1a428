// Block formats as defined in ggml-common.h and ggml-quants.c of llama.cpp; docs/explanation/bundle-format.md describes
// the tiles.
// Hot: runs for every block of a file.
#include "pack/gguf_blocks.h"

#include <string.h>

#include "base/tiles.h"
#include "penstock_dev.h"

namespace ps {
namespace {

bool is_finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }
bool is_finite_float(const uint8_t* p) { return (p[3] & 0x7f) != 0x7f || !(p[2] & 0x80); }

// {f16 d; i8 q[32]}
bool put_q8_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const pair = tile + index / 2 * kQ80PairBytes;
  uint8_t* const values = pair + kParameterBytes + index % 2 * kGroupColumns * kTileRows;
  memcpy(pair + 32 * (index % 2) + 2 * lane, src, 2);
  for (int64_t k = 0; k < kGroupColumns; k += kRowBytes) memcpy(values + byte_at(k, lane), src + 2 + k, kRowBytes);
  return is_finite_half(src);
}

// Four bytes of one row, processed as one word with masks that keep the bytes apart.
uint32_t load_row(const uint8_t* p) {
  uint32_t row;
  memcpy(&row, p, kRowBytes);
  return row;
}

void store_row(uint32_t row, int64_t lane, uint8_t* line) { memcpy(line + lane * kRowBytes, &row, kRowBytes); }

// The nibbles of a group, at bits `shift`... of its 32 bytes q: columns 0 to 15 are in the low halves.
void put_nibbles(const uint8_t* q, int shift, int64_t lane, uint8_t* lines) {
  for (int64_t j = 0; j < kGroupLines; ++j) {
    const uint32_t low = load_row(q + kRowBytes * j) >> shift & 0x0f0f0f0fu;
    const uint32_t high = load_row(q + 16 + kRowBytes * j) >> shift & 0x0f0f0f0fu;
    store_row(low | high << 4, lane, lines + j * kLineBytes);
  }
}

// Bit `shift` of the 32 bytes q of a group: bit j of byte i is column 4j + i.
void put_bits(const uint8_t* q, int shift, int64_t lane, uint8_t* line) {
  uint32_t bits = 0;
  for (int j = 0; j < 2 * kGroupLines; ++j) bits |= (load_row(q + kRowBytes * j) >> shift & 0x01010101u) << j;
  store_row(bits, lane, line);
}

// One bit of each column of a group, the first in the lowest.  The product moves bit i of four bits to byte i.
void put_packed_bits(uint32_t packed, int64_t lane, uint8_t* line) {
  uint32_t bits = 0;  // as in put_bits
  for (int j = 0; j < 2 * kGroupLines; ++j) bits |= ((packed >> 4 * j & 15) * 0x00204081u & 0x01010101u) << j;
  store_row(bits, lane, line);
}

// Bits `shift` and `shift` + 1 of the 32 bytes q of a group: bits 2j and 2j + 1 of byte i of a half are its column 4j +
// i.
void put_pairs(const uint8_t* q, int shift, int64_t lane, uint8_t* lines) {
  for (int64_t half = 0; half < 2; ++half) {
    uint32_t pairs = 0;
    for (int j = 0; j < kGroupLines; ++j)
      pairs |= (load_row(q + 16 * half + kRowBytes * j) >> shift & 0x03030303u) << 2 * j;
    store_row(pairs, lane, lines + half * kLineBytes);
  }
}

// {f16 d; (with a minimum) f16 m; (with fifth bits) u8 fifth[4]; u8 q[16]}: low halves are the first 16 values, as in a
// tile
template <bool minimum, bool five>
bool put_pair(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  constexpr int kHead = minimum ? 2 * kLineBytes : kLineBytes;
  constexpr int kBytes = kHead + 2 * kGroupNibbleBytes + (five ? 2 * kFifthBytes : 0);
  uint8_t* const pair = tile + index / 2 * kBytes;
  const int64_t odd = index % 2;
  memcpy(pair + 32 * odd + 2 * lane, src, 2);
  if (minimum) memcpy(pair + kLineBytes + 32 * odd + 2 * lane, src + 2, 2);
  const uint8_t* const fifth = src + (minimum ? 4 : 2);
  const uint8_t* const packed = fifth + (five ? 4 : 0);
  uint8_t* const values = pair + kHead + odd * kGroupNibbleBytes;
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), packed + b, kRowBytes);
  if (five) put_packed_bits(load_row(fifth), lane, pair + kHead + 2 * kGroupNibbleBytes + odd * kFifthBytes);
  return is_finite_half(src) && (!minimum || is_finite_half(src + 2));
}

constexpr PutBlock put_q4_0 = put_pair<false, false>, put_q4_1 = put_pair<true, false>,
                   put_q5_0 = put_pair<false, true>, put_q5_1 = put_pair<true, true>, put_iq4_nl = put_q4_0;

// The eight 6-bit scales and minimums in 12 bytes.
void put_scales(const uint8_t* packed, int64_t g, int64_t lane, uint8_t* pair) {
  uint8_t* const parameters = pair + parameters_at(g, lane);
  if (g < 4) {
    parameters[0] = packed[g] & 63;
    parameters[1] = packed[g + 4] & 63;
  } else {
    parameters[0] = static_cast<uint8_t>((packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4);
    parameters[1] = static_cast<uint8_t>(packed[g + 4] >> 4 | (packed[g] >> 6) << 4);
  }
}

// {f16 d, dmin; u8 scales[12]; (Q5_K) u8 fifth[32]; u8 q[128]}: 32 bytes of q hold two groups, the first in the low
// halves
template <bool five>
bool put_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  constexpr int kPair = five ? kQ5KPairBytes : kPairBytes;
  uint8_t* const block = tile + index * (five ? kQ5KBlockBytes : kQ4KBlockBytes);
  memcpy(block + 2 * lane, src, 2);
  memcpy(block + 32 + 2 * lane, src + 2, 2);
  const uint8_t* const fifth = src + 16;
  const uint8_t* const packed = src + (five ? 48 : 16);
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    uint8_t* const pair = block + kLineBytes + g / 2 * kPair;
    put_scales(src + 4, g, lane, pair);
    put_nibbles(packed + g / 2 * kGroupColumns, 4 * static_cast<int>(g % 2), lane, pair + nibbles_at(g));
    if (five) put_bits(fifth, static_cast<int>(g), lane, pair + kPairBytes + g % 2 * kFifthBytes);
  }
  return is_finite_half(src) && is_finite_half(src + 2);
}

constexpr PutBlock put_q4_k = put_k<false>, put_q5_k = put_k<true>;

// {u8 low[128]; u8 high[64]; i8 scales[16]; f16 d}: of each 128 values 64 bytes of low halves and 32 of two bits
bool put_q6_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kQ6KBlockBytes;
  memcpy(block + 2 * lane, src + 208, 2);
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    uint8_t* const pair = block + kLineBytes + g / 2 * kQ6KPairBytes;
    const int64_t half = g / 4, quarter = g % 4;
    memcpy(pair + parameters_at(g, lane), src + 192 + 2 * g, 2);
    put_nibbles(src + half * 64 + g % 2 * kGroupColumns, quarter < 2 ? 0 : 4, lane, pair + nibbles_at(g));
    put_pairs(src + 128 + half * kGroupColumns, 2 * static_cast<int>(quarter), lane,
              pair + kPairBytes + g % 2 * kSixthBytes);
  }
  return is_finite_half(src + 208);
}

// {u8 e; u8 q[16]}: nibbles as in Q4_0.  Kernels build 2^(e - 128) from the exponent's bits, so it must be normal, and
// the largest value finite; for a group of zeros any e gives the same values.
bool put_mxfp4(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 4 * kMxfp4BlockBytes;
  uint8_t* const values = block + kLineBytes + index % 4 * kGroupNibbleBytes;
  bool zeros = true;
  for (int64_t b = 0; b < kGroupColumns / 2; ++b) zeros = zeros && !(src[1 + b] & 0x77);
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 1 + b, kRowBytes);
  block[lane * kRowBytes + index % 4] = zeros ? 2 : src[0];
  return zeros || (src[0] >= 2 && src[0] <= 252);
}

// {f16 d; u8 zero; u8 q[16]}: nibbles as in Q4_0.  Not a GGUF type: 4-bit integers of GPTQ, AWQ and compressed-tensors.
bool put_uint4(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 4 * kUint4BlockBytes;
  uint8_t* const values = block + 3 * kLineBytes + index % 4 * kGroupNibbleBytes;
  memcpy(block + 32 * (index % 4) + 2 * lane, src, 2);
  block[2 * kLineBytes + lane * kRowBytes + index % 4] = src[2];
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 3 + b, kRowBytes);
  return is_finite_half(src) && src[2] <= 16;
}

// The scale of the k-th 32 or 16 columns of a block: byte k % 4 of line k / 4.
void put_byte_scale(int64_t k, int value, int64_t lane, uint8_t* lines) {
  lines[k / kRowBytes * kLineBytes + lane * kRowBytes + k % kRowBytes] = static_cast<uint8_t>(value);
}

// {f16 d; u16 high; u8 low[4]; u8 q[128]}: scales of 6 bits less 32, two bits of each in `high`; nibbles as of Q4_0
bool put_iq4_xs(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kIq4XsBlockBytes;
  memcpy(block + 2 * lane, src, 2);
  const int high = src[2] | src[3] << 8;
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    const int low = g % 2 ? src[4 + g / 2] >> 4 : src[4 + g / 2] & 15;
    put_byte_scale(g, (low | (high >> 2 * g & 3) << 4) - 32, lane, block + kLineBytes);
    uint8_t* const values = block + kIq4XsHeadBytes + g * kGroupNibbleBytes;
    const uint8_t* const packed = src + 8 + 16 * g;
    for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), packed + b, kRowBytes);
  }
  return is_finite_half(src);
}

// The 2-bit values of group g of a block: in each 32 bytes, the lowest pairs are 32 columns, then the next pairs.
void put_group_pairs(const uint8_t* packed, int64_t g, int64_t lane, uint8_t* lines) {
  put_pairs(packed + g / 4 * kGroupColumns, 2 * static_cast<int>(g % 4), lane, lines);
}

// {u8 scales[16]; u8 q[64]; f16 d, dmin}: for 16 columns, the scale is the low half of a byte, the minimum the high
// half
bool put_q2_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kQ2KBlockBytes;
  memcpy(block + 2 * lane, src + 80, 2);
  memcpy(block + 32 + 2 * lane, src + 82, 2);
  for (int64_t k = 0; k < 16; ++k) put_byte_scale(k, src[k], lane, block + kLineBytes);
  for (int64_t g = 0; g < kBlockGroups; ++g)
    put_group_pairs(src + 16, g, lane, block + kQ2KHeadBytes + g * kGroupPairBytes);
  return is_finite_half(src + 80) && is_finite_half(src + 82);
}

// {u8 third[32]; u8 q[64]; u8 scales[12]; f16 d}: scales of 6 bits less 32, the low four bits first
bool put_q3_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kQ3KBlockBytes;
  memcpy(block + 2 * lane, src + 108, 2);
  const uint8_t* const packed = src + 96;
  for (int64_t k = 0; k < 16; ++k) {
    const int low = k < 8 ? packed[k] & 15 : packed[k - 8] >> 4, high = packed[8 + k % 4] >> 2 * (k / 4) & 3;
    put_byte_scale(k, (low | high << 4) - 32, lane, block + kLineBytes);
  }
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    uint8_t* const lines = block + kQ2KHeadBytes + g * kQ3KGroupBytes;
    put_group_pairs(src + 32, g, lane, lines);
    put_bits(src, static_cast<int>(g), lane, lines + kGroupPairBytes);
  }
  return is_finite_half(src + 108);
}

// {f32 d; u8 s[2]; u8 q[16]}: nibbles as in Q4_0; s is e4m3 without a sign.  Every block repeats d.
bool put_nvfp4(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / kBlockGroups * kNvfp4BlockBytes;
  const int64_t g = index % kBlockGroups;
  uint8_t* const values = block + kQ2KHeadBytes + g * kGroupNibbleBytes;
  memcpy(block + scale_at(lane), src, 4);
  for (int64_t h = 0; h < 2; ++h) put_byte_scale(2 * g + h, src[4 + h], lane, block + kLineBytes);
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 6 + b, kRowBytes);
  return is_finite_float(src) && src[4] < 0x7f && src[5] < 0x7f;
}

// {f32 d; u8 q[64]}: 2-bit values as in Q2_K.  GGUF stores d as f16 after them; BitNet checkpoints have other scales.
bool put_tq2_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kTq20BlockBytes;
  memcpy(block + scale_at(lane), src, 4);
  for (int64_t g = 0; g < kBlockGroups; ++g)
    put_group_pairs(src + 4, g, lane, block + kLineBytes + g * kGroupPairBytes);
  return is_finite_float(src);
}

// The value 0, 1 or 2 of a column in the 52 bytes of TQ1_0: a byte encodes five as base-3 digits, scaled by 256 / 243.
int ternary_of(const uint8_t* packed, int column) {
  static const uint8_t powers[] = {1, 3, 9, 27, 81};
  const int digit = column < 160 ? column / 32 : column < 240 ? (column - 160) / 16 : (column - 240) / 4;
  const int byte = column < 160 ? column % 32 : column < 240 ? 32 + column % 16 : 48 + column % 4;
  return static_cast<uint8_t>(packed[byte] * powers[digit]) * 3 >> 8;
}

// {f32 d; u8 q[52]}: a byte of a tile has the values of five columns, four apart, the first in its highest digit.
bool put_tq1_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kTq10BlockBytes;
  memcpy(block + scale_at(lane), src, 4);
  for (int pair = 0; pair < kBlockPairs; ++pair)
    for (int i = 0; i < kRowBytes; ++i) {
      // Lines 0 and 2 begin the groups of the pair; line 1 has what follows in the first, then in the second.
      static const uint8_t starts[] = {0, 5, 8};
      for (int line = 0; line < 3; ++line) {
        int number = 0;
        for (int n = 0; n < 5; ++n) {
          const int quad = line == 1 && n > 2 ? 10 + n : starts[line] + n;
          number = 3 * number + ternary_of(src + 4, kPairColumns * pair + kRowBytes * quad + i);
        }
        uint8_t* const lines = block + 2 * kLineBytes + pair * kTq1PairBytes + line * kLineBytes;
        lines[lane * kRowBytes + i] = static_cast<uint8_t>((number * 256 + 242) / 243 - 128);
      }
      const int last = ternary_of(src + 4, kPairColumns * pair + kRowBytes * 15 + i);
      uint8_t* const rest = block + kLineBytes + lane * kRowBytes + pair;
      *rest = static_cast<uint8_t>((i ? *rest : 0) | last << 2 * i);
    }
  return is_finite_float(src);
}

// {f16 d; u8 q[16]}: two bits of each column in turn
bool put_q2_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 2 * kQ20BlockBytes;
  memcpy(block + 32 * (index % 2) + 2 * lane, src, 2);
  for (int64_t line = 0; line < 4; ++line) {
    uint32_t pairs = 0;
    for (int j = 0; j < kGroupLines; ++j) {
      const uint32_t four = src[2 + kGroupLines * line + j];
      pairs |= ((four | four << 6 | four << 12 | four << 18) & 0x03030303u) << 2 * j;
    }
    store_row(pairs, lane, block + kLineBytes + (index % 2 * 4 + line) * kLineBytes);
  }
  return is_finite_half(src);
}

// {f16 d; u8 q[16]}: a bit of each column in turn
bool put_q1_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 2 * kQ10BlockBytes;
  memcpy(block + 32 * (index % 2) + 2 * lane, src, 2);
  for (int64_t g = 0; g < 4; ++g)
    put_packed_bits(load_row(src + 2 + kRowBytes * g), lane, block + kLineBytes + (index % 2 * 4 + g) * kLineBytes);
  return is_finite_half(src);
}

}  // namespace

BlockFormat block_format(int32_t layout) {
  switch (layout) {
#define PS_BLOCKS(id, name, columns, bytes, ...) \
  case PS_T16_##id: return {columns, bytes, put_##name};
#include "base/block_schemes.inc"
    default: return {};
  }
}

}  // namespace ps
