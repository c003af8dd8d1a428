// Ops of general networks: unary, binary, where, cast.
// Hot: runs in every step.
#include "arrays/blocks.h"
#include "arrays/integers.h"
#include "arrays/kinds.h"
#include "ops/expect.h"
#include "base/half.h"

namespace ps {
namespace {

constexpr int32_t kUnaryKind = attr_at(OP_UNARY, "str kind"), kUnaryAlpha = attr_at(OP_UNARY, "float alpha"),
                  kUnaryBeta = attr_at(OP_UNARY, "float beta"), kBinaryKind = attr_at(OP_BINARY, "str kind"),
                  kCastDtype = attr_at(OP_CAST, "str dtype");

constexpr Phase element_phase(void (*run)(const Call&, int64_t, int64_t, int32_t), uint32_t reads) {
  return Phase{.split = SPLIT_ITEMS, .items = element_items, .run = run, .reads_all = reads, .writes_outputs = true};
}

const float* floats(const uint8_t* data) { return reinterpret_cast<const float*>(data); }
float* floats(uint8_t* data) { return reinterpret_cast<float*>(data); }

// ---- unary ----

void test_floats(int32_t kind, bool negative, bool positive, const float* x, uint8_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i];
    y[i] = kind == UNARY_IS_NAN ? v != v : (positive && v > 3.402823466e+38f) || (negative && v < -3.402823466e+38f);
  }
}

void run_unary(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const int32_t kind = static_cast<int32_t>(c.attrs[kUnaryKind].i);
  const double alpha = c.attrs[kUnaryAlpha].f, beta = c.attrs[kUnaryBeta].f;
  const int64_t total = num_elements(y), first = begin * kItem, last = end * kItem < total ? end * kItem : total;
  if (x.dtype != PS_F32) {
    const int64_t bytes = dtype_bytes(x.dtype);
    each_block(total, kBlock, begin, end, [&](int64_t start, int64_t n) {
      int64_t block[kBlock];
      load_integers(x.dtype, x.data + start * bytes, 1, n, block);
      integer_unary(kind, alpha, beta, block, n);
      store_integers(y.dtype, block, n, y.data + start * bytes);
    });
  } else if (is_test(kind)) {
    test_floats(kind, alpha != 0, beta != 0, floats(x.data) + first, y.data + first, last - first);
  } else if (is_lanes_unary(kind)) {
    c.kernels->map_unary(kind, static_cast<float>(alpha), static_cast<float>(beta), floats(x.data) + first,
                         floats(y.data) + first, last - first);
  } else {
    scalar_unary(kind, floats(x.data) + first, floats(y.data) + first, last - first);
  }
}
constexpr Phase kUnary = element_phase(run_unary, operands(0));

// ---- binary ----

void compare_floats(int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step, uint8_t* y,
                    int64_t n) {
  // clang-format off: one kind a line
  switch (kind) {
    case BINARY_EQ: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] == b[i * b_step]; return;
    case BINARY_NE: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] != b[i * b_step]; return;
    case BINARY_LT: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] < b[i * b_step]; return;
    case BINARY_LE: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] <= b[i * b_step]; return;
    case BINARY_GT: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] > b[i * b_step]; return;
    default: for (int64_t i = 0; i < n; ++i) y[i] = a[i * a_step] >= b[i * b_step]; return;
  }
  // clang-format on
}

void binary_block(const Call& c, int32_t kind, Piece a, Piece b, int64_t n, uint8_t* y) {
  const int32_t dtype = c.in[0].dtype;
  if (dtype != PS_F32) {
    int64_t left[kBlock], right[kBlock];
    load_integers(dtype, a.data, a.step, n, left);
    load_integers(dtype, b.data, b.step, n, right);
    integer_binary(kind, left, right, n);
    store_integers(c.out[0].dtype, left, n, y);
  } else if (is_comparison(kind)) {
    compare_floats(kind, floats(a.data), a.step, floats(b.data), b.step, y, n);
  } else {
    float_binary(*c.kernels, kind, floats(a.data), a.step, floats(b.data), b.step, floats(y), n);
  }
}

