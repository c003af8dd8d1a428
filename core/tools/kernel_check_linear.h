// pack, unpack, embedding, quantize_rows, linear.
#ifndef PENSTOCK_KERNEL_CHECK_LINEAR_H
#define PENSTOCK_KERNEL_CHECK_LINEAR_H

#include "kernel_check.h"

namespace check {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif


inline int64_t bytes_of(int32_t layout, int64_t rows, int64_t cols) {
  int64_t tiles = (rows + 15) / 16;
  switch (layout) {
    case PS_ROWS_F32:
      return rows * cols * 4;
    case PS_ROWS_F16:
    case PS_ROWS_BF16:
      return rows * cols * 2;
    case PS_T16_F32:
      return tiles * cols * 64;
    case PS_T16_F16:
      return tiles * cols * 32;
    case PS_T16_BF16:
      return tiles * ((cols + 1) / 2) * 64;
    case PS_T16_I8:
      return tiles * (128 + (cols + 3) / 4 * 64);
    default:
      return tiles * ((cols + 31) / 32) * 288;
  }
}

struct Source {
  int32_t dtype;
  Bytes bytes;
  Floats values;  // exactly what the bytes say
};

inline Source make_source(int32_t dtype, const Floats& values) {
  Source s = {dtype, {}, values};
  const int64_t size = dtype == PS_F32 ? 4 : 2;
  s.bytes.resize(values.size() * size_t(size));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == PS_F32) std::memcpy(&s.bytes[i * 4], &values[i], 4);
    if (dtype == PS_BF16) {
      uint16_t h = to_bf16(values[i]);
      std::memcpy(&s.bytes[i * 2], &h, 2);
      s.values[i] = from_bf16(h);
    }
    if (dtype == PS_F16) {
      Half h = Half(values[i]);
      std::memcpy(&s.bytes[i * 2], &h, 2);
      s.values[i] = float(h);
    }
  }
  return s;
}

inline Bytes pack_rows(const ps::Kernels* k, int32_t layout, int64_t rows, int64_t cols, const Source& s,
                       int64_t split) {
  Bytes packed(size_t(bytes_of(layout, rows, cols)));
  for (int64_t at = 0; at < rows;) {
    int64_t n = split > 0 && at + split < rows ? split : rows - at;
    // A copy of just these rows, so that a read past them is found.
    size_t row_bytes = s.bytes.size() / size_t(rows);
    Bytes part(s.bytes.begin() + long(size_t(at) * row_bytes), s.bytes.begin() + long(size_t(at + n) * row_bytes));
    k->pack({layout, rows, cols, at, n, s.dtype, part.data(), packed.data()});
    at += n;
  }
  return packed;
}

inline double pack_tolerance(int32_t layout, float value, float largest) {
  switch (layout) {
    case PS_ROWS_F32:
    case PS_T16_F32:
      return 0;
    case PS_ROWS_F16:
    case PS_T16_F16:
      return std::fabs(value) * 0.0005 + 3e-8;
    case PS_ROWS_BF16:
    case PS_T16_BF16:
      return std::fabs(value) * 0.004;
    case PS_T16_I8:
      return largest / 127. * 0.5001;
    default:
      return largest / 7. * 1.2;  // a clipped extreme loses more than half a step
  }
}

inline void check_layout(int32_t layout, int64_t rows, int64_t cols, const Source& s, const std::string& what) {
  Bytes expected = pack_rows(ps::kernels_generic, layout, rows, cols, s, 0);
  for (const ps::Kernels* k : levels()) {
    for (int64_t split : {int64_t(0), int64_t(1), int64_t(5), int64_t(19)})
      expect_same(pack_rows(k, layout, rows, cols, s, split), expected, "pack " + what + " by " + std::to_string(split),
                  k->level);
    Floats values(size_t(rows * cols)), one(size_t(cols + 3), 5.f);
    ps::WeightView w = {expected.data(), layout, rows, cols};
    k->unpack(w, 0, rows, values.data());
    for (int64_t r = 0; r < rows; ++r) {
      float largest = 0;
      for (int64_t c = 0; c < cols; ++c) largest = std::fmax(largest, std::fabs(s.values[size_t(r * cols + c)]));
      for (int64_t c = 0; c < cols; ++c) {
        float v = s.values[size_t(r * cols + c)];
        expect_near(values[size_t(r * cols + c)], v, pack_tolerance(layout, v, largest), "unpack " + what, k->level);
      }
      int32_t id = int32_t(r);
      Floats row(size_t(cols), 0.f);
      k->embedding(w, &id, row.data(), cols, 0, 1);
      expect_same(row, Floats(values.begin() + r * cols, values.begin() + (r + 1) * cols), "embedding " + what,
                  k->level);
    }
  }
}

