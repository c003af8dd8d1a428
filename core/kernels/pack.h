// Packing row-major weights into the layouts of penstock.h.
//
// Bytes of a tile of 16 rows (row r of the weight is lane r % 16 of tile r / 16; all numbers little-endian):
//   T16_F32   float  [cols][16]
//   T16_F16   f16    [cols][16]
//   T16_BF16  bf16   [ceil(cols/2)][16][2]
//   T16_I8    float scale[16]; int32 row_sum[16] (sum of q over the row); int8 q [ceil(cols/4)][16][4]
//   T16_I4G32 [ceil(cols/32)] { f16 scale[16]; u8 [4][16][4] }: byte [j][lane][i] holds q + 8 of column 4j+i in
//             its low nibble and of column 16+4j+i in its high nibble
// Lanes past the last row stay as they are (zero bytes in fresh memory).  Columns past the last hold the value 0: zero
// bytes, but nibble 8 in T16_I4G32.  A call writes the lanes of its own rows alone.
#ifndef PENSTOCK_KERNELS_PACK_H
#define PENSTOCK_KERNELS_PACK_H

namespace ps {
namespace {

PS_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

inline int64_t tile_bytes_of(int32_t layout, int64_t cols) {
  switch (layout) {
    case PS_T16_F32: return cols * 64;
    case PS_T16_F16: return cols * 32;
    case PS_T16_BF16: return round_up(cols, 2) * 32;
    case PS_T16_I8: return 128 + round_up(cols, 4) * 16;
    default: return round_up(cols, 32) / 32 * kGroupBytes;
  }
}

PS_LONG F16 source_lanes(const PackArgs& a, int64_t i, int n) {
  if (a.src_dtype == PS_F32) return f_load_n((const float*)a.src + i, n);
  const uint16_t* src = (const uint16_t*)a.src + i;
  return a.src_dtype == PS_F16 ? f_load_f16_n(src, n) : f_load_bf16_n(src, n);
}

// ---- 4 bit: the scale of a group -----------------------------------------------------------------------------

// The largest value, with its sign, is put on one of these levels: -8 uses the whole range, beyond it the extreme is
// clipped a little, which pays when the rest of the group gains more.
constexpr float kLevels[] = {-8.f, 7.f, -7.f, -7.5f, -8.5f, 7.5f, -9.f, 8.f, -9.5f};

PS_LONG F16 round_to_f16(F16 x) {
  uint16_t h[16];
  f_store_f16_n(h, f_max(f_min(x, f_set(65504.f)), f_set(-65504.f)), 16);
  return f_load_f16(h);
}

struct Fit {  // of 16 groups, one a lane
  F16 scale, error, product, square;  // squared error; sums of w * q and of q * q
};

PS_LONG F16 inverse_of(F16 scale) {
  F16 zero = f_set(0.f);
  F16 inverse = f_set(1.f) / scale;
  return f_select(m_lt(zero, f_abs(scale)), inverse, zero);
}

PS_LONG F16 to_int4(F16 w, F16 inverse) { return f_round(f_max(f_min(w * inverse, f_set(7.f)), f_set(-8.f))); }

inline Fit fit_of(const F16 (&w)[32], F16 scale) {
  Fit f = {round_to_f16(scale), f_set(0.f), f_set(0.f), f_set(0.f)};
  F16 inverse = inverse_of(f.scale), negative = f_set(0.f) - f.scale;
  for (int k = 0; k < 32; ++k) {
    F16 q = to_int4(w[k], inverse);
    F16 difference = f_fma(q, negative, w[k]);
    f.error = f_fma(difference, difference, f.error);
    f.product = f_fma(w[k], q, f.product);
    f.square = f_fma(q, q, f.square);
  }
  return f;
}

PS_LONG void keep_better(Fit& best, const Fit& other) {
  M16 better = m_lt(other.error, best.error);
  best.scale = f_select(better, other.scale, best.scale);
  best.product = f_select(better, other.product, best.product);
  best.square = f_select(better, other.square, best.square);
  best.error = f_select(better, other.error, best.error);
}

// The scale of least squared error among the levels above, then what least squares makes of its rounding.
inline F16 best_scale(const F16 (&w)[32]) {
  F16 largest = f_set(0.f);
  for (int k = 0; k < 32; ++k) largest = f_select(m_lt(f_abs(largest), f_abs(w[k])), w[k], largest);
  Fit best = fit_of(w, largest * f_set(1.f / kLevels[0]));
  for (unsigned i = 1; i < sizeof(kLevels) / sizeof(kLevels[0]); ++i)
    keep_better(best, fit_of(w, largest * f_set(1.f / kLevels[i])));
  for (int i = 0; i < 2; ++i) {
    F16 refined = best.product / f_max(best.square, f_set(1.f));
    keep_better(best, fit_of(w, refined));
  }
  return best.scale;
}

// ---- one step of 32 columns for the rows of one tile ------------------------------------------------------------

struct Step {
  const PackArgs* args;
  uint8_t* tile;
  int lane_begin, lane_end;  // of the tile
  int64_t source;            // index of lane_begin's first element in src
  int64_t k;                 // first column
  int n;                     // columns: 32, fewer at the end
};

PS_LONG void load_row(const Step& s, int lane, F16* low, F16* high) {
  int64_t i = s.source + (lane - s.lane_begin) * s.args->cols + s.k;
  *low = source_lanes(*s.args, i, s.n < 16 ? s.n : 16);
  *high = s.n > 16 ? source_lanes(*s.args, i + 16, s.n - 16) : f_set(0.f);
}

inline void pack_floats(const Step& s) {
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    F16 v[2];
    load_row(s, lane, &v[0], &v[1]);
    float f[32];
    uint16_t h[32];
    for (int half = 0; half < 2; ++half) {
      f_store(f + 16 * half, v[half]);
      if (s.args->layout == PS_T16_F16) f_store_f16_n(h + 16 * half, v[half], 16);
      if (s.args->layout == PS_T16_BF16) f_store_bf16_n(h + 16 * half, v[half], 16);
    }
    if (s.args->layout == PS_T16_F32) {
      for (int i = 0; i < s.n; ++i) ((float*)s.tile)[(s.k + i) * 16 + lane] = f[i];
    } else if (s.args->layout == PS_T16_F16) {
      for (int i = 0; i < s.n; ++i) ((uint16_t*)s.tile)[(s.k + i) * 16 + lane] = h[i];
    } else {
      for (int i = 0; i < (s.n + 1) / 2 * 2; ++i) ((uint16_t*)s.tile)[((s.k + i) / 2 * 16 + lane) * 2 + i % 2] = h[i];
    }
  }
}

// divisors, sums: of the 16 lanes; a divisor of zero gives zeros.
inline void pack_int8(const Step& s, const float* divisors, int32_t* sums) {
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    F16 v[2];
    load_row(s, lane, &v[0], &v[1]);
    int8_t q[32];
    I16 sum = i_set(0);
    for (int half = 0; half < 2; ++half) {
      F16 x = f_set(0.f);
      if (divisors[lane] > 0.f) x = f_round(f_max(f_min(v[half] / f_set(divisors[lane]), f_set(127.f)), f_set(-127.f)));
      sum = sum + i_from_f(x);
      f_store_i8_n(q + 16 * half, x, 16);
    }
    int32_t lanes[16];
    i_store(lanes, sum);
    for (int i = 0; i < 16; ++i) sums[lane] += lanes[i];
    for (int i = 0; i < s.n; i += 4) __builtin_memcpy(s.tile + 128 + (s.k + i) * 16 + lane * 4, q + i, 4);
  }
}

