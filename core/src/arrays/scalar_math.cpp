// The kinds of unary and binary that are computed one element at a time, through double.  Plain arithmetic gives the
// same bits on every machine, unlike C libraries.  Errors are far below the last place of a float.
// Hot: runs in every step.
#include "arrays/kinds.h"

namespace ps {
namespace {

constexpr double kHalfPi = 1.5707963267948966, kInf = __builtin_inf();

double abs_of(double x) { return __builtin_fabs(x); }
bool is_odd(double x) { return abs_of(x) < 9007199254740992.0 && (static_cast<int64_t>(x) & 1); }
bool is_whole(double x) { return abs_of(x) >= 9007199254740992.0 || static_cast<double>(static_cast<int64_t>(x)) == x; }
double nearest(double x) {  // |x| < 2^51
  const double magic = 6755399441055744.0;
  return (x + magic) - magic;
}

// Coefficients of series, the highest power first.
constexpr double reciprocal_factorial(int32_t n) {
  double f = 1;
  for (int32_t i = 2; i <= n; ++i) f *= i;
  return 1 / f;
}
template <int32_t count>
struct Series {
  double c[count];
};
template <int32_t count>
constexpr Series<count> factorials(int32_t first, int32_t step) {
  Series<count> s{};
  for (int32_t i = 0; i < count; ++i) s.c[count - 1 - i] = reciprocal_factorial(first + i * step);
  return s;
}
constexpr Series<14> odd_reciprocals() {
  Series<14> s{};
  for (int32_t i = 0; i < 14; ++i) s.c[13 - i] = 1.0 / (2 * i + 1);
  return s;
}
constexpr auto kExp = factorials<14>(0, 1), kOdd = odd_reciprocals();
constexpr auto kSine = factorials<8>(1, 2), kCosine = factorials<8>(0, 2);

template <int32_t count>
double series(const Series<count>& s, double x) {
  double p = s.c[0];
  for (int32_t i = 1; i < count; ++i) p = s.c[i] + p * x;
  return p;
}

double exp_of(double x) {
  if (x != x) return x;
  x = x < -400 ? -400 : x > 400 ? 400 : x;  // beyond the range of a float
  const double n = nearest(x * 1.4426950408889634);
  const double r = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
  const double p = series(kExp, r);
  const uint64_t bits = static_cast<uint64_t>(1023 + static_cast<int64_t>(n)) << 52;
  double scale;
  memcpy(&scale, &bits, 8);
  return p * scale;
}

double log_of(double x) {
  if (!(x > 0)) return x == 0 ? -kInf : __builtin_nan("");
  if (x == kInf) return x;
  uint64_t bits;
  memcpy(&bits, &x, 8);  // a double converted from a float is never subnormal
  int64_t e = static_cast<int64_t>(bits >> 52) - 1022;
  bits = (bits & 0xfffffffffffffu) | uint64_t{1022} << 52;
  double m;
  memcpy(&m, &bits, 8);
  if (m < 0.70710678118654752) {
    m += m;
    --e;
  }
  const double s = (m - 1) / (m + 1), z = s * s;
  const double p = series(kOdd, z);
  return 2 * s * p + (static_cast<double>(e) * 1.9082149292705877e-10 + static_cast<double>(e) * 0.6931471803691238);
}

double atan_of(double x) {
  double a = abs_of(x), base = 0, sign = 1;
  if (a > 1) {
    a = 1 / a;
    base = kHalfPi;
    sign = -1;
  }
  double shift = 0;
  if (a > 0.41421356237309503) {
    a = (a - 1) / (a + 1);
    shift = kHalfPi / 2;
  }
  const double z = a * a;
  const double p = series(kOdd, -z);
  const double r = base + sign * (shift + a * p);
  return x < 0 ? -r : x == 0 ? x : r;
}

// Accurate up to 2^28: pi/2 is subtracted in three parts, two of them of 25 bits.
void sin_cos(double x, double* sine, double* cosine) {
  const double n = abs_of(x) < 1e15 ? nearest(x * 0.6366197723675814) : 0;
  double r = ((x - n * 1.5707963109016418) - n * 1.5893254712295857e-08) - n * 6.123233995736766e-17;
  if (!(abs_of(r) < 1)) r = x - x;  // infinities become NaN; larger numbers, where nothing is accurate, 0
  const int64_t quadrant = static_cast<int64_t>(n);
  const double z = r * r;
  const double s = r * series(kSine, -z), c = series(kCosine, -z);
  const double both[2] = {s, c};  // no branches, because quadrants change from element to element
  *sine = both[quadrant & 1] * static_cast<double>(1 - (quadrant & 2));
  *cosine = both[~quadrant & 1] * static_cast<double>(1 - ((quadrant + 1) & 2));
}

double asin_of(double x) { return atan_of(x / __builtin_sqrt((1 - x) * (1 + x))); }
double small_odd(double x, double cubic) { return x + cubic * x * x * x; }  // |x| < 1e-4

double value(int32_t kind, double x) {
  const bool small = abs_of(x) < 1e-4;
  double s = 0, c = 1;
  // clang-format off: one kind a line
  switch (kind) {
    case UNARY_SIN: sin_cos(x, &s, &c); return s;
    case UNARY_COS: sin_cos(x, &s, &c); return c;
    case UNARY_TAN: sin_cos(x, &s, &c); return s / c;
    case UNARY_ASIN: return asin_of(x);
    case UNARY_ACOS: return kHalfPi - asin_of(x);
    case UNARY_ATAN: return atan_of(x);
    case UNARY_SINH: s = exp_of(x); return small ? small_odd(x, 1. / 6) : (s - 1 / s) / 2;
    case UNARY_COSH: s = exp_of(x); return (s + 1 / s) / 2;
    case UNARY_ASINH:
      s = log_of(abs_of(x) + __builtin_sqrt(x * x + 1));
      return small ? small_odd(x, -1. / 6) : x != x ? x : x < 0 ? -s : s;
    case UNARY_ACOSH: return log_of(x + __builtin_sqrt(x * x - 1));
    case UNARY_ATANH: return small ? small_odd(x, 1. / 3) : log_of((1 + x) / (1 - x)) / 2;
    case UNARY_LOG1P: return small ? x - x * x / 2 + x * x * x / 3 : log_of(1 + x);
    default: return small ? x + x * x / 2 + x * x * x / 6 : exp_of(x) - 1;  // expm1
  }
  // clang-format on
}

// The exact remainder with the sign of a, like fmod in C.
double remainder_of(double a, double b) {
  double r = abs_of(a);
  const double d = abs_of(b);
  if (!(d > 0) || !(r < kInf)) return __builtin_nan("");
  if (d == kInf) return a;
  while (r >= d) {
    uint64_t step_bits, r_bits;
    double step = d;
    memcpy(&step_bits, &d, 8);
    memcpy(&r_bits, &r, 8);
    const uint64_t exponent = r_bits >> 52;  // d with the exponent of r, or half of that
    step_bits = (step_bits & 0xfffffffffffffu) | exponent << 52;
    memcpy(&step, &step_bits, 8);
    if (step > r) step /= 2;
    r -= step;
  }
  return a < 0 ? -r : r;
}

double power(double a, double b) {
  if (b == 2) return a * a;
  if (b == 0 || a == 1) return 1;
  if (b == 1) return a;
  if (a != a || b != b) return a + b;
  if (b == 0.5 && a > 0) return __builtin_sqrt(a);
  if (b == -1) return 1 / a;
  if (b == 3) return a * a * a;
  const double size = abs_of(a);
  if (size == 1) return a > 0 || abs_of(b) == kInf ? 1 : !is_whole(b) ? __builtin_nan("") : is_odd(b) ? -1 : 1;
  double r;
  if (size == 0) {
    r = b > 0 ? 0 : kInf;
  } else {
    if (a < 0 && a > -kInf && !is_whole(b)) return __builtin_nan("");
    const double x = b * log_of(size);
    r = x > 200 ? kInf : x < -200 ? 0 : exp_of(x);
  }
  return __builtin_signbit(a) && is_whole(b) && is_odd(b) ? -r : r;
}

double atan2_of(double y, double x) {
  if (x != x || y != y) return x + y;
  if (abs_of(x) == kInf && abs_of(y) == kInf) {
    x = x > 0 ? 1 : -1;
    y = y > 0 ? 1 : -1;
  }
  const bool behind = __builtin_signbit(x);
  double r = x == 0 && y == 0 ? 0 : x == 0 ? kHalfPi : atan_of(abs_of(y) / abs_of(x));
  if (behind) r = 2 * kHalfPi - r;
  return __builtin_signbit(y) ? -r : r;
}

double pair_value(int32_t kind, double a, double b) {
  if (kind == BINARY_POW) return power(a, b);
  if (kind == BINARY_ATAN2) return atan2_of(a, b);
  const double r = remainder_of(a, b);
  if (kind == BINARY_FMOD) return r;
  if (abs_of(b) == kInf) return r == 0 || (r < 0) == (b < 0) ? r : b;  // mod: the sign of b, as in Python
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

}  // namespace

void scalar_unary(int32_t kind, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(value(kind, static_cast<double>(x[i])));
}

void scalar_binary(int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    y[i] = static_cast<float>(pair_value(kind, static_cast<double>(a[i * a_step]), static_cast<double>(b[i * b_step])));
}

void float_binary(const Kernels& kernels, int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step,
                  float* y, int64_t n) {
  if (kind == BINARY_POW && !b_step && *b == 2.f) {  // the square in float is exact enough to have the same bits
    b = a;
    b_step = a_step;
    kind = BINARY_MUL;
  }
  const auto map = is_lanes_binary(kind) ? kernels.map_binary : scalar_binary;
  map(kind, a, a_step, b, b_step, y, n);
}

}  // namespace ps
