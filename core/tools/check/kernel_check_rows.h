// Checks of norms, activations, rope, and the reductions for sampling.
#ifndef PENSTOCK_KERNEL_CHECK_ROWS_H
#define PENSTOCK_KERNEL_CHECK_ROWS_H

#include "kernel_check.h"

namespace check {

inline Floats run_norm(const ps::Kernels* k, bool layer, const Floats& x, const Floats& residual, const Floats& weight,
                       int64_t groups, int64_t dim, Floats* sum) {
  const int64_t rows = 3, cols = groups * dim;
  Floats y(x.size(), 9.f);
  sum->assign(x.size(), 9.f);
  bool with = !residual.empty();
  ps::NormArgs a = {x.data(),
                    cols,
                    with ? residual.data() : nullptr,
                    cols,
                    sum->data(),
                    cols,
                    weight.data(),
                    layer ? 0 : dim,
                    layer ? weight.data() : nullptr,
                    y.data(),
                    cols,
                    groups,
                    dim,
                    1e-5f};
  auto norm = layer ? k->layer_norm : k->rms_norm;
  norm(a, 0, 1);
  norm(a, 1, rows);
  return y;
}

inline void check_norm(bool layer, int64_t groups, int64_t dim, bool with_residual, Random& random) {
  const int64_t cols = groups * dim;
  Floats x = random.normals(3 * cols), residual = with_residual ? random.normals(3 * cols) : Floats(),
         weight = random.normals(cols);
  Floats sum, expected = run_norm(ps::kernels_generic, layer, x, residual, weight, groups, dim, &sum);
  std::string what = std::string(layer ? "layer_norm " : "rms_norm ") + std::to_string(dim);
  for (const ps::Kernels* k : levels()) {
    Floats y = run_norm(k, layer, x, residual, weight, groups, dim, &sum);
    expect_same(y, expected, what, k->level);
    for (int64_t item = 0; item < 3 * groups; ++item) {
      double mean = 0, square = 0;
      std::vector<double> v;
      for (int64_t i = 0; i < dim; ++i)
        v.push_back(double(x[size_t(item * dim + i)]) + (with_residual ? residual[size_t(item * dim + i)] : 0.f));
      for (double e : v) mean += layer ? e / double(dim) : 0;
      for (double e : v) square += (e - mean) * (e - mean);
      for (int64_t i = 0; i < dim; ++i) {
        const float w = weight[size_t(item % groups * dim + i)];  // each group has its own weights
        double r = (v[size_t(i)] - mean) / std::sqrt(square / double(dim) + 1e-5) * w + (layer ? w : 0);
        expect_near(y[size_t(item * dim + i)], r, 2e-5, what, k->level);
        if (with_residual) expect_near(sum[size_t(item * dim + i)], v[size_t(i)], 1e-6, what + " sum", k->level);
      }
    }
  }
}

using Function = double (*)(double);
using Apply = void (*)(const ps::Kernels*, const Floats&, Floats&);

inline void check_function(const char* what, const Floats& x, Apply apply, Function reference, double relative,
                           double absolute) {
  Floats expected(x.size());
  apply(ps::kernels_generic, x, expected);
  for (const ps::Kernels* k : levels()) {
    Floats y(x.size());
    apply(k, x, y);
    expect_same(y, expected, what, k->level);
    for (size_t i = 0; i < x.size(); ++i) {
      double r = reference(x[i]);
      if (std::isfinite(r))
        expect_near(y[i], r, std::fabs(r) * relative + absolute, std::string(what) + " of " + std::to_string(x[i]),
                    k->level);
      else expect_same(Floats{y[i]}, Floats{float(r)}, what, k->level);
    }
  }
}

inline void check_functions() {
  Floats x;
  for (int i = -20000; i <= 20000; ++i) x.push_back(float(i) * 0.0051f);
  for (float v : {1e-30f, -1e-8f, 87.f, 88.7f, -87.5f, -103.f, -500.f}) x.push_back(v);
  Floats wild = x;
  for (float v : {INFINITY, -INFINITY, NAN, 100.f}) wild.push_back(v);
  check_function(
      "exp", wild,
      [](const ps::Kernels* k, const Floats& v, Floats& y) { k->exp_sum(v.data(), int64_t(v.size()), 0, 1, y.data()); },
      [](double v) { return double(float(std::exp(v))); }, 2.5e-7, 2e-45);
  check_function(
      "gelu erf", x,
      [](const ps::Kernels* k, const Floats& v, Floats& y) {
        k->gelu({v.data(), 0, y.data(), 0, int64_t(v.size())}, 0, 0, 1);
      },
      [](double v) { return v * 0.5 * (1 + std::erf(v * 0.70710678118654752)); }, 4e-7, 1e-6);
  check_function(
      "gelu tanh", x,
      [](const ps::Kernels* k, const Floats& v, Floats& y) {
        k->gelu({v.data(), 0, y.data(), 0, int64_t(v.size())}, 1, 0, 1);
      },
      [](double v) { return v * 0.5 * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); }, 2e-6, 1e-6);
  check_function(
      "softcap", x,
      [](const ps::Kernels* k, const Floats& v, Floats& y) {
        k->softcap({v.data(), 0, y.data(), 0, int64_t(v.size())}, 30.f, 0, 1);
      },
      [](double v) { return 30 * std::tanh(v / 30); }, 6e-7, 1e-36);
  check_function(
      "clamped swiglu", x,
      [](const ps::Kernels* k, const Floats& v, Floats& y) {
        Floats pairs;
        for (float gate : v) pairs.insert(pairs.end(), {gate, gate * 0.5f});
        k->clamped_swiglu({pairs.data(), 0, y.data(), 0, int64_t(v.size())}, 1.702f, 7.f, 0, 1);
      },
      [](double v) {
        const double gate = std::fmin(v, 7), up = std::fmax(std::fmin(v * 0.5, 7), -7);
        return (up + 1) * gate / (1 + std::exp(-double(1.702f) * gate));
      },
      1e-5, 1e-36);  // the rounded product enters an exponential
  check_function(
      "silu", x,
      [](const ps::Kernels* k, const Floats& v, Floats& y) {
        Floats one(v.size(), 1.f);
        k->silu_mul({v.data(), one.data(), 0, 0, y.data(), 0, int64_t(v.size())}, 0, 1);
      },
      [](double v) { return v / (1 + std::exp(-v)); }, 4e-7, 1e-36);
}