void run_binary(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int32_t kind = static_cast<int32_t>(c.attrs[kBinaryKind].i);
  const int64_t bytes = dtype_bytes(c.out[0].dtype);
  Buffers<2> buffers;
  Broadcast plan;
  plan.start(c.out[0]);
  plan.add(c.in[0]);
  plan.add(c.in[1]);
  plan.plan();
  each_block(plan.total, plan.block(), begin, end, [&](int64_t start, int64_t n) {
    const Piece a = plan.piece(0, start, n, buffers.bytes[0]), b = plan.piece(1, start, n, buffers.bytes[1]);
    binary_block(c, kind, a, b, n, c.out[0].data + start * bytes);
  });
}
constexpr Phase kBinary = element_phase(run_binary, operands(0, 1));

// ---- where ----

template <class T>
void select(Piece condition, Piece a, Piece b, int64_t n, uint8_t* out) {
  const T *x = reinterpret_cast<const T*>(a.data), *z = reinterpret_cast<const T*>(b.data);
  T* y = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < n; ++i) {
    const T mask = static_cast<T>(-static_cast<T>(condition.data[i * condition.step] != 0));  // no branch
    y[i] = static_cast<T>((x[i * a.step] & mask) | (z[i * b.step] & static_cast<T>(~mask)));
  }
}

void run_where(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t bytes = dtype_bytes(c.out[0].dtype);
  Buffers<3> buffers;
  Broadcast plan;
  plan.start(c.out[0]);
  for (int32_t i = 0; i < 3; ++i) plan.add(c.in[i]);
  plan.plan();
  each_block(plan.total, plan.block(), begin, end, [&](int64_t start, int64_t n) {
    Piece p[3];
    for (int32_t i = 0; i < 3; ++i) p[i] = plan.piece(i, start, n, buffers.bytes[i]);
    uint8_t* y = c.out[0].data + start * bytes;
    // clang-format off: one size a line
    switch (bytes) {
      case 1: return select<uint8_t>(p[0], p[1], p[2], n, y);
      case 2: return select<uint16_t>(p[0], p[1], p[2], n, y);
      case 4: return select<uint32_t>(p[0], p[1], p[2], n, y);
      default: return select<uint64_t>(p[0], p[1], p[2], n, y);
    }
    // clang-format on
  });
}
constexpr Phase kWhere = element_phase(run_where, operands(0, 1, 2));

// ---- cast ----

bool is_float(int32_t dtype) { return dtype == PS_F32 || dtype == PS_F16 || dtype == PS_BF16; }

void load_floats(int32_t dtype, const uint8_t* data, int64_t n, float* out) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(data);
  if (dtype == PS_F32) memcpy(out, data, static_cast<size_t>(n) * sizeof(float));
  if (dtype == PS_F16) {
    for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(halves[i]);
  }
  if (dtype == PS_BF16) {
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(halves[i]);
  }
}

void store_floats(int32_t dtype, const float* x, int64_t n, uint8_t* out) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(out);
  if (dtype == PS_F32) memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
  if (dtype == PS_F16) {
    for (int64_t i = 0; i < n; ++i) halves[i] = f32_to_f16(x[i]);
  }
  if (dtype == PS_BF16) {
    for (int64_t i = 0; i < n; ++i) halves[i] = f32_to_bf16(x[i]);
  }
}

void floats_to_integers(int32_t dtype, const float* x, int64_t n, int64_t* out) {
  struct { double lowest, limit; } range = {-9223372036854775808.0, 9223372036854775808.0};
  if (dtype == PS_I32) range = {-2147483648.0, 2147483648.0};
  if (dtype == PS_I8) range = {-128.0, 128.0};
  if (dtype == PS_U8) range = {0.0, 256.0};
  if (dtype == PS_BOOL) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] != 0.f;
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = saturated(static_cast<double>(x[i]), range.lowest, range.limit);
  }
}

void cast_block(int32_t from, const uint8_t* x, int32_t to, uint8_t* y, int64_t n) {
  float numbers[kBlock];
  int64_t integers[kBlock];
  if (is_float(from)) {
    load_floats(from, x, n, numbers);
    if (is_float(to)) return store_floats(to, numbers, n, y);
    floats_to_integers(to, numbers, n, integers);
  } else {
    load_integers(from, x, 1, n, integers);
    if (is_float(to)) {
      for (int64_t i = 0; i < n; ++i) numbers[i] = static_cast<float>(integers[i]);
      return store_floats(to, numbers, n, y);
    }
  }
  store_integers(to, integers, n, y);
}

