// Copies elements with a stride along each axis.
// Hot: runs in every step.
#include "arrays/strided_copy.h"

namespace ps {
namespace {

constexpr int64_t kTile = 16;  // along the axis with stride 1: 64 bytes of f32

template <class T>
void splat_of(const uint8_t* from, int64_t n, uint8_t* to) {
  T v;
  memcpy(&v, from, sizeof(T));
  T* y = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] = v;
}

template <class T>
void pick(const uint8_t* from, int64_t stride, int64_t n, uint8_t* to) {
  const T* x = reinterpret_cast<const T*>(from);
  T* y = reinterpret_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i * stride];
}

void pick_elements(const uint8_t* from, int64_t bytes, int64_t stride, int64_t n, uint8_t* to) {
  // clang-format off: one size a line
  switch (bytes) {
    case 1: return pick<uint8_t>(from, stride, n, to);
    case 2: return pick<uint16_t>(from, stride, n, to);
    case 4: return pick<uint32_t>(from, stride, n, to);
    default: return pick<uint64_t>(from, stride, n, to);
  }
  // clang-format on
}

typedef uint32_t Four __attribute__((vector_size(16)));

Four load_four(const uint32_t* p) {
  Four v;
  memcpy(&v, p, 16);
  return v;
}

// y[c * y_stride + r] = x[r * x_stride + c] for 4 rows and 4 columns.
void transpose_four(const uint32_t* x, int64_t x_stride, uint32_t* y, int64_t y_stride) {
  const Four a = load_four(x), b = load_four(x + x_stride), c = load_four(x + 2 * x_stride),
             d = load_four(x + 3 * x_stride);
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Four rows[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                        __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
  for (int32_t i = 0; i < 4; ++i) memcpy(y + i * y_stride, &rows[i], 16);
}

// y[c * y_stride + r] = x[r * x_stride + c]
template <class T>
void transpose_tile(const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int64_t cols) {
  if constexpr (sizeof(T) == 4) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      int64_t c = 0;
      for (; c + 4 <= cols; c += 4) transpose_four(x + r * x_stride + c, x_stride, y + c * y_stride + r, y_stride);
      for (; c < cols; ++c) {
        for (int64_t i = r; i < r + 4; ++i) y[c * y_stride + i] = x[i * x_stride + c];
      }
    }
    for (; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) y[c * y_stride + r] = x[r * x_stride + c];
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) y[c * y_stride + r] = x[r * x_stride + c];
    }
  }
}

}  // namespace

void copy_elements(uint8_t* to, const uint8_t* from, int64_t bytes) {
  // clang-format off
  switch (bytes) {
    case 1: *to = *from; return;
    case 2: memcpy(to, from, 2); return;
    case 4: memcpy(to, from, 4); return;
    case 8: memcpy(to, from, 8); return;
    case 12: memcpy(to, from, 12); return;
    case 16: memcpy(to, from, 16); return;
    default: memcpy(to, from, static_cast<size_t>(bytes));
  }
  // clang-format on
}

void splat(const uint8_t* from, int64_t bytes, int64_t n, uint8_t* to) {
  // clang-format off: one size a line
  switch (bytes) {
    case 1: memset(to, *from, static_cast<size_t>(n)); return;
    case 2: return splat_of<uint16_t>(from, n, to);
    case 4: return splat_of<uint32_t>(from, n, to);
    default: return splat_of<uint64_t>(from, n, to);
  }
  // clang-format on
}

void StridedCopy::plan() {
  int32_t kept = 0;
  for (int32_t i = 0; i < rank; ++i) {
    if (dims[i] == 1) continue;
    const bool joins = kept > 0 && strides[kept - 1] == strides[i] * dims[i];
    if (!joins) ++kept;
    dims[kept - 1] = joins ? dims[kept - 1] * dims[i] : dims[i];
    strides[kept - 1] = strides[i];
  }
  if (!kept) {
    dims[0] = total;  // 1
    strides[0] = 1;
    kept = 1;
  }
  rank = kept;
  unit = -1;
  if (strides[rank - 1] == 0 || strides[rank - 1] == 1) return;
  for (int32_t i = 0; i < rank - 1; ++i) {
    if (strides[i] == 1) unit = i;
  }
}

