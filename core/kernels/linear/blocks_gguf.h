// Linear with the blocks of GGUF (T16_Q* of penstock_dev.h).  Activations are rounded to int8 in groups of 32 columns, each
// with its own scale.  Of each group the integers are summed exactly, and one fused multiply-add per scale (for Q4_K and
// Q5_K a second one for the minimum) adds them to the output, groups ascending: every level computes the same bits.
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
  out->low_sum = lane_sum(halves[0]);
  out->sum = out->low_sum + lane_sum(halves[1]);
  out->scale = s.scale;
  out->scaled_sum = s.scale * float(out->sum);
}

void quantize_groups(const float* x, int64_t x_stride, int64_t cols, const QuantizedRows& out, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    RoundedGroup* const groups = (RoundedGroup*)(out.q + row * out.stride);
    const int64_t count = cols / kGroupColumns;
    for (int64_t g = 0; g < count; ++g) quantize_group(x + row * x_stride + g * kGroupColumns, groups + g);
    if (count % 2) __builtin_memset(groups + count, 0, sizeof(RoundedGroup));
  }
}

// ---- a group of 32 columns of a tile, put into bytes and scales ---------------------------------------------------------

// Four columns of each row a line; a value is (q - zero) * scale + minimum, in the first and last 16 columns times `half`.
// Of UINT4 half[0] has the zero points; of Q2_K `half` has a scale in its low four bits, and above them what multiplies the
// minimum.
struct Slot {
  uint8_t q[8 * kLineBytes];
  float scale[16], minimum[16];
  int32_t half[2][16];
};
static_assert(sizeof(Slot) == kSlotBytes, "ops/linear.cpp allocates them");

PS_INLINE int zero_of(int32_t layout) {
  return layout == PS_T16_MXFP4 ? 12 : layout == PS_T16_Q4_0 ? 8 : layout == PS_T16_Q5_0 ? 16 : layout == PS_T16_Q6_K ? 32 : layout == PS_T16_Q3_K ? 4 : 0;
}
PS_INLINE bool has_minimum(int32_t layout) {
  return layout == PS_T16_Q4_K || layout == PS_T16_Q5_K || layout == PS_T16_Q4_1 || layout == PS_T16_Q5_1 || layout == PS_T16_Q2_K;
}
// Scales of 16 columns, which multiply the integer sums.
PS_INLINE bool has_halves(int32_t layout) { return layout == PS_T16_Q6_K || layout == PS_T16_Q3_K || layout == PS_T16_Q2_K; }
// Pairs of groups with f16 scales, and those with a line of f16 minimums or with fifth bits behind the nibbles.
PS_INLINE bool is_plain_pair(int32_t layout) {
  return layout == PS_T16_Q4_0 || layout == PS_T16_IQ4_NL || layout == PS_T16_Q4_1 || layout == PS_T16_Q5_0 || layout == PS_T16_Q5_1;
}
PS_INLINE bool has_minimum_line(int32_t layout) { return layout == PS_T16_Q4_1 || layout == PS_T16_Q5_1; }
PS_INLINE bool has_fifth_lines(int32_t layout) { return layout == PS_T16_Q5_0 || layout == PS_T16_Q5_1; }

// `high` has the bits above the nibbles of the first 16 columns and of the last, `step` of them a column.
__attribute__((noinline, noclone)) void put_nibbles(const uint8_t* p, const uint8_t* first, const uint8_t* last, int step, Slot* s) {
  const I16 nibble = i_set(0x0f0f0f0f);
  I16 bits[2] = {i_set(0), i_set(0)};
  if (step) bits[0] = i_load(first), bits[1] = step == 1 ? i_srl<4>(bits[0]) : i_load(last);
  const I16 mask = i_set(step == 1 ? 0x10101010 : step == 2 ? 0x30303030 : 0);
  for (int j = 0; j < kGroupLines; ++j) {
    const I16 bytes = i_load(p + kLineBytes * j);
    i_store(s->q + kLineBytes * j, (bytes & nibble) | (i_shl<4>(bits[0]) & mask));
    i_store(s->q + kLineBytes * (4 + j), (i_srl<4>(bytes) & nibble) | (i_shl<4>(bits[1]) & mask));
    PS_UNROLL for (int h = 0; h < 2; ++h) bits[h] = step == 1 ? i_srl<1>(bits[h]) : i_srl<2>(bits[h]);
  }
}

