// Rows of a weight of any layout as float32: the exact values that the kernels compute with.
#ifndef PENSTOCK_KERNELS_LINEAR_EMBEDDING_H
#define PENSTOCK_KERNELS_LINEAR_EMBEDDING_H

namespace ps {
namespace {

inline void rows_to_f32(const WeightView& w, int64_t row, float* y) {
  for (int64_t i = 0; i < w.cols; i += 16) {
    int n = tail(w.cols, i);
    int64_t at = row * w.cols + i;
    F16 v;
    if (w.layout == PS_ROWS_F32) v = f_load_n((const float*)w.data + at, n);
    else if (w.layout == PS_ROWS_F16) v = f_load_f16_n((const uint16_t*)w.data + at, n);
    else v = f_load_bf16_n((const uint16_t*)w.data + at, n);
    f_store_n(y + i, v, n);
  }
}

inline void int8_to_f32(const uint8_t* tile, int lane, int64_t cols, float* y) {
  const float scale = ((const float*)tile)[lane];
  const int8_t* q = (const int8_t*)tile + kScaleBytes + 4 * lane;
  for (int64_t k = 0; k < cols; ++k) y[k] = float(q[k / 4 * 64 + k % 4]) * scale;
}

inline void int4_to_f32(const uint8_t* tile, int lane, int64_t cols, float* y) {
  const float scale = ((const float*)tile)[lane];
  const uint8_t* pair = tile + kScaleBytes;
  for (int64_t k = 0; k < cols; k += kGroupColumns) {
    const int half = int(k / kGroupColumns % 2), n = cols - k < kGroupColumns ? int(cols - k) : kGroupColumns;
    const int step = pair[4 * lane + 2 * half], offset = pair[4 * lane + 2 * half + 1];
    const uint8_t* nibbles = pair + kParameterBytes + kGroupNibbleBytes * half + 4 * lane;
    for (int i = 0; i < n; ++i) {
      const int byte = nibbles[i % 16 / kRowBytes * kLineBytes + i % kRowBytes];
      const int8_t v =
          int8_t(uint8_t(step * (i < 16 ? byte & 15 : byte >> 4) + offset));  // wraps: no undefined behaviour
      y[k + i] = float(v) * scale;
    }
    if (half) pair += kPairBytes;
  }
}

constexpr bool kBuildsRows = builds_layout(PS_ROWS_F32) || builds_layout(PS_ROWS_F16) || builds_layout(PS_ROWS_BF16);
#define PS_BLOCKS(id, ...) || builds_layout(PS_T16_##id)
constexpr bool kBuildsBlocks = false
#include "base/block_schemes.inc"
    ;

inline void row_to_f32(const WeightView& w, int64_t row, float* y) {
  if (kBuildsRows && w.layout < PS_ROWS_I32) return rows_to_f32(w, row, y);
  if (w.layout == PS_ROWS_I32) {
    for (int64_t k = 0; k < w.cols; ++k) y[k] = float(((const int32_t*)w.data)[row * w.cols + k]);
    return;
  }
  const uint8_t* tile = w.data + row / 16 * tile_bytes_of(w.layout, w.cols);
  const int lane = int(row % 16);
  const uint16_t* h = (const uint16_t*)tile;
  switch (w.layout) {
    case PS_T16_F32:
      if (!builds_layout(PS_T16_F32)) return;
      for (int64_t k = 0; k < w.cols; ++k) y[k] = ((const float*)tile)[k * 16 + lane];
      return;
    case PS_T16_F16:
      if (!builds_layout(PS_T16_F16)) return;
      for (int64_t k = 0; k < w.cols; ++k) y[k] = f16_to_f32(h[k * 16 + lane]);
      return;
    case PS_T16_BF16:
      if (!builds_layout(PS_T16_BF16)) return;
      for (int64_t k = 0; k < w.cols; ++k) y[k] = bf16_to_f32(h[(k / 2 * 16 + lane) * 2 + k % 2]);
      return;
    case PS_T16_I8: return builds_layout(PS_T16_I8) ? int8_to_f32(tile, lane, w.cols, y) : void();
#define PS_BLOCKS(id, ...) case PS_T16_##id:
#include "base/block_schemes.inc"
      return kBuildsBlocks ? blocks_to_f32(w, tile, lane, y) : void();
    default: return builds_layout(PS_T16_I4G32) ? int4_to_f32(tile, lane, w.cols, y) : void();
  }
}

void embedding(const WeightView& weight, const int32_t* ids, float* y, int64_t y_stride, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) row_to_f32(weight, ids[t], y + t * y_stride);
}

void unpack(const WeightView& weight, int64_t row_start, int64_t num_rows, float* dst) {
  for (int64_t r = 0; r < num_rows; ++r) row_to_f32(weight, row_start + r, dst + r * weight.cols);
}

}  // namespace
}  // namespace ps

#endif