// Scales at the ends of what f16 holds, zeros, and values that are not numbers must leave finite 4-bit scales.
inline void check_extreme_groups() {
  Floats values(size_t(32 * 16), 0.f);
  const float extremes[] = {0.f, 1e-30f, 1e-7f, 3e-5f, 1.f, 6e4f, 1e6f, 3e38f, INFINITY, -INFINITY, NAN};
  Random random = {11};
  for (int64_t r = 0; r < 16; ++r)
    for (int64_t c = 0; c < 32; ++c)
      values[size_t(r * 32 + c)] = r < 8        ? extremes[r] * random.normal()
                                   : c % 8 == 0 ? extremes[r % 11]
                                                : random.normal();
  Source s = make_source(PS_F32, values);
  for (int32_t layout : {PS_T16_I4G32, PS_T16_I8, PS_T16_F16, PS_T16_BF16}) {
    Bytes expected = pack_rows(ps::kernels_generic, layout, 16, 32, s, 0);
    for (const ps::Kernels* k : levels()) {
      if (layout == PS_T16_I4G32 || layout == PS_T16_I8)
        expect_same(pack_rows(k, layout, 16, 32, s, 0), expected, "pack extremes", k->level);
      Floats got(size_t(16 * 32));
      k->unpack({expected.data(), layout, 16, 32}, 0, 16, got.data());
      for (size_t i = 0; i < got.size() && layout == PS_T16_I4G32; ++i)
        if (!std::isfinite(got[i])) fail("pack extremes", k->level, "a 4-bit value is not finite");
    }
  }
}

inline void check_weights() {
  Random random = {1};
  const int64_t shapes[][2] = {{1, 1}, {16, 32}, {17, 33}, {40, 100}, {35, 7}, {50, 257}};
  const int32_t layouts[] = {PS_ROWS_F32, PS_ROWS_F16, PS_ROWS_BF16, PS_T16_F32,
                             PS_T16_F16,  PS_T16_BF16, PS_T16_I8,    PS_T16_I4G32};
  for (auto [rows, cols] : shapes)
    for (int32_t dtype : {PS_F32, PS_F16, PS_BF16}) {
      Source s = make_source(dtype, random.normals(rows * cols, 0.05f));
      for (int32_t layout : layouts)
        check_layout(layout, rows, cols, s,
                     "layout " + std::to_string(layout) + " " + std::to_string(rows) + "x" + std::to_string(cols));
    }
  check_extreme_groups();
}

// ---- linear ----------------------------------------------------------------------------------------------------

struct Scheme {
  const char* name;
  ps::LinearScheme index;
  int32_t layout;
  bool int8_activations;
};
constexpr Scheme kSchemes[] = {
    {"f32", ps::LINEAR_F32, PS_T16_F32, false},    {"f16", ps::LINEAR_F16, PS_T16_F16, false},
    {"bf16", ps::LINEAR_BF16, PS_T16_BF16, false}, {"w8a16", ps::LINEAR_W8A16, PS_T16_I8, false},
    {"w8a8", ps::LINEAR_W8A8, PS_T16_I8, true},    {"w4a16", ps::LINEAR_W4A16, PS_T16_I4G32, false},
    {"w4a8", ps::LINEAR_W4A8, PS_T16_I4G32, true},
};

struct LinearCase {
  const Scheme& scheme;
  int64_t rows, cols;
  Bytes packed;
  Floats bias;
};

