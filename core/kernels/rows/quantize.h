// Rounds rows to integers for activations and int8 KV pages: scale = max|x| / limit, q = round(x / scale).
#ifndef PENSTOCK_KERNELS_ROWS_QUANTIZE_H
#define PENSTOCK_KERNELS_ROWS_QUANTIZE_H

namespace ps {
namespace {

// Sixteen-bit activations are two int8: x = 255 * high + low, low -127 to 127.  The base is not 256 because |low| would
// reach 128, which some dot products cannot negate.
constexpr int32_t kPlaneBase = 255;
constexpr float kLimit8 = 127.f, kLimit16 = 32512.f;

struct RowScale {
  float scale, inverse;  // NaN and 0 for a row with a NaN or an infinity
};

// The largest magnitude as bits, because integers order like floats, with infinity and NaN as the largest.
inline __attribute__((noinline)) int32_t max_magnitude(const float* x, int64_t n) {
  I16 m = i_set(0);
  for (int64_t i = 0; i < n; i += 16) m = i_max(m, i_bits(f_abs(f_load_n(x + i, tail(n, i)))));
  return i_hmax(m);
}

PS_INLINE RowScale row_scale(const float* x, int64_t n, float limit = kLimit8) {
  int32_t bits = max_magnitude(x, n);
  if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.f};
  float scale = float_of(uint32_t(bits)) / limit;
  if (scale < 1e-37f) return {0.f, 0.f};  // the inverse must be finite
  return {scale, 1.f / scale};
}

PS_LONG F16 to_integer(F16 x, float inverse, float limit) {
  // A NaN becomes the limit (f_min returns its second operand), never an undefined conversion; its scale is NaN.
  F16 v = f_max(f_min(x * f_set(inverse), f_set(limit)), f_set(-limit));
  return f_round(v);
}
PS_LONG F16 to_int8(F16 x, float inverse) { return to_integer(x, inverse, kLimit8); }

// A step's rows are split evenly into blocks of at most as many rows as the dot products keep in registers.
struct RowBlock {
  int64_t first;  // token
  int count;      // tokens
};
PS_INLINE int64_t num_row_blocks(int64_t m, int planes) {
  const int64_t most = kIntRows / planes;
  return (m + most - 1) / most;
}
// Compile-time constant if the build has only one of the two layouts.
PS_INLINE bool is_int4(int32_t layout) {
  if (!builds_layout(PS_T16_I8)) return true;
  return builds_layout(PS_T16_I4G32) && layout == PS_T16_I4G32;
}
// The int8 rows that form a single block for 4-bit weights: they use one tile at a time, whose accumulators leave more
// registers than those of two.
constexpr int kLoneRows = kIntTiles == 2 ? 16 : kIntRows;
PS_INLINE int64_t num_int_blocks(int32_t layout, int64_t m, int planes) {
  return is_int4(layout) && m * planes <= kLoneRows ? 1 : num_row_blocks(m, planes);
}
PS_INLINE RowBlock row_block(int64_t m, int64_t blocks, int64_t b) {
  const int64_t first = m * b / blocks;
  return {first, int(m * (b + 1) / blocks - first)};
}
PS_INLINE RowBlock block_of_row(int64_t m, int64_t blocks, int64_t row) {
  int64_t b = row * blocks / m;
  while (m * (b + 1) / blocks <= row) ++b;
  return row_block(m, blocks, b);
}

// The position of one int8 row inside its block.
struct RowTarget {
  int8_t* q;            // + 64 * rows bytes for each 64 columns
  int16_t* group_sums;  // + 2 * rows for each pair of groups; null: not needed
  int64_t rows;
};

PS_INLINE int32_t lane_sum(I16 v) {
  int32_t lanes[16], total = 0;
  i_store(lanes, v);
  for (int l = 0; l < 16; ++l) total += lanes[l];
  return total;
}

PS_INLINE void put_sixteen(const RowTarget& t, int64_t column, F16 v) {
  f_store_i8_n(t.q + column / 64 * 64 * t.rows + column % 64, v, 16);
}

template <int kPlanes>
inline void quantize_row(const float* x, const float* next, int64_t cols, int64_t stride, float inverse,
                         const RowTarget (&t)[kPlanes], int32_t* sums) {
  I16 total[kPlanes];
  for (int p = 0; p < kPlanes; ++p) total[p] = i_set(0);
  for (int64_t i = 0; i < stride; i += kGroupColumns) {
    I16 group[kPlanes];
    for (int p = 0; p < kPlanes; ++p) group[p] = i_set(0);
    for (int64_t j = i; j < i + kGroupColumns; j += 16) {
      __builtin_prefetch(next + j, 0, 3);
      const int n = cols - j >= 16 ? 16 : cols > j ? int(cols - j) : 0;
      F16 whole = f_set(0.f);
      if (n > 0) whole = to_integer(f_load_n(x + j, n), inverse, kPlanes == 2 ? kLimit16 : kLimit8);
      const I16 v = i_from_f(whole);
      if constexpr (kPlanes == 2) {
        const I16 up = v + i_set(kPlaneBase * 128 + 127 + 1);  // floor(n / 255) = (n + 1) * 257 >> 16, n below 65535
        const I16 high = i_sra<16>(i_shl<8>(up) + up) - i_set(128);
        const I16 low = v - i_shl<8>(high) + high;
        put_sixteen(t[0], j, f_from_i(high));
        put_sixteen(t[1], j, f_from_i(low));
        group[0] = group[0] + high;
        group[1] = group[1] + low;
      } else {
        put_sixteen(t[0], j, whole);
        group[0] = group[0] + v;
      }
    }
    for (int p = 0; p < kPlanes; ++p) {
      total[p] = total[p] + group[p];
      if (t[p].group_sums)
        t[p].group_sums[i / kPairColumns * 2 * t[p].rows + i / kGroupColumns % 2] = int16_t(lane_sum(group[p]));
    }
  }
  for (int p = 0; p < kPlanes; ++p) sums[p] = lane_sum(total[p]);
}

PS_INLINE bool has_two(const QuantizedRows& out) {  // true: two planes
  return (builds_scheme("w8a16") || builds_scheme("w4a16")) && out.planes == 2;
}

void quantize_rows(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout, const QuantizedRows& out,
                   int64_t begin, int64_t end) {
  const int64_t blocks = num_int_blocks(layout, m, out.planes);
  for (int64_t row = begin; row < end; ++row) {
    const float* next = x + (row + 1 < end ? row + 1 : row) * x_stride;  // prefetched while this row is written
    if (row == begin) prefetch_row(x + row * x_stride, cols);
    const RowScale s = row_scale(x + row * x_stride, cols, has_two(out) ? kLimit16 : kLimit8);
    out.scale[row] = s.scale;
    const RowBlock block = block_of_row(m, blocks, row);
    const int64_t rows = block.count * out.planes, first = block.first * out.planes;
    const bool by_groups = builds_layout(PS_T16_I4G32) && layout == PS_T16_I4G32 && rows <= kGroupRows;
    RowTarget targets[2];
    for (int p = 0; p < out.planes; ++p) {
      const int64_t index = (row - block.first) * out.planes + p;
      targets[p] = {out.q + first * out.stride + 64 * index,
                    by_groups ? out.group_sums + first * (out.stride / kGroupColumns) + 2 * index : nullptr, rows};
    }
    int32_t* sums = out.sums + row * out.planes;
    if (has_two(out)) {
      quantize_row<2>(x + row * x_stride, next, cols, out.stride, s.inverse, targets, sums);
    } else {
      quantize_row<1>(x + row * x_stride, next, cols, out.stride, s.inverse, {targets[0]}, sums);
    }
  }
}

}  // namespace
}  // namespace ps

#endif
