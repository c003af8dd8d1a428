// Ops of general networks: pad.
// Hot: runs in every step.
#include "arrays/strided_copy.h"
#include "ops/expect.h"

namespace ps {
namespace {

constexpr int32_t kPads = attr_at(OP_PAD, "int[] pads"), kMode = attr_at(OP_PAD, "str mode"),
                  kValue = attr_at(OP_PAD, "float value");
enum PadMode : int32_t { PAD_CONSTANT, PAD_EDGE, PAD_REFLECT, PAD_WRAP, NUM_PAD_MODES };
constexpr const char* kModes[NUM_PAD_MODES] = {"constant", "edge", "reflect", "wrap"};

int64_t floor_rest(int64_t a, int64_t b) { return ((a % b) + b) % b; }

// The input position of output position i of an axis of `size`, which may be outside; -1: the fill value.
int64_t source(int32_t mode, int64_t i, int64_t size) {
  if (i >= 0 && i < size) return i;
  if (mode == PAD_CONSTANT) return -1;
  if (mode == PAD_EDGE) return i < 0 ? 0 : size - 1;
  if (mode == PAD_WRAP) return floor_rest(i, size);
  if (size == 1) return 0;
  const int64_t at = floor_rest(i, 2 * size - 2);
  return at < size ? at : 2 * size - 2 - at;
}

// The last axis that is padded; the axes after it are moved together.
int32_t last_padded(const Call& c) {
  const int32_t rank = c.out[0].rank;
  const int64_t* pads = c.attrs[kPads].list;
  int32_t axis = rank - 1;
  while (axis > 0 && !pads[axis] && !pads[rank + axis]) --axis;
  return axis;
}

int64_t pad_items(const Call& c) {
  if (num_elements(c.out[0]) == 0) return 0;
  return c.out[0].rank ? extent(c.out[0], 0, last_padded(c)) : 1;
}

struct PadRow {
  int64_t bytes;  // of an element
  int64_t inner;  // elements per position of the axis
  uint8_t value[8];
};

void pad_row(const Call& c, const PadRow& row, int32_t axis, const uint8_t* x, uint8_t* y) {
  const int32_t mode = static_cast<int32_t>(c.attrs[kMode].i);
  const int64_t size = c.in[0].dims[axis], out_size = c.out[0].dims[axis], before = c.attrs[kPads].list[axis];
  const int64_t place = row.bytes * row.inner;
  for (int64_t i = 0; i < out_size;) {
    const int64_t from = x ? source(mode, i - before, size) : -1;
    int64_t n = 1;
    if (from >= 0 && from == i - before) {  // inside the input
      n = size - from < out_size - i ? size - from : out_size - i;
      memcpy(y + i * place, x + from * place, static_cast<size_t>(n * place));
    } else if (from < 0) {
      splat(row.value, row.bytes, row.inner, y + i * place);
    } else {
      copy_elements(y + i * place, x + from * place, place);
    }
    i += n;
  }
}

void run_pad(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  PadRow row{dtype_bytes(y.dtype), 1, {}};
  fill_value(y.dtype, c.attrs[kValue].f, row.value);
  if (y.rank == 0) return copy_elements(y.data, x.data, row.bytes);
  const int32_t axis = last_padded(c), mode = static_cast<int32_t>(c.attrs[kMode].i);
  row.inner = extent(y, axis + 1, y.rank);
  const int64_t x_row = x.dims[axis] * row.inner * row.bytes, y_row = y.dims[axis] * row.inner * row.bytes;
  for (int64_t item = begin; item < end; ++item) {
    int64_t rest = item, from = 0, stride = 1;
    bool inside = true;
    for (int32_t i = axis - 1; i >= 0; --i) {
      const int64_t at = source(mode, rest % y.dims[i] - c.attrs[kPads].list[i], x.dims[i]);
      rest /= y.dims[i];
      inside = inside && at >= 0;
      from += at * stride;
      stride *= x.dims[i];
    }
    pad_row(c, row, axis, inside ? x.data + from * x_row : nullptr, y.data + item * y_row);
  }
}
constexpr Phase kPad = {
    .split = SPLIT_ITEMS, .items = pad_items, .run = run_pad, .reads_all = operands(0), .writes_outputs = true};

}  // namespace

ps_status infer_pad(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  AttrValue& mode = attrs[kMode];
  mode.i = -1;
  for (int32_t i = 0; i < NUM_PAD_MODES; ++i) {
    if (equal(mode.s, kModes[i])) mode.i = i;
  }
  if (mode.i < 0)
    return fail(PS_UNSUPPORTED, "mode: expected constant, edge, reflect or wrap, got \"%.*s\"", PS_STR(mode.s));
  const int32_t rank = in[0].rank;
  if (attrs[kPads].i != 2 * rank)
    return fail(PS_INVALID_ARGUMENT, "pads: expected %d numbers, got %lld", 2 * rank,
                static_cast<long long>(attrs[kPads].i));
  int64_t dims[kMaxRank];
  for (int32_t i = 0; i < rank; ++i) {
    const int64_t before = attrs[kPads].list[i], after = attrs[kPads].list[rank + i];
    if (before < -kMaxDim || before > kMaxDim || after < -kMaxDim || after > kMaxDim)
      return fail(PS_INVALID_ARGUMENT, "pads: expected up to 2^31, got %lld",
                  static_cast<long long>(before < -kMaxDim || before > kMaxDim ? before : after));
    dims[i] = in[0].dims[i].offset + before + after;
    if (mode.i != PAD_CONSTANT && in[0].dims[i].offset == 0 && dims[i] > 0)
      return fail(PS_INVALID_ARGUMENT, "x: expected elements to pad with, got %s", describe(in[0]).text);
  }
  return set_output(in[0].dtype, rank, dims, out);
}
Phases pad_phases(const Call&) { return Phases{&kPad, 1}; }
ps_status pad_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