inline void check_binaries(Random& random) {
  for (int64_t cols : {1, 15, 16, 33, 100}) {
    Floats a = random.normals(2 * cols), b = random.normals(2 * cols), y(a.size());
    for (const ps::Kernels* k : levels()) {
      k->add({a.data(), b.data(), cols, cols, y.data(), cols, cols}, 0, 2);
      for (size_t i = 0; i < y.size(); ++i) expect_near(y[i], double(a[i] + b[i]), 0, "add", k->level);
      k->mul({a.data(), b.data(), cols, cols, y.data(), cols, cols}, 0, 2);
      for (size_t i = 0; i < y.size(); ++i) expect_near(y[i], double(a[i] * b[i]), 0, "mul", k->level);
    }
  }
}

// Compares every level with the generic one; tests/ops compares that with the references.
inline void check_scaled_rows(int64_t dim, Random& random) {
  const Floats a = random.normals(3 * dim), b = random.normals(3 * dim);
  using Apply = void (*)(const ps::Kernels*, const ps::BinaryArgs&);
  const Apply kinds[] = {
      [](const ps::Kernels* k, const ps::BinaryArgs& args) {
        ps::BinaryArgs one = args;
        one.b_stride = 0;
        k->scale_channels(one, 0, 3);
      },
      [](const ps::Kernels* k, const ps::BinaryArgs& args) {
        k->scale_all({args.a, args.a_stride, args.y, args.y_stride, args.cols}, args.b[0], 0, 3);
      },
      [](const ps::Kernels* k, const ps::BinaryArgs& args) { k->match_rms(args, 1e-5f, 0, 3); },
      [](const ps::Kernels* k, const ps::BinaryArgs& args) {
        k->gaussian_topk({args.a, args.a_stride, args.y, args.y_stride, args.cols}, 0.5f, 0, 3);
      },
  };
  const char* names[] = {"scale_channels", "scale_all", "match_rms", "gaussian_topk"};
  for (size_t kind = 0; kind < 4; ++kind) {
    Floats expected(a.size(), 9.f), y(a.size(), 9.f);
    kinds[kind](ps::kernels_generic, {a.data(), b.data(), dim, dim, expected.data(), dim, dim});
    for (const ps::Kernels* k : levels()) {
      kinds[kind](k, {a.data(), b.data(), dim, dim, y.data(), dim, dim});
      expect_same(y, expected, std::string(names[kind]) + " " + std::to_string(dim), k->level);
    }
  }
}

