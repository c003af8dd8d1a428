// The block types of GGUF (T16_Q* of penstock_dev.h): rounding of activations, and unpacking of values to bytes.
#ifndef PENSTOCK_KERNELS_LINEAR_BLOCKS_GGUF_H
#define PENSTOCK_KERNELS_LINEAR_BLOCKS_GGUF_H

namespace ps {
namespace {

PS_INLINE void quantize_group(const float* x, RoundedGroup* out) {
  const RowScale s = row_scale(x, kGroupColumns);
  I16 halves[2];
  PS_UNROLL for (int h = 0; h < 2; ++h) {
    const F16 q = to_int8(f_load(x + 16 * h), s.inverse);
    f_store_i8_n(out->q + 16 * h, q, 16);
    halves[h] = i_from_f(q);
  }
  const int32_t low = lane_sum(halves[0]), high = lane_sum(halves[1]);
  out->half_sums[0] = int16_t(low);
  out->half_sums[1] = int16_t(high);
  out->sum = low + high;
  out->scale = s.scale;
  out->scaled_sum = s.scale * float(out->sum);
}

void quantize_groups(const float* x, int64_t x_stride, int64_t cols, const QuantizedRows& out, int64_t begin,
                     int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    RoundedGroup* const groups = (RoundedGroup*)(out.q + row * out.stride);
    const int64_t count = cols / kGroupColumns;
    for (int64_t g = 0; g < count; ++g) quantize_group(x + row * x_stride + g * kGroupColumns, groups + g);
    if (count % 2) __builtin_memset(groups + count, 0, sizeof(RoundedGroup));
  }
}

// ---- unpacking a group of 32 columns of a tile to bytes and scales -------------------------------------------------

// An unpacked group; each line holds four columns of every row.  A value is (q - zero) * scale + minimum; the first and
// the last 16 columns have their own `step` factor, stored in both 16-bit halves of a row for u8_times. `start`: the
// factors of the sums of the first and the last 16 activations, -zero * step; in Q2_K the factor of the minimum.
// `last_scale`: in NVFP4 the scale of the last 16 columns, `scale` being that of the first.
struct Slot {
  uint8_t q[8 * kLineBytes];
  float scale[16], minimum[16], last_scale[16];
  int16_t step[2][16][2], start[16][2];
};

// Layouts of one or two bits per value, or of five values per byte; one-bit values become 0 and 2.
constexpr bool is_low_bit(int32_t layout) { return layout >= PS_T16_TQ2_0 && layout <= PS_T16_Q1_0; }
PS_INLINE int zero_of(int32_t layout) {
  return layout == PS_T16_MXFP4 || layout == PS_T16_NVFP4 ? 12
         : is_low_bit(layout)                             ? 1
         : layout == PS_T16_Q4_0                          ? 8
         : layout == PS_T16_Q5_0                          ? 16
         : layout == PS_T16_Q6_K                          ? 32
         : layout == PS_T16_Q3_K                          ? 4
                                                          : 0;
}
PS_INLINE bool has_minimum(int32_t layout) {
  return layout == PS_T16_Q4_K || layout == PS_T16_Q5_K || layout == PS_T16_Q4_1 || layout == PS_T16_Q5_1 ||
         layout == PS_T16_Q2_K;
}
PS_INLINE bool has_start(int32_t layout) { return zero_of(layout) || layout == PS_T16_UINT4; }
// Layouts with scales per 16 columns, which multiply the integer sums.
constexpr bool has_halves(int32_t layout) {
  return layout == PS_T16_Q6_K || layout == PS_T16_Q3_K || layout == PS_T16_Q2_K;
}
// Layouts of pairs of groups with f16 scales; those with a line of f16 minimums; those with fifth bits after the
// nibbles.
PS_INLINE bool is_plain_pair(int32_t layout) {
  return layout == PS_T16_Q4_0 || layout == PS_T16_IQ4_NL || layout == PS_T16_Q4_1 || layout == PS_T16_Q5_0 ||
         layout == PS_T16_Q5_1;
}
PS_INLINE bool has_minimum_line(int32_t layout) { return layout == PS_T16_Q4_1 || layout == PS_T16_Q5_1; }
PS_INLINE bool has_fifth_lines(int32_t layout) { return layout == PS_T16_Q5_0 || layout == PS_T16_Q5_1; }

// Moves bit `from` of each byte to bit `to`.  Bits cross bytes: the caller masks the others out.
template <int from, int to>
PS_INLINE I16 moved(I16 x) {
  if constexpr (from > to) return i_srl<from - to>(x);
  else if constexpr (from < to) return i_shl<to - from>(x);
  else return x;
}

// Unpacks line j of nibbles with `count` (0, 1 or 2) higher bits per value: bits[0] for the first 16 columns, bits[1]
// for the last.
template <int count, int j>
PS_INLINE void put_nibble_line(const uint8_t* p, const I16 (&bits)[2], Slot* s) {
  const I16 nibble = i_set(0x0f0f0f0f), mask = i_set(count == 1 ? 0x10101010 : 0x30303030),
            bytes = i_load(p + kLineBytes * j);
  I16 low = bytes & nibble, high = i_srl<4>(bytes) & nibble;
  if constexpr (count > 0) {
    low = low | (moved<count * j, 4>(bits[0]) & mask);
    high = high | (moved<count == 1 ? 4 + j : 2 * j, 4>(bits[1]) & mask);
  }
  i_store(s->q + kLineBytes * j, low);
  i_store(s->q + kLineBytes * (4 + j), high);
}
template <int count>
PS_INLINE void put_nibbles(const uint8_t* p, const I16 (&bits)[2], Slot* s) {
  put_nibble_line<count, 0>(p, bits, s);
  put_nibble_line<count, 1>(p, bits, s);
  put_nibble_line<count, 2>(p, bits, s);
  put_nibble_line<count, 3>(p, bits, s);
}
// Unpacks nibbles with their fifth bits, if the layout has them; the low halves of bytes are for the first columns.
PS_INLINE void put_fifths(const uint8_t* p, const uint8_t* fifths, bool has_fifths, Slot* s) {
  const I16 line = has_fifths ? i_load(fifths) : i_set(0), bits[2] = {line, line};
  if (has_fifths) put_nibbles<1>(p, bits, s);
  else put_nibbles<0>(p, bits, s);
}

// Unpacks two lines of 2-bit values, with a third bit each if `third` is not null.
template <int h, int j>
PS_INLINE void put_pair_line(I16 pairs, I16 bits, bool has_third, Slot* s) {
  I16 v = moved<2 * j, 0>(pairs) & i_set(0x03030303);
  if (has_third) v = v | (moved<4 * h + j, 2>(bits) & i_set(0x04040404));
  i_store(s->q + kLineBytes * (4 * h + j), v);
}
template <int h>
PS_INLINE void put_pair_lines(const uint8_t* p, const uint8_t* third, Slot* s) {
  const I16 pairs = i_load(p + kLineBytes * h), bits = third ? i_load(third) : i_set(0);
  put_pair_line<h, 0>(pairs, bits, third, s);
  put_pair_line<h, 1>(pairs, bits, third, s);
  put_pair_line<h, 2>(pairs, bits, third, s);
  put_pair_line<h, 3>(pairs, bits, third, s);
}
PS_INLINE void put_pairs(const uint8_t* p, const uint8_t* third, Slot* s) {
  put_pair_lines<0>(p, third, s);
  put_pair_lines<1>(p, third, s);
}

// One byte per row of a line.  The load may read past the line, but values always follow it.
PS_INLINE I16 byte_at_place(const uint8_t* line, int64_t place) { return i_load(line + place) & i_set(255); }

// The values of MXFP4 (OCP Microscaling Formats, version 1.0) by nibble, times two plus zero_of.
alignas(16) constexpr int8_t kFloat4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The values of IQ4_NL and IQ4_XS by nibble (kvalues_iq4nl of ggml-common.h).
alignas(16) constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Unpacks nibbles that index a table.
PS_INLINE void put_entries(const uint8_t* nibbles, const int8_t* table, Slot* s) {
  const I16 nibble = i_set(0x0f0f0f0f);
  PS_UNROLL for (int j = 0; j < kGroupLines; ++j) {
    const I16 bytes = i_load(nibbles + kLineBytes * j);
    i_store(s->q + kLineBytes * j, i_table(table, bytes & nibble));
    i_store(s->q + kLineBytes * (4 + j), i_table(table, i_srl<4>(bytes) & nibble));
  }
}

// The k-th line of byte scales after a block's line of f16.
PS_INLINE I16 byte_scale(const uint8_t* block, int64_t k) {
  return byte_at_place(block + kLineBytes + k / kRowBytes * kLineBytes, k % kRowBytes);
}
PS_INLINE I16 pairs_of(I16 low, I16 high) { return (low & i_set(0xffff)) | i_shl<16>(high); }
PS_INLINE I16 with_sign(I16 bytes) { return i_sra<24>(i_shl<24>(bytes)); }

// The scales and zero points of the rows for group g of UINT4.
PS_INLINE F16 scales_of(const uint8_t* block, int64_t g) { return f_load_f16((const uint16_t*)block + 16 * (g % 4)); }
PS_INLINE I16 zeros_of(const uint8_t* block, int64_t g) { return byte_at_place(block + 2 * kLineBytes, g % 4); }

// The addresses of the parameters of group g, and of the values of the group or its pair.
struct GroupPlace { const uint8_t *block, *pair; };
PS_INLINE GroupPlace place_of(int32_t layout, const uint8_t* tile, int64_t g) {
  if (layout == PS_T16_Q8_0 || is_plain_pair(layout)) {
    const int plain = kPairBytes + has_minimum_line(layout) * kLineBytes + has_fifth_lines(layout) * 2 * kFifthBytes;
    const uint8_t* const pair = tile + g / 2 * (layout == PS_T16_Q8_0 ? kQ80PairBytes : plain);
    return {pair, pair};
  }
  if (is_low_bit(layout)) {
    const int groups = layout == PS_T16_Q2_0 ? 4 : 8, bits = layout == PS_T16_Q1_0 ? kLineBytes : kGroupPairBytes;
    if (layout == PS_T16_TQ1_0) {
      const uint8_t* const block = tile + g / 8 * kTq10BlockBytes;
      return {block, block + 2 * kLineBytes + g % 8 / 2 * kTq1PairBytes};
    }
    const uint8_t* const block = tile + g / groups * (kLineBytes + groups * bits);
    return {block, block + kLineBytes + g % groups * bits};
  }
  if (layout == PS_T16_NVFP4) {
    const uint8_t* const block = tile + g / 8 * kNvfp4BlockBytes;
    return {block, block + kQ2KHeadBytes + g % 8 * kGroupNibbleBytes};
  }
  if (layout == PS_T16_IQ4_XS) {
    const uint8_t* const block = tile + g / 8 * kIq4XsBlockBytes;
    return {block, block + kIq4XsHeadBytes + g % 8 * kGroupNibbleBytes};
  }
  if (layout == PS_T16_Q2_K || layout == PS_T16_Q3_K) {
    const int group_bytes = layout == PS_T16_Q2_K ? kGroupPairBytes : kQ3KGroupBytes;
    const uint8_t* const block = tile + g / 8 * (kQ2KHeadBytes + kBlockGroups * group_bytes);
    return {block, block + kQ2KHeadBytes + g % 8 * group_bytes};
  }
  if (layout == PS_T16_MXFP4 || layout == PS_T16_UINT4) {
    const bool zeros = layout == PS_T16_UINT4;
    const uint8_t* const block = tile + g / 4 * (zeros ? kUint4BlockBytes : kMxfp4BlockBytes);
    return {block, block + zeros * (2 * kLineBytes) + g % 4 / 2 * (2 * kGroupNibbleBytes)};
  }
  const int pair_bytes = layout == PS_T16_Q6_K ? kQ6KPairBytes : layout == PS_T16_Q5_K ? kQ5KPairBytes : kPairBytes;
  const int64_t block_bytes = kLineBytes + kBlockPairs * pair_bytes;
  const uint8_t* const block = tile + g / 8 * block_bytes;
  return {block, block + kLineBytes + g % 8 / 2 * pair_bytes};
}

// Unpacks the nibbles of group g.
PS_INLINE const uint8_t* nibbles_of(int32_t layout, const GroupPlace& at, int64_t g) {
  return at.pair + kParameterBytes + has_minimum_line(layout) * kLineBytes + g % 2 * kGroupNibbleBytes;
}

PS_INLINE void put_steps(I16 first, I16 last, int32_t layout, Slot* s) {
  i_store(s->step[0], pairs_of(first, first));
  i_store(s->step[1], pairs_of(last, last));
  const I16 zero = i_set(zero_of(layout)), none = i_set(0);
  i_store(s->start, pairs_of(none - i_mul(first, zero), none - i_mul(last, zero)));
}

// Half of the value of an unsigned e4m3 number, times the scale of its tensor.  Below 8 the byte is a subnormal, a
// multiple of 2^-9; otherwise the exponent moves by the difference of the biases, 120.
PS_INLINE F16 float8_scale(I16 bytes, F16 scale) {
  const F16 number = f_from_i(bytes), normal = f_bits(i_shl<20>(bytes) + i_set(119 << 23));
  return f_select(m_lt(number, f_set(8.f)), number * f_set(0x1p-10f), normal) * scale;
}

template <int j>
PS_INLINE void put_bit_line(I16 bits, Slot* s) {
  i_store(s->q + kLineBytes * j, moved<j, 1>(bits) & i_set(0x02020202));
}

// Unpacks TQ1_0: `count` times the next base-3 digit of each byte, from line `first` on.
template <int first, int count>
PS_INLINE I16 put_trits(I16 bytes, Slot* s) {
  PS_UNROLL for (int j = 0; j < count; ++j) i_store(s->q + kLineBytes * (first + j), i_trits(bytes));
  return bytes;
}
PS_INLINE void put_trit_group(const GroupPlace& at, int64_t g, Slot* s) {
  const uint8_t* const middle = at.pair + kLineBytes;
  put_trits<0, 5>(i_load(at.pair + g % 2 * 2 * kLineBytes), s);
  const I16 rest = put_trits<5, 3>(i_load(middle), s);
  if (g % 2 == 0) return;
  put_trits<5, 2>(rest, s);
  const I16 four = byte_at_place(at.block + kLineBytes, g % 8 / 2);
  const I16 spread = four | i_shl<6>(four) | i_shl<12>(four) | i_shl<18>(four);
  i_store(s->q + kLineBytes * 7, spread & i_set(0x03030303));
}

PS_INLINE void put_nvfp4(const GroupPlace& at, int64_t g, Slot* s) {
  const F16 scale = f_load((const float*)at.block);
  f_store(s->scale, float8_scale(byte_scale(at.block, g % 8 * 2), scale));
  f_store(s->last_scale, float8_scale(byte_scale(at.block, g % 8 * 2 + 1), scale));
  put_entries(at.pair, kFloat4, s);
}

PS_INLINE void put_low_bits(int32_t layout, const GroupPlace& at, int64_t g, Slot* s) {
  const bool has_halves = layout == PS_T16_Q2_0 || layout == PS_T16_Q1_0;
  const int64_t half = layout == PS_T16_Q2_0 ? g % 4 / 2 : g % 8 / 4;
  f_store(s->scale, has_halves ? f_load_f16((const uint16_t*)at.block + 16 * half) : f_load((const float*)at.block));
  if (layout == PS_T16_TQ1_0) return put_trit_group(at, g, s);
  if (layout != PS_T16_Q1_0) return put_pairs(at.pair, nullptr, s);
  const I16 bits = i_load(at.pair);
  put_bit_line<0>(bits, s), put_bit_line<1>(bits, s), put_bit_line<2>(bits, s), put_bit_line<3>(bits, s);
  put_bit_line<4>(bits, s), put_bit_line<5>(bits, s), put_bit_line<6>(bits, s), put_bit_line<7>(bits, s);
}

// Returns the bytes of the group; those of Q8_0 are used in place. `layout` should be a compile-time constant to fold
// the branches.
PS_INLINE const uint8_t* put_group(int32_t layout, const uint8_t* tile, int64_t g, Slot* s) {
  const GroupPlace at = place_of(layout, tile, g);
  const int odd = int(g % 2);
  const uint8_t* const nibbles = nibbles_of(layout, at, g);
  if (zero_of(layout) && !has_halves(layout))
    i_store(s->start, pairs_of(i_set(-zero_of(layout)), i_set(-zero_of(layout))));
  if (layout == PS_T16_Q8_0 || is_plain_pair(layout)) {
    f_store(s->scale, f_load_f16((const uint16_t*)at.pair + 16 * odd));
    if (layout == PS_T16_Q8_0) return at.pair + kParameterBytes + odd * kGroupColumns * kTileRows;
    if (layout == PS_T16_IQ4_NL) return put_entries(nibbles, kIq4, s), s->q;
    const bool has_line = has_minimum_line(layout);
    if (has_line) f_store(s->minimum, f_load_f16((const uint16_t*)(at.pair + kLineBytes) + 16 * odd));
    const uint8_t* const fifths = at.pair + kPairBytes + has_line * kLineBytes + odd * kFifthBytes;
    put_fifths(nibbles, fifths, has_fifth_lines(layout), s);
    return s->q;
  }
  if (layout == PS_T16_MXFP4) {
    f_store(s->scale, f_bits(i_shl<23>(byte_at_place(at.block, g % 4) - i_set(1))));  // 2^(e - 128)
    put_entries(nibbles, kFloat4, s);
    return s->q;
  }
  if (layout == PS_T16_NVFP4) return put_nvfp4(at, g, s), s->q;
  if (is_low_bit(layout)) return put_low_bits(layout, at, g, s), s->q;
  if (layout == PS_T16_IQ4_XS) {
    f_store(s->scale, f_load_f16((const uint16_t*)at.block) * f_from_i(with_sign(byte_scale(at.block, g % 8))));
    put_entries(at.pair, kIq4, s);
    return s->q;
  }
  if (layout == PS_T16_Q2_K || layout == PS_T16_Q3_K) {
    const bool three = layout == PS_T16_Q3_K;
    f_store(s->scale, f_load_f16((const uint16_t*)at.block));
    f_store(s->minimum, f_set(0.f) - f_load_f16((const uint16_t*)at.block + 16));
    const I16 bytes[2] = {byte_scale(at.block, g % 8 * 2), byte_scale(at.block, g % 8 * 2 + 1)};
    if (three) put_steps(with_sign(bytes[0]), with_sign(bytes[1]), layout, s);
    else put_steps(bytes[0] & i_set(15), bytes[1] & i_set(15), layout, s);
    if (!three) i_store(s->start, pairs_of(i_srl<4>(bytes[0]), i_srl<4>(bytes[1])));
    put_pairs(at.pair, three ? at.pair + kGroupPairBytes : nullptr, s);
    return s->q;
  }
  if (layout == PS_T16_UINT4) {
    f_store(s->scale, scales_of(at.block, g));
    const I16 offset = i_set(0) - zeros_of(at.block, g);
    i_store(s->start, pairs_of(offset, offset));
    put_fifths(nibbles, nullptr, false, s);
    return s->q;
  }
  const F16 d = f_load_f16((const uint16_t*)at.block);
  const I16 first = byte_at_place(at.pair, 2 * odd), second = byte_at_place(at.pair, 2 * odd + 1);
  if (layout == PS_T16_Q6_K) {
    f_store(s->scale, d);
    put_steps(with_sign(first), with_sign(second), layout, s);
    const uint8_t* const sixths = at.pair + kPairBytes + odd * kSixthBytes;
    const I16 bits[2] = {i_load(sixths), i_load(sixths + kLineBytes)};
    put_nibbles<2>(nibbles, bits, s);
    return s->q;
  }
  f_store(s->scale, d * f_from_i(first));
  f_store(s->minimum, f_set(0.f) - f_load_f16((const uint16_t*)at.block + 16) * f_from_i(second));
  put_fifths(nibbles, at.pair + kPairBytes + odd * kFifthBytes, layout == PS_T16_Q5_K, s);
  return s->q;
}

template <int32_t layout>
struct Layout {
  static constexpr int32_t value = layout;
};
// Calls f(Layout<layout>{}).
template <class F>
PS_INLINE void with_layout(int32_t layout, F f) {
  switch (layout) {
#define PS_BLOCKS(id, ...)                                                     \
  case PS_T16_##id:                                                            \
    if constexpr (builds_layout(PS_T16_##id)) return f(Layout<PS_T16_##id>{}); \
    break;
#include "base/block_schemes.inc"
  }
}

}  // namespace
}  // namespace ps

#endif
