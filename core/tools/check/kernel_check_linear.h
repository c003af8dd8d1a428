// Checks of pack, unpack, embedding, quantize_rows and linear.
#ifndef PENSTOCK_KERNEL_CHECK_LINEAR_H
#define PENSTOCK_KERNEL_CHECK_LINEAR_H

#include "kernel_check.h"

namespace check {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// Written again here, so that an error in base/tiles.h is found.
inline int64_t bytes_of(int32_t layout, int64_t rows, int64_t cols) {
  int64_t tiles = (rows + 15) / 16;
  switch (layout) {
    case PS_ROWS_F32: return rows * cols * 4;
    case PS_ROWS_F16:
    case PS_ROWS_BF16: return rows * cols * 2;
    case PS_T16_F32: return tiles * cols * 64;
    case PS_T16_F16: return tiles * cols * 32;
    case PS_T16_BF16: return tiles * ((cols + 1) / 2) * 64;
    case PS_T16_I8: return tiles * (64 + (cols + 3) / 4 * 64);
    case PS_T16_Q8_0: return tiles * ((cols + 63) / 64 * 1088);
    case PS_T16_Q4_0: return tiles * ((cols + 63) / 64 * 576);
    case PS_T16_Q4_K: return tiles * (cols / 256 * 2368);
    case PS_T16_Q5_K: return tiles * (cols / 256 * 2880);
    case PS_T16_Q6_K: return tiles * (cols / 256 * 3392);
    case PS_T16_MXFP4: return tiles * ((cols + 127) / 128 * 1088);
    case PS_T16_UINT4: return tiles * ((cols + 127) / 128 * 1216);
    case PS_T16_Q4_1: return tiles * ((cols + 63) / 64 * 640);
    case PS_T16_Q5_0: return tiles * ((cols + 63) / 64 * 704);
    case PS_T16_Q5_1: return tiles * ((cols + 63) / 64 * 768);
    case PS_T16_IQ4_NL: return tiles * ((cols + 63) / 64 * 576);
    case PS_T16_IQ4_XS: return tiles * (cols / 256 * 2240);
    case PS_T16_Q2_K: return tiles * (cols / 256 * 1344);
    case PS_T16_Q3_K: return tiles * (cols / 256 * 1856);
    case PS_T16_NVFP4: return tiles * ((cols + 255) / 256 * 2368);
    case PS_T16_TQ2_0: return tiles * (cols / 256 * 1088);
    case PS_T16_TQ1_0: return tiles * (cols / 256 * 896);
    case PS_T16_Q2_0: return tiles * ((cols + 127) / 128 * 576);
    case PS_T16_Q1_0: return tiles * ((cols + 255) / 256 * 576);
    default: return tiles * (64 + (cols + 63) / 64 * 576);
  }
}

struct Source {
  int32_t dtype;
  Bytes bytes;
  Floats values;  // exactly what the bytes encode
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
    // A copy of just these rows, so that AddressSanitizer finds a read past them.
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
    case PS_T16_F32: return 0;
    case PS_ROWS_F16:
    case PS_T16_F16: return std::fabs(value) * 0.0005 + 3e-8;
    case PS_ROWS_BF16:
    case PS_T16_BF16: return std::fabs(value) * 0.004;
    case PS_T16_I8: return largest / 127. * 0.5001;
    default:
      return largest / 127. * 20;  // a clipped value loses more than half a step; check_int4_error bounds the sum
  }
}

