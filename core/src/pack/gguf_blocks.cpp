// Block formats as ggml-common.h and ggml-quants.c of llama.cpp define them; docs/explanation/bundle-format.md has the tiles.
#include "pack/gguf_blocks.h"

#include <string.h>

#include "base/tiles.h"
#include "penstock_dev.h"

namespace ps {
namespace {

bool is_finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

// {f16 d; i8 q[32]}
bool put_q8_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const pair = tile + index / 2 * kQ80PairBytes;
  uint8_t* const values = pair + kParameterBytes + index % 2 * kGroupColumns * kTileRows;
  memcpy(pair + 32 * (index % 2) + 2 * lane, src, 2);
  for (int64_t k = 0; k < kGroupColumns; k += kRowBytes) memcpy(values + byte_at(k, lane), src + 2 + k, kRowBytes);
  return is_finite_half(src);
}

// {f16 d; u8 q[16]}: low halves are the first 16 values, as in a tile
bool put_q4_0(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const pair = tile + index / 2 * kPairBytes;
  uint8_t* const values = pair + nibbles_at(index);
  memcpy(pair + 32 * (index % 2) + 2 * lane, src, 2);
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 2 + b, kRowBytes);
  return is_finite_half(src);
}

// Group g of a block whose values are q [256]: the low four bits of each.
void put_nibbles(const uint8_t* q, int64_t g, int64_t lane, uint8_t* pair) {
  uint8_t* const nibbles = pair + nibbles_at(g);
  for (int64_t b = 0; b < kGroupColumns / 2; ++b) {
    const int low = q[g * kGroupColumns + b] & 15, high = q[g * kGroupColumns + 16 + b] & 15;
    nibbles[byte_at(b, lane)] = static_cast<uint8_t>(low | high << 4);
  }
}

// The eight scales and minimums of 6 bits in 12 bytes.
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

// {f16 d, dmin; u8 scales[12]; (Q5_K) u8 fifth[32]; u8 q[128]}: 32 bytes of q hold two groups, the first in the low halves
template <bool five>
bool put_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  constexpr int kPair = five ? kQ5KPairBytes : kPairBytes;
  uint8_t* const block = tile + index * (five ? kQ5KBlockBytes : kQ4KBlockBytes);
  memcpy(block + 2 * lane, src, 2);
  memcpy(block + 32 + 2 * lane, src + 2, 2);
  const uint8_t* const fifth = src + 16;
  const uint8_t* const packed = src + (five ? 48 : 16);
  uint8_t q[kBlockColumns];
  for (int64_t k = 0; k < kBlockColumns; ++k) {
    const int byte = packed[k / 64 * 32 + k % 32], nibble = k % 64 < 32 ? byte & 15 : byte >> 4;
    q[k] = static_cast<uint8_t>(nibble | (five ? (fifth[k % 32] >> k / 32 & 1) << 4 : 0));
  }
  for (int64_t g = 0; g < kBlockColumns / kGroupColumns; ++g) {
    uint8_t* const pair = block + kLineBytes + g / 2 * kPair;
    put_scales(src + 4, g, lane, pair);
    put_nibbles(q, g, lane, pair);
    if (!five) continue;
    uint8_t* const bits = pair + kPairBytes + g % 2 * kFifthBytes + lane * kRowBytes;
    for (int64_t i = 0; i < kRowBytes; ++i) {
      int byte = 0;
      for (int64_t j = 0; j < kGroupLines; ++j) {
        const uint8_t* const at = q + g * kGroupColumns + kRowBytes * j + i;
        byte |= (at[0] >> 4) << j | (at[16] >> 4) << (4 + j);
      }
      bits[i] = static_cast<uint8_t>(byte);
    }
  }
  return is_finite_half(src) && is_finite_half(src + 2);
}

// {u8 low[128]; u8 high[64]; i8 scales[16]; f16 d}: of each 128 values 64 bytes of low halves and 32 of two bits
bool put_q6_k(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index * kQ6KBlockBytes;
  memcpy(block + 2 * lane, src + 208, 2);
  uint8_t q[kBlockColumns];
  for (int64_t k = 0; k < kBlockColumns; ++k) {
    const int64_t half = k / 128, i = k % 128;
    const int byte = src[half * 64 + i % 64], nibble = i < 64 ? byte & 15 : byte >> 4;
    q[k] = static_cast<uint8_t>(nibble | (src[128 + half * 32 + i % 32] >> 2 * (i / 32) & 3) << 4);
  }
  for (int64_t g = 0; g < kBlockColumns / kGroupColumns; ++g) {
    uint8_t* const pair = block + kLineBytes + g / 2 * kQ6KPairBytes;
    memcpy(pair + parameters_at(g, lane), src + 192 + 2 * g, 2);
    put_nibbles(q, g, lane, pair);
    for (int64_t half = 0; half < 2; ++half) {
      uint8_t* const bits = pair + kPairBytes + g % 2 * kSixthBytes + half * kLineBytes + lane * kRowBytes;
      for (int64_t i = 0; i < kRowBytes; ++i) {
        int byte = 0;
        for (int64_t j = 0; j < kGroupLines; ++j) byte |= (q[g * kGroupColumns + 16 * half + kRowBytes * j + i] >> 4) << 2 * j;
        bits[i] = static_cast<uint8_t>(byte);
      }
    }
  }
  return is_finite_half(src + 208);
}

// {u8 e; u8 q[16]}: nibbles as of Q4_0.  Kernels make 2^(e - 128) of its exponent's bits, so it is a normal number, and the
// largest value is finite; of a group of zeros any e has the same values.
bool put_mxfp4(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 4 * kMxfp4BlockBytes;
  uint8_t* const values = block + kLineBytes + index % 4 * kGroupNibbleBytes;
  bool zeros = true;
  for (int64_t b = 0; b < kGroupColumns / 2; ++b) zeros = zeros && !(src[1 + b] & 0x77);
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 1 + b, kRowBytes);
  block[lane * kRowBytes + index % 4] = zeros ? 2 : src[0];
  return zeros || (src[0] >= 2 && src[0] <= 252);
}

// {f16 d; u8 zero; u8 q[16]}: nibbles as of Q4_0.  No type of GGUF: 4-bit integers of GPTQ, AWQ and compressed-tensors.
bool put_uint4(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile) {
  uint8_t* const block = tile + index / 4 * kUint4BlockBytes;
  uint8_t* const values = block + 3 * kLineBytes + index % 4 * kGroupNibbleBytes;
  memcpy(block + 32 * (index % 4) + 2 * lane, src, 2);
  block[2 * kLineBytes + lane * kRowBytes + index % 4] = src[2];
  for (int64_t b = 0; b < kGroupColumns / 2; b += kRowBytes) memcpy(values + byte_at(b, lane), src + 3 + b, kRowBytes);
  return is_finite_half(src) && src[2] <= 16;
}

}  // namespace

BlockFormat block_format(int32_t layout) {
  switch (layout) {
    case PS_T16_Q8_0: return {kGroupColumns, 34, put_q8_0};
    case PS_T16_Q4_0: return {kGroupColumns, 18, put_q4_0};
    case PS_T16_Q4_K: return {kBlockColumns, 144, put_k<false>};
    case PS_T16_Q5_K: return {kBlockColumns, 176, put_k<true>};
    case PS_T16_MXFP4: return {kGroupColumns, 17, put_mxfp4};
    case PS_T16_UINT4: return {kGroupColumns, 19, put_uint4};
    default: return {kBlockColumns, 210, put_q6_k};
  }
}

}  // namespace ps