// rows first..first+m of x, and tiles in steps of `split`; columns past the weight's must stay as they are.
inline Floats run_linear(const ps::Kernels* k, const LinearCase& c, const Floats& x, int64_t x_stride, int64_t first,
                         int32_t m, int64_t split, const Floats* gated_residual = nullptr) {
  const int64_t stride = (c.cols + 31) / 32 * 32, y_stride = c.rows + 3;
  std::vector<int8_t> q(size_t(m * stride));
  Floats scales(size_t(m), 0.f), y(size_t((m - 1) * y_stride + c.rows), 777.f);
  std::vector<int32_t> sums(size_t(m * stride / 32));
  Floats own(x.begin() + first * x_stride, x.begin() + (first + m - 1) * x_stride + c.cols);
  ps::WeightView w = {c.packed.data(), c.scheme.layout, c.rows, c.cols};
  ps::QuantizedRows qx = {q.data(), scales.data(), sums.data(), stride};
  std::vector<int8_t> rounded;
  if (c.scheme.index == ps::LINEAR_BF16) {
    rounded.resize(size_t(m * stride * k->bf16_bytes));
    qx = {rounded.data(), nullptr, nullptr, stride * k->bf16_bytes};
    k->round_rows_bf16(own.data(), x_stride, c.cols, qx, 0, m / 2);
    k->round_rows_bf16(own.data(), x_stride, c.cols, qx, m / 2, m);
  }
  if (c.scheme.int8_activations) k->quantize_rows(own.data(), x_stride, c.cols, c.scheme.layout, qx, 0, m);
  ps::LinearArgs a = {w, c.bias.empty() ? nullptr : c.bias.data(), own.data(), x_stride, qx, y.data(), y_stride, m, 0, nullptr, 0};
  if (gated_residual) a.gated = 1, a.residual = gated_residual->data(), a.residual_stride = c.rows / 2;
  const int64_t tiles = (c.rows / (a.gated ? 2 : 1) + 15) / 16;
  for (int64_t t = 0; t < tiles; t += split) k->linear[c.scheme.index](a, t, t + split < tiles ? t + split : tiles);
  return y;
}

inline void compare_with_reference(const ps::Kernels* k, const LinearCase& c, const Floats& x, int64_t x_stride,
                                   const Floats& y, int32_t m, const std::string& what) {
  Floats w(size_t(c.rows * c.cols));
  k->unpack({c.packed.data(), c.scheme.layout, c.rows, c.cols}, 0, c.rows, w.data());
  for (int64_t i = 0; i < m; ++i) {
    Floats row(x.begin() + i * x_stride, x.begin() + i * x_stride + c.cols);
    float scale = int8_scale(row.data(), c.cols);
    for (float& v : row) {
      if (c.scheme.index == ps::LINEAR_BF16) v = round_bf16(v);
      if (c.scheme.int8_activations) v = int8_value(v, scale) * scale;
    }
    for (int64_t n = 0; n < c.rows; ++n) {
      double sum = c.bias.empty() ? 0 : c.bias[size_t(n)], size = std::fabs(sum);
      for (int64_t j = 0; j < c.cols; ++j) {
        double p = double(row[size_t(j)]) * w[size_t(n * c.cols + j)];
        sum += p;
        size += std::fabs(p);
      }
      expect_near(y[size_t(i * (c.rows + 3) + n)], sum, size * 3e-6 + 1e-30, what, k->level);
    }
    for (int64_t n = c.rows; n < c.rows + 3 && i + 1 < m; ++n)
      if (y[size_t(i * (c.rows + 3) + n)] != 777.f) fail(what, k->level, "wrote past the last column");
  }
}