PS_INLINE I16 nibble_of(F16 w, F16 inverse) { return i_from_f(to_int4(w, inverse)) + i_set(8); }

inline void pack_int4(const Step& s) {
  float columns[32][16] = {};
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    F16 v[2];
    load_row(s, lane, &v[0], &v[1]);
    float f[32];
    f_store(f, f_nan_to_zero(v[0]));
    f_store(f + 16, f_nan_to_zero(v[1]));
    for (int k = 0; k < 32; ++k) columns[k][lane] = f[k];
  }
  F16 w[32];
  for (int k = 0; k < 32; ++k) w[k] = f_load(columns[k]);
  F16 scale = best_scale(w), inverse = inverse_of(scale);
  uint8_t* group = s.tile + s.k / 32 * kGroupBytes;
  const bool whole = s.lane_begin == 0 && s.lane_end == 16;
  const int lanes = s.lane_end - s.lane_begin;
  uint16_t h[16];
  f_store_f16_n(h, scale, 16);
  __builtin_memcpy(group + 2 * s.lane_begin, h + s.lane_begin, size_t(2 * lanes));
  for (int j = 0; j < 4; ++j) {
    I16 word = i_set(0);
    PS_UNROLL for (int i = 0; i < 4; ++i) {
      I16 byte = nibble_of(w[4 * j + i], inverse) | i_shl<4>(nibble_of(w[16 + 4 * j + i], inverse));
      word = word | (i == 0 ? byte : i == 1 ? i_shl<8>(byte) : i == 2 ? i_shl<16>(byte) : i_shl<24>(byte));
    }
    uint8_t bytes[64];
    i_store(whole ? group + 32 + 64 * j : bytes, word);
    if (!whole) __builtin_memcpy(group + 32 + 64 * j + 4 * s.lane_begin, bytes + 4 * s.lane_begin, size_t(4 * lanes));
  }
}

// The scale of a row, in bits: of the largest magnitude, which integers order as floats do.
inline float int8_scale(const PackArgs& a, int64_t source) {
  I16 m = i_set(0);
  for (int64_t i = 0; i < a.cols; i += 16) m = i_max(m, i_bits(f_abs(source_lanes(a, source + i, tail(a.cols, i)))));
  int32_t bits = i_hmax(m);
  return bits >= 0x7f800000 ? __builtin_nanf("") : float_of(uint32_t(bits)) / 127.f;
}

inline void pack_tile(Step& s) {
  const PackArgs& a = *s.args;
  float divisors[16] = {};
  int32_t sums[16] = {};
  if (a.layout == PS_T16_I8)
    for (int lane = s.lane_begin; lane < s.lane_end; ++lane)
      divisors[lane] = int8_scale(a, s.source + (lane - s.lane_begin) * a.cols);
  for (s.k = 0; s.k < a.cols; s.k += 32) {
    s.n = a.cols - s.k < 32 ? int(a.cols - s.k) : 32;
    if (a.layout == PS_T16_I4G32) pack_int4(s);
    else if (a.layout == PS_T16_I8) pack_int8(s, divisors, sums);
    else pack_floats(s);
  }
  if (a.layout != PS_T16_I8) return;
  for (int lane = s.lane_begin; lane < s.lane_end; ++lane) {
    ((float*)s.tile)[lane] = divisors[lane];
    ((int32_t*)s.tile)[16 + lane] = sums[lane];
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
