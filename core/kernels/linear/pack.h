// Packing row-major weights into the layouts of penstock_dev.h.  The numbers of the integer layouts are in
// base/tiles.h.
//
// Bytes of a tile of 16 rows (row r of the weight is lane r % 16 of tile r / 16; all numbers little-endian):
//   T16_F32   float  [cols][16]
//   T16_F16   f16    [cols][16]
//   T16_BF16  bf16   [ceil(cols/2)][16][2]
//   T16_I8    float scale[16]; int8 q [ceil(cols/4)][16][4]
//   T16_I4G32 float scale[16]; [ceil(cols/64)] { [16]{u8 step0; i8 offset0; u8 step1; i8 offset1}; u8 [2][4][16][4] }:
//             byte [group][j][lane][i] holds the nibble of column 4j+i of the group of 32 columns in its low half and
//             of column 16+4j+i in its high half; the integer is step * nibble + offset
// Lanes past the last row are left unchanged (zero in fresh memory).  Columns past the last hold the nibble or value 0,
// groups past the last a step and an offset of 0.  A call writes only the lanes of its own rows.
#ifndef PENSTOCK_KERNELS_LINEAR_PACK_H
#define PENSTOCK_KERNELS_LINEAR_PACK_H

namespace ps {
namespace {

PS_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline int64_t tile_bytes_of(int32_t layout, int64_t cols) {
  switch (layout) {
    case PS_T16_F32: return cols * 64;
    case PS_T16_F16: return cols * 32;
    case PS_T16_BF16: return round_up(cols, 2) * 32;
    case PS_T16_I8: return i8_tile_bytes(cols);
#define PS_BLOCKS(id, name, columns, bytes, tile_columns, tile_bytes) \
  case PS_T16_##id: return round_up(cols, tile_columns) / tile_columns * tile_bytes;
#include "base/block_schemes.inc"
    default: return i4_tile_bytes(cols);
  }
}

PS_LONG F16 source_lanes(const PackArgs& a, int64_t i, int n) {
  if (a.src_dtype == PS_F32) return f_load_n((const float*)a.src + i, n);
  const uint16_t* src = (const uint16_t*)a.src + i;
  return a.src_dtype == PS_F16 ? f_load_f16_n(src, n) : f_load_bf16_n(src, n);
}

// ---- 4 bit: step and offset of a group -----------------------------------------------------------------------------

// The integers of a group are one of 16 points step * nibble + offset, which must fit int8.  Progressive scales as in
// QServe (arXiv 2405.04532): w is in units of the row's scale, -127 to 127.
// Step and offset of 16 groups, one per lane.
struct Line {
  F16 step, offset, inverse, top;  // top: the largest nibble
};

struct Fit {
  Line line;
  F16 error, sum;  // squared error; sum of the nibbles, weighted
};

struct Group {
  F16 w[32];
  int n;           // number of columns: later ones do not count
  const float* a;  // weight of each column's squared error; null: 1
  bool even;       // offsets are even numbers from kLeastEven to 0
};

constexpr float kLeastEven = -126.f;  // half of it, the minimum of a group of Q4_K, has 6 bits

PS_LONG F16 clamp(F16 x, float low, float high) { return f_max(f_min(x, f_set(high)), f_set(low)); }

PS_LONG Line line_of(const Group& g, F16 step, F16 offset) {
  const F16 whole = g.even ? clamp(f_round(offset * f_set(0.5f)) * f_set(2.f), kLeastEven, 0.f)
                           : clamp(f_round(offset), -128.f, 127.f);
  Line l = {step, whole, f_set(1.f) / step, f_set(0.f)};
  // floor((127 - offset) / step): half a step less one is subtracted, so that no quotient is near a tie.
  F16 room = f_fma(step, f_set(-0.5f), f_set(127.5f) - l.offset);
  l.top = f_min(f_round(room * l.inverse), f_set(float(kMaxNibble)));
  return l;
}

PS_LONG F16 nibble_of(const Line& l, F16 distance) {
  return f_round(f_max(f_min(distance * l.inverse, l.top), f_set(0.f)));
}

template <bool kWeighted>
inline Fit fit_of(const Group& g, const Line& l) {
  Fit f = {l, f_set(0.f), f_set(0.f)};
  const F16 negative = f_set(0.f) - l.step;
  for (int k = 0; k < g.n; ++k) {
    F16 distance = g.w[k] - l.offset;
    F16 q = nibble_of(l, distance);
    F16 difference = f_fma(q, negative, distance);
    if (kWeighted) {
      const F16 a = f_set(g.a[k]);
      f.error = f_fma(difference * a, difference, f.error);
      f.sum = f_fma(q, a, f.sum);
    } else {
      f.error = f_fma(difference, difference, f.error);
      f.sum = f.sum + q;
    }
  }
  return f;
}

PS_LONG void keep_better(Fit& best, const Fit& other) {
  M16 better = m_lt(other.error, best.error);
  best.line.step = f_select(better, other.line.step, best.line.step);
  best.line.offset = f_select(better, other.line.offset, best.line.offset);
  best.line.inverse = f_select(better, other.line.inverse, best.line.inverse);
  best.line.top = f_select(better, other.line.top, best.line.top);
  best.sum = f_select(better, other.sum, best.sum);
  best.error = f_select(better, other.error, best.error);
}

constexpr float kSteps[] = {0.f, -1.f, 1.f, -2.f};           // added to a fifteenth of the range
constexpr int kPlainSteps = 3, kWeightedSteps = 4;           // how many of kSteps are tried
constexpr int kPlainMoves = 1, kWeightedMoves = 2;           // least-squares refinements of the offset
constexpr float kSlacks[] = {0.5f, 0.f, 0.25f, 0.75f, 1.f};  // parts of range - 15 steps that lie below the grid

// The candidate with the least squared error: for each step the best of several offsets, then refined by least squares
// for its rounding.
template <bool kWeighted>
inline Line best_line(const Group& g) {
  F16 low = g.w[0], high = g.w[0], sum = kWeighted ? g.w[0] * f_set(g.a[0]) : g.w[0];
  float total = kWeighted ? g.a[0] : float(g.n);
  for (int k = 1; k < g.n; ++k) {
    low = f_min(low, g.w[k]);
    high = f_max(high, g.w[k]);
    sum = kWeighted ? f_fma(g.w[k], f_set(g.a[k]), sum) : sum + g.w[k];
    if (kWeighted) total += g.a[k];
  }
  if (g.even) low = f_min(low, f_set(0.f));
  const F16 range = high - low, share = f_set(1.f / total), first = f_round(range * f_set(1.f / float(kMaxNibble)));
  const F16 one = f_set(1.f), zero = f_set(0.f);
  const Fit none = {{one, zero, one, zero}, f_set(3e38f), zero};
  Fit best = none;
  for (int i = 0; i < (kWeighted ? kWeightedSteps : kPlainSteps); ++i) {
    const F16 step = clamp(first + f_set(kSteps[i]), 1.f, float(kMaxStep)),
              slack = f_fma(step, f_set(-float(kMaxNibble)), range);
    Fit fit = none;
    for (float part : kSlacks) keep_better(fit, fit_of<kWeighted>(g, line_of(g, step, f_fma(slack, f_set(part), low))));
    for (int move = 0; move < (kWeighted ? kWeightedMoves : kPlainMoves); ++move) {
      const F16 offset = f_fma(step, zero - fit.sum, sum) * share;
      keep_better(fit, fit_of<kWeighted>(g, line_of(g, step, offset)));
    }
    keep_better(best, fit);
  }
  return best.line;
}

// ---- one step of 32 columns for the rows of one tile ------------------------------------------------------------

struct Step {
  const PackArgs* args;
  uint8_t* tile;
  int lane_begin, lane_end;  // within the tile
  int64_t source;            // index of lane_begin's first element in src
  int64_t k;                 // first column
  int n;                     // columns: 32, or fewer at the end
};

PS_LONG void load_row(const Step& s, int lane, F16* low, F16* high) {
  int64_t i = s.source + (lane - s.lane_begin) * s.args->cols + s.k;
  *low = source_lanes(*s.args, i, s.n < 16 ? s.n : 16);
  *high = s.n > 16 ? source_lanes(*s.args, i + 16, s.n - 16) : f_set(0.f);
}

// The columns of a row in the layout's type; those past the last are 0.
PS_LONG void convert_row(const Step& s, int lane, void* numbers) {
  F16 v[2];
  load_row(s, lane, &v[0], &v[1]);
  float f[32];
  uint16_t h[32];
  for (int half = 0; half < 2; ++half) {
    if (s.args->layout == PS_T16_F32) f_store(f + 16 * half, v[half]);
    if (s.args->layout == PS_T16_F16) f_store_f16_n(h + 16 * half, v[half], 16);
    if (s.args->layout == PS_T16_BF16) f_store_bf16_n(h + 16 * half, v[half], 16);
  }
  if (s.args->layout == PS_T16_F32) __builtin_memcpy(numbers, f, sizeof(f));
  else __builtin_memcpy(numbers, h, sizeof(h));
}

// A word is what a tile stores of one row before the next row: one number, or two of bf16.  With counts known at
// compile time, the loop over a whole tile becomes a transposition in registers.
template <typename Word, int kWords>
inline void pack_words(const Step& s) {
  constexpr int kColumns = 32 / kWords;
  Word rows[16][kWords];
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) convert_row(s, lane, rows[lane]);
  Word* const to = (Word*)s.tile + s.k / kColumns * 16;
  if (s.n == 32 && s.lane_end - s.lane_begin == 16) {
    for (int i = 0; i < kWords; ++i)
      for (int lane = 0; lane < 16; ++lane) to[i * 16 + lane] = rows[lane][i];
    return;
  }
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane)
    for (int i = 0; i * kColumns < s.n; ++i) to[i * 16 + lane] = rows[lane][i];
}

