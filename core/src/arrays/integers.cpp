// Elementwise ops of integers and bool.
// Hot: runs in every step.
#include "arrays/integers.h"

namespace ps {
namespace {

template <class T>
void load(const uint8_t* data, int64_t step, int64_t n, int64_t* out) {
  const T* x = reinterpret_cast<const T*>(data);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i * step];
}
template <class T>
void store(const int64_t* x, int64_t n, uint8_t* out) {
  T* y = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(x[i]);
}

int64_t wrap(uint64_t x) { return static_cast<int64_t>(x); }
uint64_t word(int64_t x) { return static_cast<uint64_t>(x); }

int64_t quotient(int64_t a, int64_t b) {  // truncated; division by zero gives 0
  return b == 0 ? 0 : b == -1 ? wrap(0 - word(a)) : a / b;
}
int64_t rest(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
int64_t floor_rest(int64_t a, int64_t b) {
  const int64_t r = rest(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

int64_t power(int64_t a, int64_t b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
  uint64_t r = 1, x = word(a);
  for (; b; b >>= 1, x *= x) {
    if (b & 1) r *= x;
  }
  return wrap(r);
}

template <class Function>
void each(int64_t* a, const int64_t* b, int64_t n, Function function) {
  for (int64_t i = 0; i < n; ++i) a[i] = function(a[i], b[i]);
}

}  // namespace

void load_integers(int32_t dtype, const uint8_t* data, int64_t step, int64_t n, int64_t* out) {
  // clang-format off: one type a line
  switch (dtype) {
    case PS_I8: return load<int8_t>(data, step, n, out);
    case PS_I32: return load<int32_t>(data, step, n, out);
    case PS_I64: return load<int64_t>(data, step, n, out);
    default: return load<uint8_t>(data, step, n, out);
  }
  // clang-format on
}

void store_integers(int32_t dtype, const int64_t* x, int64_t n, uint8_t* out) {
  if (dtype == PS_BOOL) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] != 0;
  } else if (dtype == PS_I32) {
    store<int32_t>(x, n, out);
  } else if (dtype == PS_I64) {
    store<int64_t>(x, n, out);
  } else {
    store<uint8_t>(x, n, out);
  }
}

int64_t saturated(double x, double lowest, double limit) {
  if (x != x) return 0;
  if (x < lowest) return static_cast<int64_t>(lowest);
  return x >= limit ? (limit >= 9223372036854775808.0 ? INT64_MAX : static_cast<int64_t>(limit) - 1)
                    : static_cast<int64_t>(x);
}

bool is_integer_unary(int32_t kind) {
  return kind == UNARY_NEG || kind == UNARY_ABS || kind == UNARY_SIGN || kind == UNARY_CLIP || kind == UNARY_RELU ||
         kind == UNARY_SQUARE || kind == UNARY_NOT;
}
bool is_integer_binary(int32_t kind) { return kind != BINARY_PRELU && kind != BINARY_ATAN2; }

void integer_unary(int32_t kind, double alpha, double beta, int64_t* x, int64_t n) {
  const double limit = 9223372036854775808.0;
  const int64_t low = saturated(alpha, -limit, limit), high = saturated(beta, -limit, limit);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t v = x[i];
    // clang-format off: one kind a line
    switch (kind) {
      case UNARY_NEG: x[i] = wrap(0 - word(v)); break;
      case UNARY_ABS: x[i] = v < 0 ? wrap(0 - word(v)) : v; break;
      case UNARY_SIGN: x[i] = (v > 0) - (v < 0); break;
      case UNARY_CLIP: x[i] = v < low ? low : v; x[i] = x[i] > high ? high : x[i]; break;
      case UNARY_RELU: x[i] = v < 0 ? 0 : v; break;
      case UNARY_SQUARE: x[i] = wrap(word(v) * word(v)); break;
      default: x[i] = v == 0; break;  // not
    }
    // clang-format on
  }
}

void integer_binary(int32_t kind, int64_t* a, const int64_t* b, int64_t n) {
  using I = int64_t;
  // clang-format off: one kind a line
  switch (kind) {
    case BINARY_ADD: return each(a, b, n, [](I x, I y) { return wrap(word(x) + word(y)); });
    case BINARY_SUB: return each(a, b, n, [](I x, I y) { return wrap(word(x) - word(y)); });
    case BINARY_MUL: return each(a, b, n, [](I x, I y) { return wrap(word(x) * word(y)); });
    case BINARY_DIV: return each(a, b, n, quotient);
    case BINARY_MIN: return each(a, b, n, [](I x, I y) { return x < y ? x : y; });
    case BINARY_MAX: return each(a, b, n, [](I x, I y) { return x > y ? x : y; });
    case BINARY_POW: return each(a, b, n, power);
    case BINARY_MOD: return each(a, b, n, floor_rest);
    case BINARY_FMOD: return each(a, b, n, rest);
    case BINARY_EQ: return each(a, b, n, [](I x, I y) { return I{x == y}; });
    case BINARY_NE: return each(a, b, n, [](I x, I y) { return I{x != y}; });
    case BINARY_LT: return each(a, b, n, [](I x, I y) { return I{x < y}; });
    case BINARY_LE: return each(a, b, n, [](I x, I y) { return I{x <= y}; });
    case BINARY_GT: return each(a, b, n, [](I x, I y) { return I{x > y}; });
    case BINARY_GE: return each(a, b, n, [](I x, I y) { return I{x >= y}; });
    case BINARY_AND: return each(a, b, n, [](I x, I y) { return I{x && y}; });
    case BINARY_OR: return each(a, b, n, [](I x, I y) { return I{x || y}; });
    case BINARY_XOR: return each(a, b, n, [](I x, I y) { return I{!x != !y}; });
    case BINARY_BITWISE_AND: return each(a, b, n, [](I x, I y) { return x & y; });
    case BINARY_BITWISE_OR: return each(a, b, n, [](I x, I y) { return x | y; });
    case BINARY_BITWISE_XOR: return each(a, b, n, [](I x, I y) { return x ^ y; });
    case BINARY_SHIFT_LEFT: return each(a, b, n, [](I x, I y) { return y < 0 || y > 63 ? 0 : wrap(word(x) << y); });
    default: return each(a, b, n, [](I x, I y) { return y < 0 || y > 63 ? (x < 0 ? -1 : 0) : x >> y; });  // shift_right
  }
  // clang-format on
}

}  // namespace ps