inline void check_rotary(Random& random) {
  for (int64_t half : {1, 8, 20, 64}) {
    const int64_t heads = 3, head_dim = 2 * half + 5, rows = 8;
    const int32_t positions[rows] = {0, 1, 2, 31, 4095, 131071, 1048575, 524287};
    Floats inv_freq;
    for (int64_t i = 0; i < half; ++i) inv_freq.push_back(float(std::pow(10000., -double(i) / double(half))));
    Floats x = random.normals(rows * heads * head_dim), first, first_turned[2];
    for (const ps::Kernels* k : levels()) {
      Floats table(size_t(rows * 2 * half)), y(x.size());
      k->rotary_embedding(positions, inv_freq.data(), half, 1.f, table.data(), 2 * half, 0, rows);
      if (first.empty()) first = table;
      expect_same(table, first, "rotary_embedding", k->level);
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = 0; i < half; ++i) {
          double angle = float(positions[t]) * inv_freq[size_t(i)];
          expect_near(table[size_t(t * 2 * half + i)], std::cos(angle), 6e-8, "cos of " + std::to_string(angle),
                      k->level);
          expect_near(table[size_t(t * 2 * half + half + i)], std::sin(angle), 6e-8, "sin of " + std::to_string(angle),
                      k->level);
        }
      for (int interleaved : {0, 1}) {
        ps::RopeArgs a = {x.data(), heads * head_dim, table.data(), 2 * half,   y.data(), heads * head_dim,
                          heads,    head_dim,         half,         interleaved};
        k->rope(a, 0, 3);
        k->rope(a, 3, rows);
        if (first_turned[interleaved].empty()) first_turned[interleaved] = y;
        expect_same(y, first_turned[interleaved], "rope", k->level);
        Floats in_place = x;
        a.x = a.y = in_place.data();
        k->rope(a, 0, rows);
        expect_same(in_place, y, "rope in place", k->level);
        for (int64_t t = 0; t < rows; ++t)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < half; ++i) {
              const size_t at = size_t((t * heads + h) * head_dim);
              const size_t p = at + size_t(interleaved ? 2 * i : i),
                           r = at + size_t(interleaved ? 2 * i + 1 : i + half);
              double c = table[size_t(t * 2 * half + i)], s = table[size_t(t * 2 * half + half + i)];
              expect_near(y[p], x[p] * c - x[r] * s, 1e-6, "rope", k->level);
              expect_near(y[r], x[r] * c + x[p] * s, 1e-6, "rope", k->level);
            }
      }
    }
  }
}

inline void check_reductions(Random& random) {
  for (int64_t n : {1, 7, 16, 17, 1003}) {
    Floats x = random.normals(n);
    x[size_t(n / 2)] = 50.f;
    x[size_t(n - 1)] = 50.f;
    float sum = ps::kernels_generic->exp_sum(x.data(), n, 50.f, 0.5f, nullptr);
    double reference = 0;
    for (float v : x) reference += std::exp((double(v) - 50) * 0.5);
    for (const ps::Kernels* k : levels()) {
      if (k->argmax(x.data(), n) != int32_t(n / 2)) fail("argmax", k->level, "not the first of equals");
      if (k->max(x.data(), n) != 50.f) fail("max", k->level, "not the largest");
      float s = k->exp_sum(x.data(), n, 50.f, 0.5f, nullptr);
      expect_same(Floats{s}, Floats{sum}, "exp_sum", k->level);
      expect_near(s, reference, 1e-6 * reference, "exp_sum", k->level);
      Floats low(size_t(n), -INFINITY);
      if (k->argmax(low.data(), n) != 0) fail("argmax", k->level, "of minus infinities");
      Bytes bytes(size_t(n), 3);
      if (n < 64 && k->read_bytes(bytes.data(), n) != uint64_t(3 * n)) fail("read_bytes", k->level, "wrong sum");
      float sink = 0.5f;
      for (int32_t dtype : {PS_F32, PS_BF16, PS_I8})
        if (k->peak(dtype, 10, &sink) <= 0) fail("peak", k->level, "no operations");
    }
  }
}

// Rotation in blocks of 32 columns: x has exactly this length, so that a read past it is found.
inline void check_rotation(int64_t cols, Random& random) {
  const Floats x = random.normals(cols);
  Floats expected(x.size());
  ps::kernels_generic->rotate_row(x.data(), expected.data(), cols);
  for (const ps::Kernels* k : levels()) {
    Floats y(x.size(), 9.f), own = x;
    k->rotate_row(x.data(), y.data(), cols);
    expect_same(y, expected, "rotate_row", k->level);
    k->rotate_row(own.data(), own.data(), cols);
    expect_same(own, expected, "rotate_row in place", k->level);
    for (int64_t i = 0; i < cols; ++i) {
      double sum = 0;
      for (int64_t j = i / 32 * 32; j < i / 32 * 32 + 32 && j < cols; ++j) {
        const bool is_negative = __builtin_popcountll(uint64_t(i & j & 31)) % 2;
        const bool turns = (j & 3) == 3 ? (j & 12) != 12 : (j & 12) == 12;
        sum += (is_negative != turns ? -1 : 1) * double(x[size_t(j)]);
      }
      const double wanted = i < cols / 32 * 32 ? sum / 4 : double(x[size_t(i)]);
      expect_near(y[size_t(i)], wanted, 1e-5, "rotate_row " + std::to_string(cols), k->level);
    }
  }
}

inline void check_rows() {
  Random random = {3};
  for (int64_t cols : {1, 31, 32, 33, 64, 160, 1003}) check_rotation(cols, random);
  for (int64_t dim : {1, 15, 16, 40, 160, 1000})
    for (int with = 0; with < 2; ++with) {
      check_norm(false, 1, dim, with, random);
      check_norm(false, 3, dim, with, random);
      check_norm(true, 1, dim, with, random);
      check_scaled_rows(dim, random);
    }
  check_functions();
  check_binaries(random);
  check_rotary(random);
  check_reductions(random);
}

}  // namespace check

#endif