inline void check_linear_case(const LinearCase& c, Random& random) {
  const int64_t x_stride = c.cols + 5;
  Floats x = random.normals(33 * x_stride);
  std::string shape =
      std::string("linear ") + c.scheme.name + " " + std::to_string(c.rows) + "x" + std::to_string(c.cols);
  Floats all = run_linear(ps::kernels_generic, c, x, x_stride, 0, 33, 1000);
  for (const ps::Kernels* k : levels()) {
    // A dot product of bf16 rounds differently: it is held to the reference and to itself.
    if (c.scheme.index == ps::LINEAR_BF16 && k->bf16_bytes == 2) all = run_linear(k, c, x, x_stride, 0, 33, 1000);
    for (int32_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 33}) {
      std::string what = shape + " m " + std::to_string(m);
      Floats y = run_linear(k, c, x, x_stride, 0, m, 1000);
      expect_same(y, Floats(all.begin(), all.begin() + long(y.size())), what, k->level);
      expect_same(run_linear(k, c, x, x_stride, 0, m, 3), y, what + " split", k->level);
      if (m == 7 || m == 33) compare_with_reference(k, c, x, x_stride, y, m, what);
    }
    for (int64_t i : {0, 6, 32}) {
      Floats one = run_linear(k, c, x, x_stride, i, 1, 2);
      expect_same(one, Floats(all.begin() + i * (c.rows + 3), all.begin() + i * (c.rows + 3) + c.rows),
                  shape + " alone", k->level);
    }
  }
}

// A row with a NaN or an infinity spoils its own outputs and no others.
inline void check_bad_rows(const LinearCase& c, Random& random) {
  Floats x = random.normals(4 * c.cols), clean = x;
  x[size_t(c.cols)] = NAN;
  x[size_t(2 * c.cols + c.cols / 2)] = -INFINITY;
  for (int64_t j = 0; j < c.cols; ++j) x[size_t(3 * c.cols + j)] = clean[size_t(3 * c.cols + j)] = 0.f;
  for (const ps::Kernels* k : levels()) {
    Floats y = run_linear(k, c, x, c.cols, 0, 4, 1000), expected = run_linear(k, c, clean, c.cols, 0, 4, 1000);
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t n = 0; n < c.rows; ++n) {
        size_t at = size_t(i * (c.rows + 3) + n);
        bool bad = i == 1 || i == 2;
        if (bad ? !std::isnan(y[at]) : !same_bits(y[at], expected[at])) fail("bad rows", k->level, c.scheme.name);
        if (i == 3 && c.bias.empty() && y[at] != 0.f) fail("zero row", k->level, c.scheme.name);
      }
  }
}

// Gated and residual forms against the plain linear and what follows it: equal in bits.
inline void check_epilogues(const LinearCase& c, Random& random) {
  const int64_t half = c.rows / 2, m = 7;
  Floats x = random.normals(m * c.cols), residual = random.normals(m * half);
  for (const ps::Kernels* k : levels()) {
    Floats plain = run_linear(k, c, x, c.cols, 0, int32_t(m), 1000), expected(size_t(m * half));
    const int64_t stride = c.rows + 3;
    ps::BinaryArgs silu = {plain.data(), plain.data() + half, stride, stride, expected.data(), half, half};
    k->silu_mul(silu, 0, m);
    ps::BinaryArgs add = {expected.data(), residual.data(), half, half, expected.data(), half, half};
    k->add(add, 0, m);
    Floats got = run_linear(k, c, x, c.cols, 0, int32_t(m), 3, &residual);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < half; ++j)
        if (!same_bits(got[size_t(i * stride + j)], expected[size_t(i * half + j)])) fail("gated", k->level, c.scheme.name);
  }
}

inline void check_linear() {
  Random random = {2};
  const int64_t shapes[][2] = {{1, 1}, {16, 32}, {17, 33}, {100, 64}, {35, 7}, {150, 257}, {96, 70}};
  for (const Scheme& scheme : kSchemes)
    for (auto [rows, cols] : shapes) {
      Source s = make_source(PS_F32, random.normals(rows * cols, 0.05f));
      LinearCase c = {scheme, rows, cols, pack_rows(ps::kernels_generic, scheme.layout, rows, cols, s, 0), {}};
      if (rows != 16) c.bias = random.normals(rows);
      check_linear_case(c, random);
      if (scheme.int8_activations) check_bad_rows(c, random);
      if (rows % 32 == 0) check_epilogues(c, random);
    }
}

}  // namespace check

#endif