// The values of two bits in two lines, and a third bit of each where `third` is not null.
__attribute__((noinline, noclone)) void put_pairs(const uint8_t* p, const uint8_t* third, Slot* s) {
  const I16 low = i_set(0x03030303), high = i_set(0x04040404);
  I16 bits = third ? i_load(third) : i_set(0);
  for (int h = 0; h < 2; ++h) {
    I16 pairs = i_load(p + kLineBytes * h);
    for (int j = 0; j < kGroupLines; ++j) {
      i_store(s->q + kLineBytes * (4 * h + j), (pairs & low) | (i_shl<2>(bits) & high));
      pairs = i_srl<2>(pairs);
      bits = i_srl<1>(bits);
    }
  }
}

PS_INLINE I16 byte_at_place(I16 words, int place) {
  return (place == 0 ? words : place == 1 ? i_srl<8>(words) : place == 2 ? i_srl<16>(words) : i_srl<24>(words)) & i_set(255);
}

// The values of MXFP4 (OCP Microscaling Formats, version 1.0) times two and plus zero_of, by nibble.
alignas(16) constexpr int8_t kFloat4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The values of IQ4_NL and IQ4_XS by nibble (kvalues_iq4nl of ggml-common.h).
alignas(16) constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Nibbles that stand for the entries of a table.
__attribute__((noinline, noclone)) void put_entries(const uint8_t* nibbles, const int8_t* table, Slot* s) {
  put_nibbles(nibbles, nullptr, nullptr, 0, s);
#pragma GCC unroll 1
  for (int j = 0; j < 2 * kGroupLines; ++j) i_store(s->q + kLineBytes * j, i_table(table, i_load(s->q + kLineBytes * j)));
}

// The k-th of the byte scales that follow a block's line of f16.
PS_INLINE I16 byte_scale(const uint8_t* block, int64_t k) {
  return byte_at_place(i_load(block + kLineBytes + k / kRowBytes * kLineBytes), int(k % kRowBytes));
}
PS_INLINE I16 with_sign(I16 bytes) { return i_sra<24>(i_shl<24>(bytes)); }

// Group g of UINT4: the scales of its rows, and their zero points.
PS_INLINE F16 scales_of(const uint8_t* block, int64_t g) { return f_load_f16((const uint16_t*)block + 16 * (g % 4)); }
PS_INLINE I16 zeros_of(const uint8_t* block, int64_t g) { return byte_at_place(i_load(block + 2 * kLineBytes), int(g % 4)); }