inline void pack_floats(const Step& s) {
  if (s.args->layout == PS_T16_F32) pack_words<uint32_t, 32>(s);
  else if (s.args->layout == PS_T16_F16) pack_words<uint16_t, 32>(s);
  else pack_words<uint32_t, 16>(s);
}

// The remainder of a row in units of its scale, -127 to 127; zeros if the scale is zero.
PS_LONG F16 scaled(F16 v, float scale) {
  if (!(scale > 0.f)) return f_set(0.f);
  return clamp(v / f_set(scale), -127.f, 127.f);
}

// scales: one for each of the 16 lanes.
inline void pack_int8(const Step& s, const float* scales) {
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    F16 v[2];
    load_row(s, lane, &v[0], &v[1]);
    int8_t q[32];
    for (int half = 0; half < 2; ++half) f_store_i8_n(q + 16 * half, f_round(scaled(v[half], scales[lane])), 16);
    for (int i = 0; i < s.n; i += 4) __builtin_memcpy(s.tile + kScaleBytes + (s.k + i) * 16 + lane * 4, q + i, 4);
  }
}

inline void load_group(const Step& s, const float* scales, Group* g) {
  float columns[32][16] = {};
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    F16 v[2];
    load_row(s, lane, &v[0], &v[1]);
    float f[32];
    f_store(f, scaled(v[0], scales[lane]));
    f_store(f + 16, scaled(v[1], scales[lane]));
    for (int k = 0; k < 32; ++k) columns[k][lane] = f[k];
  }
  g->n = s.n;
  g->even = s.args->even_offsets;
  for (int k = 0; k < 32; ++k) g->w[k] = f_load(columns[k]);
  g->a = s.args->column_weights ? s.args->column_weights + s.k : nullptr;
  float total = 0.f;
  for (int k = 0; g->a && k < g->n; ++k) total += g->a[k];
  if (!(total > 0.f)) g->a = nullptr;  // the inputs were always 0: weight all columns equally
}