int64_t StridedCopy::items() const {
  if (total == 0) return 0;
  if (unit < 0) return num_blocks(total, kItem);
  return total / dims[rank - 1] / dims[unit] * num_blocks(dims[unit], kTile);
}

// begin, end: elements of the output
void StridedCopy::copy_rows(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const {
  int64_t index[kMaxRank], offset = base;
  for (int64_t i = rank - 1, rest = begin; i >= 0; --i) {
    const int64_t next = i ? rest / dims[i] : 0;
    index[i] = rest - next * dims[i];
    offset += index[i] * strides[i];
    rest = next;
  }
  const int32_t last = rank - 1;
  const int64_t stride = strides[last];
  for (int64_t at = begin; at < end;) {
    const int64_t left = dims[last] - index[last], n = left < end - at ? left : end - at;
    const uint8_t* from = x + offset * bytes;
    uint8_t* to = y + at * bytes;
    if (stride == 1 && n == dims[last] && rank > 1) {  // whole rows, up to the end of the axis before
      const int64_t rows = dims[last - 1] - index[last - 1], more = (end - at) / n, count = rows < more ? rows : more;
      const int64_t size = n * bytes, step = strides[last - 1] * bytes;
      for (int64_t i = 0; i < count; ++i) copy_elements(to + i * size, from + i * step, size);
      at += (count - 1) * n;
      offset += (count - 1) * strides[last - 1];
      index[last - 1] += count - 1;
    } else if (stride == 1) {
      copy_elements(to, from, n * bytes);
    } else if (stride == 0) {
      splat(from, bytes, n, to);
    } else {
      pick_elements(from, bytes, stride, n, to);
    }
    at += n;
    offset += n * stride;
    index[last] += n;
    for (int32_t i = last; i > 0 && index[i] == dims[i]; --i) {
      offset += strides[i - 1] - strides[i] * dims[i];
      index[i] = 0;
      ++index[i - 1];
    }
  }
}

template <class T>
void StridedCopy::transpose(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const {
  const int32_t last = rank - 1;
  const int64_t tiles = num_blocks(dims[unit], kTile);
  int64_t y_stride = 1;  // of the unit axis in the output
  for (int32_t i = unit + 1; i < rank; ++i) y_stride *= dims[i];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % tiles * kTile, left = dims[unit] - first, cols = left < kTile ? left : kTile;
    int64_t rest = item / tiles, from = base + first, to = first * y_stride, step = dims[last];
    for (int32_t i = last - 1; i >= 0; step *= dims[i--]) {
      if (i == unit) continue;
      const int64_t at = rest % dims[i];
      rest /= dims[i];
      from += at * strides[i];
      to += at * step;
    }
    for (int64_t row = 0; row < dims[last]; row += 4 * kTile) {
      const int64_t rows = dims[last] - row < 4 * kTile ? dims[last] - row : 4 * kTile;
      transpose_tile(reinterpret_cast<const T*>(x) + from + row * strides[last], strides[last],
                     reinterpret_cast<T*>(y) + to + row, y_stride, rows, cols);
    }
  }
}

void StridedCopy::run(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const {
  if (unit < 0) return copy_rows(x, y, begin * kItem, end * kItem < total ? end * kItem : total);
  // clang-format off: one size a line
  switch (bytes) {
    case 1: return transpose<uint8_t>(x, y, begin, end);
    case 2: return transpose<uint16_t>(x, y, begin, end);
    case 4: return transpose<uint32_t>(x, y, begin, end);
    default: return transpose<uint64_t>(x, y, begin, end);
  }
  // clang-format on
}

}  // namespace ps