// Where the parameters of group g lie, and its values or those of its pair.
struct GroupPlace {
  const uint8_t *block, *pair;
};
PS_INLINE GroupPlace place_of(int32_t layout, const uint8_t* tile, int64_t g) {
  if (layout == PS_T16_Q8_0 || is_plain_pair(layout)) {
    const int plain = kPairBytes + has_minimum_line(layout) * kLineBytes + has_fifth_lines(layout) * 2 * kFifthBytes;
    const uint8_t* const pair = tile + g / 2 * (layout == PS_T16_Q8_0 ? kQ80PairBytes : plain);
    return {pair, pair};
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

// Returns the bytes of the group: those of Q8_0 where they are.
__attribute__((noinline)) const uint8_t* put_group(int32_t layout, const uint8_t* tile, int64_t g, Slot* s) {
  const GroupPlace at = place_of(layout, tile, g);
  const int odd = int(g % 2);
  const uint8_t* const nibbles = at.pair + kParameterBytes + odd * kGroupNibbleBytes;
  if (layout == PS_T16_Q8_0 || is_plain_pair(layout)) {
    f_store(s->scale, f_load_f16((const uint16_t*)at.pair + 16 * odd));
    if (layout == PS_T16_Q8_0) return at.pair + kParameterBytes + odd * kGroupColumns * kTileRows;
    if (layout == PS_T16_IQ4_NL) return put_entries(nibbles, kIq4, s), s->q;
    const bool has_line = has_minimum_line(layout);
    if (has_line) f_store(s->minimum, f_load_f16((const uint16_t*)(at.pair + kLineBytes) + 16 * odd));
    const uint8_t* const own = nibbles + has_line * kLineBytes;
    const uint8_t* const fifths = at.pair + kPairBytes + has_line * kLineBytes + odd * kFifthBytes;
    put_nibbles(own, fifths, nullptr, has_fifth_lines(layout), s);
    return s->q;
  }
  if (layout == PS_T16_MXFP4) {
    f_store(s->scale, f_bits(i_shl<23>(byte_at_place(i_load(at.block), int(g % 4)) - i_set(1))));  // 2^(e - 128)
    put_entries(nibbles, kFloat4, s);
    return s->q;
  }
  if (layout == PS_T16_IQ4_XS) {
    f_store(s->scale, f_load_f16((const uint16_t*)at.block) * f_from_i(with_sign(byte_scale(at.block, g % 8))));
    put_entries(at.pair, kIq4, s);
    return s->q;
  }
  if (layout == PS_T16_Q2_K || layout == PS_T16_Q3_K) {
    const bool three = layout == PS_T16_Q3_K;
    f_store(s->scale, f_load_f16((const uint16_t*)at.block));
    f_store(s->minimum, f_set(0.f) - f_load_f16((const uint16_t*)at.block + 16));
    for (int h = 0; h < 2; ++h) {
      const I16 own = byte_scale(at.block, g % 8 * 2 + h);
      i_store(s->half[h], three ? with_sign(own) : own);
    }
    put_pairs(at.pair, three ? at.pair + kGroupPairBytes : nullptr, s);
    return s->q;
  }
  if (layout == PS_T16_UINT4) {
    f_store(s->scale, scales_of(at.block, g));
    i_store(s->half[0], zeros_of(at.block, g));
    put_nibbles(nibbles, nullptr, nullptr, 0, s);
    return s->q;
  }
  const I16 parameters = i_load(at.pair);
  const F16 d = f_load_f16((const uint16_t*)at.block);
  const I16 first = byte_at_place(parameters, 2 * odd), second = byte_at_place(parameters, 2 * odd + 1);
  if (layout == PS_T16_Q6_K) {
    f_store(s->scale, d);
    i_store(s->half[0], with_sign(first));
    i_store(s->half[1], with_sign(second));
    const uint8_t* const bits = at.pair + kPairBytes + odd * kSixthBytes;
    put_nibbles(nibbles, bits, bits + kLineBytes, 2, s);
    return s->q;
  }
  f_store(s->scale, d * f_from_i(first));
  f_store(s->minimum, f_set(0.f) - f_load_f16((const uint16_t*)at.block + 16) * f_from_i(second));
  put_nibbles(nibbles, at.pair + kPairBytes + odd * kFifthBytes, nullptr, layout == PS_T16_Q5_K, s);
  return s->q;
}

// ---- the product --------------------------------------------------------------------------------------------------------

struct BlockRows {  // M rows of activations, `stride` bytes apart
  const uint8_t* x;
  int64_t stride;
  PS_INLINE const RoundedGroup& group(int i, int64_t g) const { return ((const RoundedGroup*)(x + i * stride))[g]; }
};

// How the bytes of a group are multiplied: with their sign; without one, of up to 31, or of up to 63, and summed over 32 columns
// or over 16 with a scale of their own.
enum Products { SIGNED, PLAIN, HALVES, HALVES_OF_63 };
PS_INLINE Products products_of(int32_t layout) {
  if (layout == PS_T16_Q8_0 || layout == PS_T16_IQ4_NL || layout == PS_T16_IQ4_XS) return SIGNED;
  return layout == PS_T16_Q6_K ? HALVES_OF_63 : has_halves(layout) ? HALVES : PLAIN;
}

// sum [M] += the products of the first or the last 16 columns of a group.
template <Products kProducts, int M>
PS_INLINE void add_half(const uint8_t* q, const BlockRows& x, int64_t g, int half, I16 (&sum)[M]) {
  const uint8_t* const lines = q + half * kGroupNibbleBytes;
  const int8_t* columns[M];
  PS_UNROLL for (int i = 0; i < M; ++i) columns[i] = x.group(i, g).q + 16 * half;
  if (kProducts == SIGNED) {
    PS_UNROLL for (int j = 0; j < kGroupLines; ++j) {
      const W8 v = w8_load(lines + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w8_dot(sum[i], v, columns[i] + kRowBytes * j);
    }
    return;
  }
  constexpr int kRun = kProducts == HALVES_OF_63 ? 2 : 4;  // lines whose products fit the sums of u8_dot
  PS_UNROLL for (int first = 0; first < kGroupLines; first += kRun) {
    U16 part[M];
    PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_zero();
    PS_UNROLL for (int j = first; j < first + kRun; ++j) {
      const U8 v = u8_load(lines + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) part[i] = u8_dot(part[i], v, columns[i] + kRowBytes * j);
    }
    PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = sum[i] + u8_sum(part[i]);
  }
}

// acc [M] += a group's product.
template <Products kProducts, int M>
PS_INLINE void add_group(int32_t layout, const uint8_t* q, const Slot& s, const BlockRows& x, int64_t g, F16 (&acc)[M]) {
  constexpr bool kHalves = kProducts == HALVES || kProducts == HALVES_OF_63;
  I16 low[M];
  PS_UNROLL for (int i = 0; i < M; ++i) {
    const RoundedGroup& own = x.group(i, g);
    low[i] = kProducts == SIGNED ? w8_start(own.sum) : i_set(-zero_of(layout) * (kHalves ? own.low_sum : own.sum));
  }
  add_half<kProducts, M>(q, x, g, 0, low);
  if (kHalves) {  // exact: 2 * 128 * 16 * 32 * 127 < 2^24
    const I16 scales = i_set(layout == PS_T16_Q2_K ? 15 : -1), step = i_load(s.half[0]) & scales;
    PS_UNROLL for (int i = 0; i < M; ++i) low[i] = i_mul(low[i], step);
    I16 high[M];
    PS_UNROLL for (int i = 0; i < M; ++i) high[i] = i_set(-zero_of(layout) * (x.group(i, g).sum - x.group(i, g).low_sum));
    add_half<kProducts, M>(q, x, g, 1, high);
    const I16 last = i_load(s.half[1]) & scales;
    PS_UNROLL for (int i = 0; i < M; ++i) low[i] = low[i] + i_mul(high[i], last);
  } else {
    add_half<kProducts, M>(q, x, g, 1, low);
  }
  if (layout == PS_T16_UINT4) {
    const I16 zeros = i_load(s.half[0]);
    PS_UNROLL for (int i = 0; i < M; ++i) low[i] = low[i] - i_mul(zeros, i_set(x.group(i, g).sum));
  }
  const F16 scale = f_load(s.scale);
  PS_UNROLL for (int i = 0; i < M; ++i)
    acc[i] = f_fma(f_from_i(low[i]), scale * f_set(x.group(i, g).scale), acc[i]);
  if (!has_minimum(layout)) return;
  const F16 minimum = f_load(s.minimum);
  if (layout == PS_T16_Q2_K) {  // exact, as the products
    const I16 first = i_srl<4>(i_load(s.half[0])), second = i_srl<4>(i_load(s.half[1]));
    PS_UNROLL for (int i = 0; i < M; ++i) {
      const RoundedGroup& own = x.group(i, g);
      const I16 sums = i_mul(first, i_set(own.low_sum)) + i_mul(second, i_set(own.sum - own.low_sum));
      acc[i] = f_fma(f_from_i(sums), minimum * f_set(own.scale), acc[i]);
    }
    return;
  }
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_fma(f_set(x.group(i, g).scaled_sum), minimum, acc[i]);
}

// As block_rows, for Q4_K and UINT4 where products of nibbles need no bytes: they are multiplied as they lie.  Of fewer
// than M rows the last is computed again.
constexpr int kNibbleRows = kGroupRows >= 4 ? 4 : 0;
PS_INLINE bool as_nibbles(int32_t layout) { return kNibbleRows && (layout == PS_T16_Q4_K || layout == PS_T16_UINT4); }

template <int M>
__attribute__((noinline)) void nibble_rows(const WeightView& w, const uint8_t* tile, const BlockRows& x, int m, int64_t ahead, F16* y) {
  const uint8_t* rows[M];
  F16 acc[M];
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_set(0.f), rows[i] = x.x + (i < m ? i : m - 1) * x.stride;
  for (int64_t g = 0; g < w.cols / kGroupColumns; ++g) {
    const GroupPlace at = place_of(w.layout, tile, g);
    const int odd = int(g % 2);
    const uint8_t* const p = at.pair + kParameterBytes + odd * kGroupNibbleBytes;
    G16 sum[M];
    PS_UNROLL for (int i = 0; i < M; ++i) sum[i] = w4_zero();
    prefetch(at.pair + ahead);
#pragma GCC unroll 1
    for (int j = 0; j < kGroupLines; ++j) {  // not unrolled: the library has to stay small
      prefetch(p + kLineBytes * j + ahead);
      const W4 v = w4_load(p + kLineBytes * j);
      PS_UNROLL for (int i = 0; i < M; ++i) {
        const int8_t* const x4 = ((const RoundedGroup*)rows[i])[g].q + kRowBytes * j;
        sum[i] = w4_dot(sum[i], v, x4, x4 + 16);
      }
    }
    if (w.layout == PS_T16_UINT4) {
      const F16 scale = scales_of(at.block, g);
      const I16 zeros = zeros_of(at.block, g);
      PS_UNROLL for (int i = 0; i < M; ++i) {
        const RoundedGroup& own = ((const RoundedGroup*)rows[i])[g];
        acc[i] = f_fma(f_from_i(w4_sum(sum[i]) - i_mul(zeros, i_set(own.sum))), scale * f_set(own.scale), acc[i]);
      }
      continue;
    }
    const I16 pair = i_load(at.pair), parameters = odd ? i_srl<16>(pair) : pair, byte = i_set(255);
    const F16 scale = f_load_f16((const uint16_t*)at.block) * f_from_i(parameters & byte);
    const F16 minimum = f_set(0.f) - f_load_f16((const uint16_t*)at.block + 16) * f_from_i(i_srl<8>(parameters) & byte);
    PS_UNROLL for (int i = 0; i < M; ++i) {
      const RoundedGroup& own = ((const RoundedGroup*)rows[i])[g];
      acc[i] = f_fma(f_from_i(w4_sum(sum[i])), scale * f_set(own.scale), acc[i]);
      acc[i] = f_fma(f_set(own.scaled_sum), minimum, acc[i]);
    }
  }
  PS_UNROLL for (int i = 0; i < M; ++i) y[i] = acc[i];
}

// y [M]: M rows against a tile.  slots: of the whole tile where several blocks of rows share them, which the first fills.
template <Products kProducts, int M>
__attribute__((noinline)) void block_rows(const WeightView& w, const uint8_t* tile, const BlockRows& x, Slot* slots, bool fills,
                                          int64_t ahead, F16* y) {
  F16 acc[M];
  Slot own;
  PS_UNROLL for (int i = 0; i < M; ++i) acc[i] = f_set(0.f);
  const int64_t groups = w.cols / kGroupColumns, tile_bytes = tile_bytes_of(w.layout, w.cols);
  for (int64_t g = 0; g < groups; ++g) {
    Slot* const s = slots ? slots + g : &own;
    const uint8_t* q = w.layout == PS_T16_Q8_0 ? place_of(w.layout, tile, g).pair + kParameterBytes + g % 2 * kGroupColumns * kTileRows : s->q;
    if (fills) {
      const uint8_t* const next = tile + tile_bytes * g / groups + ahead;
      for (int64_t at = 0; at < tile_bytes / groups + kLineBytes; at += kLineBytes) prefetch(next + at);
      q = put_group(w.layout, tile, g, s);
    }
    add_group<kProducts, M>(w.layout, q, *s, x, g, acc);
  }
  PS_UNROLL for (int i = 0; i < M; ++i) y[i] = acc[i];
}

constexpr int kBlockRows = 4;

template <Products kProducts>
inline void rows_of(int m, const WeightView& w, const uint8_t* tile, const BlockRows& x, Slot* slots, bool fills, int64_t ahead,
                    F16* y) {
  switch (m) {
    case 1: return block_rows<kProducts, 1>(w, tile, x, slots, fills, ahead, y);
    case 2: return block_rows<kProducts, 2>(w, tile, x, slots, fills, ahead, y);
    case 3: return block_rows<kProducts, 3>(w, tile, x, slots, fills, ahead, y);
    case 4: return block_rows<kProducts, 4>(w, tile, x, slots, fills, ahead, y);
  }
}

inline void some_rows(int m, const WeightView& w, const uint8_t* tile, const BlockRows& x, Slot* slots, bool fills, int64_t ahead,
                      F16* y) {
  if constexpr (kNibbleRows) {
    if (as_nibbles(w.layout)) return m == 1 ? nibble_rows<1>(w, tile, x, 1, ahead, y) : nibble_rows<kNibbleRows>(w, tile, x, m, ahead, y);
  }
  switch (products_of(w.layout)) {
    case SIGNED: return rows_of<SIGNED>(m, w, tile, x, slots, fills, ahead, y);
    case PLAIN: return rows_of<PLAIN>(m, w, tile, x, slots, fills, ahead, y);
    case HALVES: return rows_of<HALVES>(m, w, tile, x, slots, fills, ahead, y);
    case HALVES_OF_63: return rows_of<HALVES_OF_63>(m, w, tile, x, slots, fills, ahead, y);
  }
}

// Tiles [begin, end) of the output: of the weight, or of its gate half when the op is gated.
void linear_blocks(const LinearArgs& a, int64_t begin, int64_t end) {
  const int64_t most = as_nibbles(a.weight.layout) ? kNibbleRows : kBlockRows, blocks = (a.m + most - 1) / most;
  const int64_t tile_bytes = tile_bytes_of(a.weight.layout, a.weight.cols);
  const int64_t ahead = prefetch_distance(a, a.m, kI8PrefetchBytes), groups = a.weight.cols / kGroupColumns;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t b = 0; b < blocks; ++b) {
      const RowBlock rows = row_block(a.m, blocks, b);
      const BlockRows x = {(const uint8_t*)a.qx.q + rows.first * a.qx.stride, a.qx.stride};
      F16 y[2][4];
      for (int t = 0; t < 1 + a.gated; ++t) {
        const uint8_t* const w = a.weight.data + (tile + t * (a.weight.rows / 32)) * tile_bytes;
        some_rows(rows.count, a.weight, w, x, blocks > 1 ? (Slot*)a.panel + t * groups : nullptr, b == 0 || blocks == 1, ahead, y[t]);
      }
      if (a.gated) store_gated(a, rows.first, tile, rows.count, 1, y[0], y[1]);
      else store_block(a, rows.first, tile, rows.count, 1, y[0]);
    }
  }
}

// ---- rows as float32: the values of the file, rounded as the format's reference does ----------------------------------------

inline void blocks_to_f32(int32_t layout, const uint8_t* tile, int lane, int64_t cols, float* y) {
  Slot s{};
  for (int64_t g = 0; g < cols / kGroupColumns; ++g, y += kGroupColumns) {
    const uint8_t* const q = put_group(layout, tile, g, &s);
    for (int i = 0; i < kGroupColumns; ++i) {
      const int half = s.half[i / 16][lane];
      float scale = s.scale[lane], minimum = s.minimum[lane];
      if (layout == PS_T16_Q2_K) scale = scale * float(half & 15), minimum = minimum * float(half >> 4);
      else if (has_halves(layout)) scale = scale * float(half);
      const int zero = layout == PS_T16_UINT4 ? s.half[0][lane] : zero_of(layout);
      y[i] = scale * float(int8_t(q[byte_at(i, lane)]) - zero);
      if (has_minimum(layout)) y[i] = y[i] + minimum;
    }
  }
}

}  // namespace
}  // namespace ps

#endif