PS_INLINE I16 nibble_at(const Group& g, const Line& l, int k) {
  return k < g.n ? i_from_f(nibble_of(l, g.w[k] - l.offset)) : i_set(0);
}

PS_SMALL inline void pack_int4(const Step& s, const float* scales) {
  Group g;
  load_group(s, scales, &g);
  const Line line = g.a ? best_line<true>(g) : best_line<false>(g);
  uint8_t* pair = s.tile + kScaleBytes + s.k / kPairColumns * kPairBytes;
  const int half = int(s.k / kGroupColumns % 2), lanes = s.lane_end - s.lane_begin;
  const I16 parameters = i_from_f(line.step) | i_shl<8>(i_from_f(line.offset) & i_set(255));
  int32_t words[16];
  i_store(words, parameters);
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    pair[4 * lane + 2 * half] = uint8_t(words[lane]);
    pair[4 * lane + 2 * half + 1] = uint8_t(words[lane] >> 8);
  }
  for (int j = 0; j < 4; ++j) {
    I16 word = i_set(0);
    PS_UNROLL for (int i = 0; i < 4; ++i) {
      I16 byte = nibble_at(g, line, 4 * j + i) | i_shl<4>(nibble_at(g, line, 16 + 4 * j + i));
      word = word | (i == 0 ? byte : i == 1 ? i_shl<8>(byte) : i == 2 ? i_shl<16>(byte) : i_shl<24>(byte));
    }
    uint8_t bytes[64];
    i_store(bytes, word);
    uint8_t* nibbles = pair + kParameterBytes + kGroupNibbleBytes * half + kLineBytes * j;
    __builtin_memcpy(nibbles + 4 * s.lane_begin, bytes + 4 * s.lane_begin, size_t(4 * lanes));
  }
}