// The sum of squared errors of a group of 4-bit values is no larger than with a step and offset that clip nothing: the
// step is a fifteenth of the range, rounded up to a whole multiple of the row's unit, the offset is rounded to one.
inline void check_int4_error(const Floats& source, const Floats& got, int64_t rows, int64_t cols,
                             const std::string& what, const char* level) {
  for (int64_t r = 0; r < rows; ++r) {
    float largest = 0;
    for (int64_t c = 0; c < cols; ++c) largest = std::fmax(largest, std::fabs(source[size_t(r * cols + c)]));
    const double unit = double(largest) / 127.;
    for (int64_t c = 0; c < cols; c += 32) {
      double low = 1e300, high = -1e300, error = 0;
      const int64_t n = c + 32 < cols ? 32 : cols - c;
      for (int64_t i = r * cols + c; i < r * cols + c + n; ++i) {
        low = std::fmin(low, double(source[size_t(i)]));
        high = std::fmax(high, double(source[size_t(i)]));
        error += std::pow(double(got[size_t(i)]) - double(source[size_t(i)]), 2);
      }
      const double step = (high - low) / 15. + unit, bound = double(n) * std::pow(0.5 * step + 0.5 * unit, 2);
      if (!(error <= bound * 1.0001)) fail(what, level, "a group is further from its source than plain rounding");
    }
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
    if (layout == PS_T16_I4G32) check_int4_error(s.values, values, rows, cols, "unpack " + what, k->level);
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

// Rows of very different magnitudes, zeros, and values that are not finite: every level writes the same bytes, and
// finite rows stay finite.
inline void check_extreme_rows() {
  Floats values(size_t(32 * 16), 0.f);
  const float extremes[] = {0.f, 1e-44f, 1e-30f, 1e-7f, 1.f, 6e4f, 1e30f, 3e37f, INFINITY, -INFINITY, NAN};
  Random random = {11};
  for (int64_t r = 0; r < 16; ++r)
    for (int64_t c = 0; c < 32; ++c)
      values[size_t(r * 32 + c)] = r < 8        ? extremes[r] * random.normal()
                                   : c % 8 == 0 ? extremes[r % 11]
                                                : random.normal();
  Source s = make_source(PS_F32, values);
  for (int32_t layout : {PS_T16_I4G32, PS_T16_I8}) {
    Bytes expected = pack_rows(ps::kernels_generic, layout, 16, 32, s, 0);
    for (const ps::Kernels* k : levels()) {
      expect_same(pack_rows(k, layout, 16, 32, s, 0), expected, "pack extremes", k->level);
      Floats got(size_t(16 * 32));
      k->unpack({expected.data(), layout, 16, 32}, 0, 16, got.data());
      for (size_t i = 0; i < got.size(); ++i) {
        const size_t r = i / 32;
        const bool number = r < 8 || std::isfinite(extremes[r % 11]);
        if (std::isfinite(got[i]) != number) fail("pack extremes", k->level, "row " + std::to_string(r));
      }
    }
  }
}

// Values that exceed int8, as in a damaged file, wrap around modulo 256.
inline void check_wrapping_lines() {
  Bytes packed(size_t(bytes_of(PS_T16_I4G32, 16, 64)), 0);
  Random random = {12};
  for (uint8_t& b : packed) b = uint8_t(random.next());
  for (int i = 0; i < 16; ++i) {
    const float one = 1.f;
    std::memcpy(&packed[size_t(4 * i)], &one, 4);
  }
  for (const ps::Kernels* k : levels()) {
    Floats got(size_t(16 * 64));
    k->unpack({packed.data(), PS_T16_I4G32, 16, 64}, 0, 16, got.data());
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 64; ++c) {
        const uint8_t* line = &packed[size_t(64 + 4 * r + 2 * (c / 32))];
        const uint8_t byte = packed[size_t(128 + 256 * (c / 32) + 64 * (c % 16 / 4) + 4 * r + c % 4)];
        const int nibble = c % 32 < 16 ? byte & 15 : byte >> 4;
        if (got[size_t(64 * r + c)] != float(int8_t(uint8_t(line[0] * nibble + line[1]))))
          return fail("wrapping lines", k->level, "row " + std::to_string(r) + " column " + std::to_string(c));
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
  check_extreme_rows();
  check_wrapping_lines();
}

// ---- linear ----------------------------------------------------------------------------------------------------

struct Scheme {
  const char* name;
  ps::LinearScheme index;
  int32_t layout;
  int planes;  // for integer activations; 0: floats
};
constexpr Scheme kSchemes[] = {
    {"f32", ps::LINEAR_F32, PS_T16_F32, 0},          {"f16", ps::LINEAR_F16, PS_T16_F16, 0},
    {"bf16", ps::LINEAR_BF16, PS_T16_BF16, 0},       {"w8a16", ps::LINEAR_W8A16, PS_T16_I8, 2},
    {"w8a8", ps::LINEAR_W8A8, PS_T16_I8, 1},         {"w4a16", ps::LINEAR_W4A16, PS_T16_I4G32, 2},
    {"w4a8", ps::LINEAR_W4A8, PS_T16_I4G32, 1},      {"q8_0", ps::LINEAR_Q8_0, PS_T16_Q8_0, 0},
    {"q4_0", ps::LINEAR_Q4_0, PS_T16_Q4_0, 0},       {"q4_k", ps::LINEAR_Q4_K, PS_T16_Q4_K, 0},
    {"q5_k", ps::LINEAR_Q5_K, PS_T16_Q5_K, 0},       {"q6_k", ps::LINEAR_Q6_K, PS_T16_Q6_K, 0},
    {"mxfp4", ps::LINEAR_MXFP4, PS_T16_MXFP4, 0},    {"uint4", ps::LINEAR_UINT4, PS_T16_UINT4, 0},
    {"q4_1", ps::LINEAR_Q4_1, PS_T16_Q4_1, 0},       {"q5_0", ps::LINEAR_Q5_0, PS_T16_Q5_0, 0},
    {"q5_1", ps::LINEAR_Q5_1, PS_T16_Q5_1, 0},       {"iq4_nl", ps::LINEAR_IQ4_NL, PS_T16_IQ4_NL, 0},
    {"iq4_xs", ps::LINEAR_IQ4_XS, PS_T16_IQ4_XS, 0}, {"q2_k", ps::LINEAR_Q2_K, PS_T16_Q2_K, 0},
    {"q3_k", ps::LINEAR_Q3_K, PS_T16_Q3_K, 0},       {"nvfp4", ps::LINEAR_NVFP4, PS_T16_NVFP4, 0},
    {"tq2_0", ps::LINEAR_TQ2_0, PS_T16_TQ2_0, 0},    {"tq1_0", ps::LINEAR_TQ1_0, PS_T16_TQ1_0, 0},
    {"q2_0", ps::LINEAR_Q2_0, PS_T16_Q2_0, 0},       {"q1_0", ps::LINEAR_Q1_0, PS_T16_Q1_0, 0},
};
inline bool has_blocks(const Scheme& scheme) { return scheme.layout >= PS_T16_Q8_0; }
inline int64_t block_columns(const Scheme& scheme) {
  if (!has_blocks(scheme)) return 1;
  return (scheme.layout >= PS_T16_Q4_K && scheme.layout <= PS_T16_Q6_K) || scheme.layout >= PS_T16_IQ4_XS ? 256 : 32;
}

// A weight: of floats, or of blocks of random bytes with scales that are small numbers.
inline Bytes make_weight(const Scheme& scheme, int64_t rows, int64_t cols, Random& random) {
  if (!has_blocks(scheme)) {
    const Source s = make_source(PS_F32, random.normals(rows * cols, 0.05f));
    Bytes packed = pack_rows(ps::kernels_generic, scheme.layout, rows, cols, s, 0);
    const size_t line_bytes = size_t(cols) / 4 * 64, tile_bytes = size_t(bytes_of(scheme.layout, 16, cols));
    for (size_t at = 64; scheme.layout == PS_T16_I8 && at < packed.size(); at += tile_bytes)
      for (size_t i = 0; i < line_bytes; i += 3) packed[at + i] = 0x80;  // -128, which only other tools write
    return packed;
  }
  Bytes packed(size_t(bytes_of(scheme.layout, rows, cols)));
  for (uint8_t& b : packed) b = uint8_t(random.next());
  if (scheme.layout == PS_T16_MXFP4) {
    for (size_t at = 0; at < packed.size(); at += 1088)
      for (size_t i = 0; i < 64; ++i) packed[at + i] = uint8_t(118 + packed[at + i] % 8);
    return packed;
  }
  if (scheme.layout >= PS_T16_NVFP4 && scheme.layout <= PS_T16_TQ1_0) {  // f32 scales; NVFP4 has e4m3 ones too
    const size_t step = size_t(bytes_of(scheme.layout, 16, 256));
    for (size_t at = 0; at < packed.size(); at += step) {
      const Floats scales = random.normals(16, 0.01f);
      std::memcpy(&packed[at], scales.data(), 64);
      for (size_t i = 64; scheme.layout == PS_T16_NVFP4 && i < 320; ++i) packed[at + i] = uint8_t(packed[at + i] % 127);
    }
    return packed;
  }
  const bool zeros = scheme.layout == PS_T16_UINT4;
  const bool two_lines = zeros || scheme.layout == PS_T16_Q4_1 || scheme.layout == PS_T16_Q5_1;
  const bool is_quad = zeros || scheme.layout == PS_T16_Q2_0;
  const size_t step = size_t(bytes_of(scheme.layout, 16, is_quad ? 128 : block_columns(scheme) == 256 ? 256 : 64));
  for (size_t at = 0; at < packed.size(); at += step) {
    for (size_t i = 128; zeros && i < 192; ++i) packed[at + i] = uint8_t(packed[at + i] % 17);
    for (size_t i = 0; i < (two_lines ? 128 : 64); i += 2) {
      const Half h = Half(0.01f * random.normal());
      std::memcpy(&packed[at + i], &h, 2);
    }
  }
  return packed;
}

struct LinearCase {
  const Scheme& scheme;
  int64_t rows, cols;
  Bytes packed;
  Floats bias;
};

// Rows first..first+m of x, and tiles in steps of `split`; columns past the weight's must stay unchanged.
inline Floats run_linear(const ps::Kernels* k, const LinearCase& c, const Floats& x, int64_t x_stride, int64_t first,
                         int32_t m, int64_t split, const Floats* residual = nullptr, bool gated = true) {
  const int64_t stride = (c.cols + 63) / 64 * 64, y_stride = c.rows + 3, planes = c.scheme.planes;
  std::vector<int8_t> q(size_t(m * stride * planes));
  Floats scales(size_t(m), 0.f), y(size_t((m - 1) * y_stride + c.rows), 777.f);
  std::vector<int32_t> sums(size_t(m * planes));
  std::vector<int16_t> group_sums(size_t(m * stride / 32 * planes));
  Floats own(x.begin() + first * x_stride, x.begin() + (first + m - 1) * x_stride + c.cols);
  ps::WeightView w = {c.packed.data(), c.scheme.layout, c.rows, c.cols};
  ps::QuantizedRows qx = {q.data(), scales.data(), sums.data(), group_sums.data(), stride, int32_t(planes)};
  if (planes) k->quantize_rows(own.data(), x_stride, c.cols, m, c.scheme.layout, qx, 0, m);
  std::vector<int8_t> rounded;
  if (has_blocks(c.scheme)) {
    const int64_t row_bytes = (c.cols / 32 + 1) / 2 * 2 * int64_t(sizeof(ps::RoundedGroup));
    rounded.resize(size_t(m * row_bytes));
    qx = {rounded.data(), nullptr, nullptr, nullptr, row_bytes, 0};
    k->quantize_groups(own.data(), x_stride, c.cols, qx, 0, m / 2);
    k->quantize_groups(own.data(), x_stride, c.cols, qx, m / 2, m);
  }
  if (c.scheme.index == ps::LINEAR_BF16) {
    const int64_t row_bytes = (c.cols + 31) / 32 * 32 * k->bf16_bytes;
    rounded.resize(size_t(m * row_bytes));
    qx = {rounded.data(), nullptr, nullptr, nullptr, row_bytes, 0};
    k->round_rows_bf16(own.data(), x_stride, c.cols, m, qx, 0, m / 2);
    k->round_rows_bf16(own.data(), x_stride, c.cols, m, qx, m / 2, m);
  }
  Bytes panel(size_t(k->linear_panel_bytes(c.scheme.layout, c.cols, m, int32_t(planes ? planes : 1))));
  ps::LinearArgs a = {w,          c.bias.empty() ? nullptr : c.bias.data(),
                      own.data(), x_stride,
                      qx,         y.data(),
                      y_stride,   m,
                      0,          nullptr,
                      0,          panel.data()};
  if (residual) {
    a.gated = gated;
    a.residual_stride = gated ? c.rows / 2 : c.rows;
    if (!residual->empty()) a.residual = residual->data();
  }
  const int64_t tiles = (c.rows / (a.gated ? 2 : 1) + 15) / 16;
  for (int64_t t = 0; t < tiles; t += split) k->linear[c.scheme.index](a, t, t + split < tiles ? t + split : tiles);
  return y;
}

// Activations as the integer schemes round them: to 8 bits, or to 16.
inline void round_activations(Floats& row, int planes) {
  if (!planes) return;
  const float limit = planes == 2 ? 32512.f : 127.f;
  float most = 0.f;
  for (float v : row) most = std::fmax(most, std::fabs(v));
  const float scale = most / limit, inverse = scale > 0 ? 1.f / scale : 0.f;
  for (float& v : row) v = std::nearbyint(std::fmin(std::fmax(v * inverse, -limit), limit)) * scale;
}

// Activations as rounded for GGUF's block types: each 32 have a scale.
inline void round_groups(Floats& row) {
  for (size_t i = 0; i < row.size(); i += 32) {
    Floats group(row.begin() + long(i), row.begin() + long(i + 32));
    round_activations(group, 1);
    std::copy(group.begin(), group.end(), row.begin() + long(i));
  }
}

inline void compare_with_reference(const ps::Kernels* k, const LinearCase& c, const Floats& x, int64_t x_stride,
                                   const Floats& y, int32_t m, const std::string& what) {
  Floats w(size_t(c.rows * c.cols));
  k->unpack({c.packed.data(), c.scheme.layout, c.rows, c.cols}, 0, c.rows, w.data());
  for (int64_t i = 0; i < m; ++i) {
    Floats row(x.begin() + i * x_stride, x.begin() + i * x_stride + c.cols);
    for (float& v : row) {
      if (c.scheme.index == ps::LINEAR_BF16) v = round_bf16(v);
    }
    round_activations(row, c.scheme.planes);
    if (has_blocks(c.scheme)) round_groups(row);
    for (int64_t n = 0; n < c.rows; ++n) {
      double sum = c.bias.empty() ? 0 : c.bias[size_t(n)], size = std::fabs(sum);
      for (int64_t j = 0; j < c.cols; ++j) {
        double p = double(row[size_t(j)]) * w[size_t(n * c.cols + j)];
        sum += p;
        size += std::fabs(p);
      }
      expect_near(y[size_t(i * (c.rows + 3) + n)], sum, size * 3e-6 + 1e-30, what, k->level);
    }
  }
}

inline void check_columns_past(const ps::Kernels* k, const LinearCase& c, const Floats& y, int32_t m,
                               const std::string& what) {
  for (int64_t i = 0; i + 1 < m; ++i)
    for (int64_t n = c.rows; n < c.rows + 3; ++n)
      if (y[size_t(i * (c.rows + 3) + n)] != 777.f) fail(what, k->level, "wrote past the last column");
}

// Batches of these numbers of rows, the largest last: equal at every level, and the largest close to the reference.
inline void check_linear_case(const LinearCase& c, Random& random, const std::vector<int32_t>& steps) {
  const int64_t x_stride = c.cols + 5;
  const int32_t most = steps.back();
  Floats x = random.normals(most * x_stride);
  std::string shape =
      std::string("linear ") + c.scheme.name + " " + std::to_string(c.rows) + "x" + std::to_string(c.cols);
  Floats all = run_linear(ps::kernels_generic, c, x, x_stride, 0, most, 1000);
  for (const ps::Kernels* k : levels()) {
    // A dot product of bf16 rounds differently: it is compared with the reference and with itself.
    const bool has_own_bits = c.scheme.index == ps::LINEAR_BF16 && k->bf16_bytes == 2;
    if (has_own_bits) all = run_linear(k, c, x, x_stride, 0, most, 1000);
    for (int32_t m : steps) {
      if (leaves_out(k, m, most)) continue;
      std::string what = shape + " m " + std::to_string(m);
      // `all`: the generic level's result for the largest number of rows.
      Floats y = k == ps::kernels_generic && m == most ? all : run_linear(k, c, x, x_stride, 0, m, 1000);
      expect_same(y, Floats(all.begin(), all.begin() + long(y.size())), what, k->level);
      expect_same(run_linear(k, c, x, x_stride, 0, m, 3), y, what + " split", k->level);
      check_columns_past(k, c, y, m, what);
      // Smaller batches equal its first rows bit for bit, and other levels have the bits of the generic one.
      if (m == most && (k == ps::kernels_generic || has_own_bits))
        compare_with_reference(k, c, x, x_stride, y, m, what);
    }
    for (int64_t i : {0, 6, most - 1}) {
      Floats one = run_linear(k, c, x, x_stride, i, 1, 2);
      expect_same(one, Floats(all.begin() + i * (c.rows + 3), all.begin() + i * (c.rows + 3) + c.rows),
                  shape + " alone", k->level);
    }
  }
}

// A row with a NaN or an infinity affects its own outputs only.
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

// Gated and residual forms equal the plain linear followed by the separate op, bit for bit.
inline void check_epilogue(const LinearCase& c, Random& random, int64_t m, bool gated, bool added) {
  const int64_t wide = gated ? c.rows / 2 : c.rows, stride = c.rows + 3;
  const Floats x = random.normals(m * c.cols), residual = added ? random.normals(m * wide) : Floats{};
  for (const ps::Kernels* k : levels()) {
    if (leaves_out(k, m, 0)) continue;
    const Floats plain = run_linear(k, c, x, c.cols, 0, int32_t(m), 1000);
    Floats expected(size_t(m * wide));
    for (int64_t i = 0; i < m; ++i) std::copy_n(plain.begin() + i * stride, wide, expected.begin() + i * wide);
    if (gated) k->silu_mul({plain.data(), plain.data() + wide, stride, stride, expected.data(), wide, wide}, 0, m);
    if (added) k->add({expected.data(), residual.data(), wide, wide, expected.data(), wide, wide}, 0, m);
    for (int64_t split : {3, 1000}) {
      const Floats got = run_linear(k, c, x, c.cols, 0, int32_t(m), split, &residual, gated);
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < wide; ++j)
          if (!same_bits(got[size_t(i * stride + j)], expected[size_t(i * wide + j)])) {
            const std::string what =
                std::string(gated ? "gated" : "plain") + (added ? " with a residual " : " ") + c.scheme.name;
            return fail(what, k->level, "token " + std::to_string(i) + " output " + std::to_string(j));
          }
    }
  }
}

inline void check_epilogues(LinearCase c, Random& random) {
  for (bool bias : {true, false}) {
    if (!bias) c.bias.clear();
    for (int64_t m : whole ? std::vector<int64_t>{1, 2, 4, 7, 8, 13, 16, 45} : std::vector<int64_t>{2, 3, 7})
      for (bool gated : {true, false})
        for (bool added : {true, false})
          if (!gated || c.rows % 32 == 0) check_epilogue(c, random, m, gated, added);
  }
}

inline void check_linear() {
  Random random = {2};
  const std::vector<int> every = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 33};
  const std::vector<int> some = {1, 2, 3, 4, 5, 6, 7, 8, 13, 33};  // every remainder of the blocks of 4, 6 and 8 rows
  const int64_t shapes[][2] = {{1, 1},   {16, 32},   {17, 33},  {100, 64}, {35, 7},  {150, 257},
                               {96, 70}, {608, 130}, {33, 256}, {96, 512}, {24, 544}};
  for (const Scheme& scheme : kSchemes)
    for (auto [rows, cols] : shapes) {
      if (cols % block_columns(scheme)) continue;
      LinearCase c = {scheme, rows, cols, make_weight(scheme, rows, cols, random), {}};
      if (rows != 16) c.bias = random.normals(rows);
      check_linear_case(c, random, whole ? every : some);
      if (scheme.planes || has_blocks(scheme)) check_bad_rows(c, random);
      if (rows >= 96) check_epilogues(c, random);
    }
  // Realistic widths and prompt lengths, with remainders in every dimension: 67 rows are two panels of 32 and a part.
  const int64_t large[][2] = {{40, 1024}, {48, 2817}};
  for (const Scheme& scheme : kSchemes)
    for (auto [rows, cols] : large) {
      if (cols % block_columns(scheme)) continue;
      LinearCase c = {scheme, rows, cols, make_weight(scheme, rows, cols, random), {}};
      check_linear_case(c, random, whole ? std::vector<int>{1, 10, 64, 131} : std::vector<int>{1, 67});
    }
}

}  // namespace check

#endif
