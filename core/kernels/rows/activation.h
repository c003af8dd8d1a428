// Elementwise kernels: gelu, the clamped gate, those of base/elementwise_ops.inc; rows that are scaled or made sparse.
#ifndef PENSTOCK_KERNELS_ROWS_ACTIVATION_H
#define PENSTOCK_KERNELS_ROWS_ACTIVATION_H

namespace ps {
namespace {

#define PS_UNARY(id, name, version, schema, value)   \
  struct name##_value {                              \
    PS_INLINE static F16 of(F16 a) { return value; } \
  };
#define PS_BINARY(id, name, version, schema, value)         \
  struct name##_value {                                     \
    PS_INLINE static F16 of(F16 a, F16 b) { return value; } \
  };
#define PS_SCALED(id, name, version, schema, value)         \
  struct name##_value {                                     \
    PS_INLINE static F16 of(F16 a, F16 s) { return value; } \
  };
#include "base/elementwise_ops.inc"
using SiluMul = silu_mul_value;

template <class Op>
void unary(const UnaryArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < args.cols; i += 16) {
      int n = tail(args.cols, i);
      f_store_n(y + i, Op::of(f_load_n(x + i, n)), n);
    }
  }
}

template <class Op>
void binary(const BinaryArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float *a = args.a + row * args.a_stride, *b = args.b + row * args.b_stride;
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < args.cols; i += 16) {
      int n = tail(args.cols, i);
      f_store_n(y + i, Op::of(f_load_n(a + i, n), f_load_n(b + i, n)), n);
    }
  }
}

template <class Op>
void scaled(const UnaryArgs& args, float scalar, int64_t begin, int64_t end) {
  const F16 s = f_set(scalar);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < args.cols; i += 16) {
      int n = tail(args.cols, i);
      f_store_n(y + i, Op::of(f_load_n(x + i, n), s), n);
    }
  }
}

void gelu(const UnaryArgs& args, int32_t tanh_form, int64_t begin, int64_t end) {
  const F16 one = f_set(1.f), half = f_set(0.5f);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < args.cols; i += 16) {
      int n = tail(args.cols, i);
      F16 v = f_load_n(x + i, n);
      F16 r;
      if (tanh_form) {  // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), which has no cancellation
        F16 cubic = f_fma(f_set(0.044715f) * v, v * v, v);
        r = v / f_one_plus_exp(f_set(-1.5957691216057308f) * cubic);
      } else {
        r = (half * v) * (one + f_erf(v * f_set(0.70710678118654752f)));
      }
      f_store_n(y + i, r, n);
    }
  }
}

// Sixteen pairs of a gate and an up value, of which the first `n` exist.
PS_INLINE void load_pairs(const float* x, int n, F16* gate, F16* up) {
  float gates[16] = {}, ups[16] = {};
  for (int i = 0; i < n; ++i) {
    gates[i] = x[2 * i];
    ups[i] = x[2 * i + 1];
  }
  *gate = f_load(gates);
  *up = f_load(ups);
}

void clamped_swiglu(const UnaryArgs& args, float alpha, float limit, int64_t begin, int64_t end) {
  const F16 one = f_set(1.f), most = f_set(limit), least = f_set(-limit), slope = f_set(-alpha);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* y = args.y + row * args.y_stride;
    for (int64_t i = 0; i < args.cols; i += 16) {
      const int n = tail(args.cols, i);
      F16 gate, up;
      load_pairs(x + 2 * i, n, &gate, &up);
      gate = f_min(most, gate);
      up = f_max(least, f_min(most, up));
      f_store_n(y + i, (up + one) * (gate / f_one_plus_exp(slope * gate)), n);
    }
  }
}

// The mean of the squares of x - shift, in 16 lanes.  Not inlined, to keep the code small: its callers are cold too.
__attribute__((noinline, cold)) float mean_square(const float* x, int64_t dim, float shift) {
  F16 sum = f_set(0.f);
  for (int64_t i = 0; i < dim; i += 16) {
    const int n = tail(dim, i);
    const F16 v = f_load_n(x + i, n) - f_set(shift);
    sum = f_select(m_range(0, n), f_fma(v, v, sum), sum);
  }
  return f_sum(sum) / float(dim);
}

__attribute__((cold)) void match_rms(const BinaryArgs& args, float floor, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float *a = args.a + row * args.a_stride, *b = args.b + row * args.b_stride;
    float* y = args.y + row * args.y_stride;
    const float own = mean_square(a, args.cols, 0.f);
    const F16 factor =
        f_set(__builtin_sqrtf(mean_square(b, args.cols, 0.f)) / __builtin_sqrtf(own > floor ? own : floor));
    for (int64_t i = 0; i < args.cols; i += 16) {
      const int n = tail(args.cols, i);
      f_store_n(y + i, f_load_n(a + i, n) * factor, n);
    }
  }
}

__attribute__((cold)) void gaussian_topk(const UnaryArgs& args, float deviations, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* y = args.y + row * args.y_stride;
    F16 sum = f_set(0.f);
    for (int64_t i = 0; i < args.cols; i += 16) {
      const int n = tail(args.cols, i);
      sum = f_select(m_range(0, n), sum + f_load_n(x + i, n), sum);
    }
    const float mean = f_sum(sum) / float(args.cols);
    const F16 cutoff = f_set(mean + __builtin_sqrtf(mean_square(x, args.cols, mean)) * deviations);
    for (int64_t i = 0; i < args.cols; i += 16) {
      const int n = tail(args.cols, i);
      f_store_n(y + i, f_max(f_set(0.f), f_load_n(x + i, n) - cutoff), n);
    }
  }
}

}  // namespace
}  // namespace ps

#endif