// The bits of a row's largest magnitude, which order like the floats.
inline float row_scale_of(const PackArgs& a, int64_t source) {
  I16 m = i_set(0);
  for (int64_t i = 0; i < a.cols; i += 16) m = i_max(m, i_bits(f_abs(source_lanes(a, source + i, tail(a.cols, i)))));
  int32_t bits = i_hmax(m);
  return bits >= 0x7f800000 ? __builtin_nanf("") : float_of(uint32_t(bits)) / 127.f;
}

PS_SMALL inline void pack_tile(Step& s) {
  const PackArgs& a = *s.args;
  const bool integer = a.layout == PS_T16_I8 || a.layout == PS_T16_I4G32;
  float scales[16] = {};
  for (int lane = s.lane_begin; integer && lane < s.lane_end; ++lane) {
    const int64_t source = s.source + (lane - s.lane_begin) * a.cols;
    scales[lane] = a.scales ? a.scales[source / a.cols] : row_scale_of(a, source);
    ((float*)s.tile)[lane] = scales[lane];
  }
  for (s.k = 0; s.k < a.cols; s.k += 32) {
    s.n = a.cols - s.k < 32 ? int(a.cols - s.k) : 32;
    if (a.layout == PS_T16_I4G32) pack_int4(s, scales);
    else if (a.layout == PS_T16_I8) pack_int8(s, scales);
    else pack_floats(s);
  }
}

inline void pack_rows(const PackArgs& a) {
  const int64_t count = a.num_rows * a.cols, first = a.row_start * a.cols;
  if (a.layout == PS_ROWS_I32) {
    __builtin_memcpy((int32_t*)a.dst + first, a.src, size_t(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; i += 16) {
    int n = tail(count, i);
    F16 v = source_lanes(a, i, n);
    if (a.layout == PS_ROWS_F32) f_store_n((float*)a.dst + first + i, v, n);
    else if (a.layout == PS_ROWS_F16) f_store_f16_n((uint16_t*)a.dst + first + i, v, n);
    else f_store_bf16_n((uint16_t*)a.dst + first + i, v, n);
  }
}

void pack(const PackArgs& a) {
  if (a.layout < PS_T16_F32) return pack_rows(a);
  const int64_t tile_bytes = tile_bytes_of(a.layout, a.cols), end = a.row_start + a.num_rows;
  for (int64_t row = a.row_start; row < end;) {
    int64_t tile = row / 16, next = tile * 16 + 16 < end ? tile * 16 + 16 : end;
    Step s = {&a, a.dst + tile * tile_bytes, int(row % 16), int(next - tile * 16), (row - a.row_start) * a.cols, 0, 0};
    pack_tile(s);
    row = next;
  }
}

}  // namespace
}  // namespace ps

#endif