void run_cast(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const int64_t from = dtype_bytes(x.dtype), to = dtype_bytes(y.dtype), total = num_elements(y);
  each_block(total, kBlock, begin, end, [&](int64_t start, int64_t n) {
    if (x.dtype == y.dtype) {
      if (x.data != y.data) memcpy(y.data + start * to, x.data + start * from, static_cast<size_t>(n * to));
    } else {
      cast_block(x.dtype, x.data + start * from, y.dtype, y.data + start * to, n);
    }
  });
}
constexpr Phase kCast = element_phase(run_cast, operands(0));

}  // namespace

ps_status infer_unary(const Spec* in, AttrValue* attrs, Spec* out) {
  AttrValue& name = attrs[kUnaryKind];
  const int32_t kind = find_unary_kind(name.s);
  if (kind < 0 || kind == UNARY_NONE)
    return fail(PS_UNSUPPORTED, "kind: expected a function of one number such as relu, got \"%.*s\"", PS_STR(name.s));
  name.i = kind;
  uint32_t types = kind == UNARY_NOT ? dtypes(PS_BOOL) : dtypes(PS_F32);
  if (kind != UNARY_NOT && is_integer_unary(kind)) types |= kInts;
  PS_TRY(expect_dtype(in[0], "x", types));
  copy_type(in[0], out);
  if (is_test(kind)) out->dtype = PS_BOOL;
  return PS_OK;
}
Phases unary_phases(const Call&) { return Phases{&kUnary, 1}; }
ps_status unary_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_binary(const Spec* in, AttrValue* attrs, Spec* out) {
  AttrValue& name = attrs[kBinaryKind];
  const int32_t kind = find_binary_kind(name.s);
  if (kind < 0)
    return fail(PS_UNSUPPORTED, "kind: expected a function of two numbers such as add, got \"%.*s\"", PS_STR(name.s));
  name.i = kind;
  const bool logical = kind == BINARY_AND || kind == BINARY_OR || kind == BINARY_XOR;
  uint32_t types = is_bits(kind) ? 0 : dtypes(PS_F32);
  if (is_integer_binary(kind)) types |= logical ? dtypes(PS_BOOL) : kIntsAndBool;
  PS_TRY(expect_dtype(in[0], "a", types));
  if (in[1].dtype != in[0].dtype)
    return fail(PS_INVALID_ARGUMENT, "b: expected the type %s of a, got %s", dtype_name(in[0].dtype),
                describe(in[1]).text);
  int64_t dims[kMaxRank];
  int32_t rank = 0;
  PS_TRY(broadcast(in[0], "a", dims, &rank));
  PS_TRY(broadcast(in[1], "b", dims, &rank));
  return set_output(is_comparison(kind) ? static_cast<int32_t>(PS_BOOL) : in[0].dtype, rank, dims, out);
}
Phases binary_phases(const Call&) { return Phases{&kBinary, 1}; }
ps_status binary_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_where(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_dtype(in[0], "condition", dtypes(PS_BOOL)));
  PS_TRY(expect_dtype(in[1], "a", kAnyDtype));
  PS_TRY(expect_dtype(in[2], "b", dtypes(in[1].dtype)));
  static const char* const names[] = {"condition", "a", "b"};
  int64_t dims[kMaxRank];
  int32_t rank = 0;
  for (int32_t i = 0; i < 3; ++i) PS_TRY(broadcast(in[i], names[i], dims, &rank));
  return set_output(in[1].dtype, rank, dims, out);
}
Phases where_phases(const Call&) { return Phases{&kWhere, 1}; }
ps_status where_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_cast(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(parse_dtype("dtype", &attrs[kCastDtype]));
  copy_type(in[0], out);
  out->dtype = static_cast<int32_t>(attrs[kCastDtype].i);
  return PS_OK;
}
Phases cast_phases(const Call&) { return Phases{&kCast, 1}; }
ps_status cast_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
