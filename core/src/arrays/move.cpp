// Ops of general networks: reshape, permute, slice, expand, concat, trilu.  They depend only on the element's size.
// Hot: runs in every step.
#include "arrays/strided_copy.h"
#include "ops/expect.h"

namespace ps {
namespace {

constexpr int32_t kReshapeSizes = attr_at(OP_RESHAPE, "int[] sizes"),
                  kPermuteOrder = attr_at(OP_PERMUTE, "int[] order"), kSliceBegins = attr_at(OP_SLICE, "int[] begins"),
                  kSliceEnds = attr_at(OP_SLICE, "int[] ends"), kSliceSteps = attr_at(OP_SLICE, "int[] steps"),
                  kExpandSizes = attr_at(OP_EXPAND, "int[] sizes"), kConcatAxis = attr_at(OP_CONCAT, "int axis"),
                  kTriluDiagonal = attr_at(OP_TRILU, "int[] diagonal"), kTriluUpper = attr_at(OP_TRILU, "bool upper"),
                  kConcatInputs = 8;

long long ll(int64_t x) { return static_cast<long long>(x); }

ps_status expect_length(const char* name, const AttrValue& list, int64_t length) {
  if (list.i == length) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %lld numbers, got %lld", name, ll(length), ll(list.i));
}

// ---- reshape ----

int64_t reshape_items(const Call& c) { return c.in[0].data == c.out[0].data ? 0 : element_items(c); }
void run_reshape(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (c.in[0].data == c.out[0].data) return;
  const int64_t bytes = dtype_bytes(c.out[0].dtype), total = num_elements(c.out[0]);
  const int64_t first = begin * kItem, last = end * kItem < total ? end * kItem : total;
  memcpy(c.out[0].data + first * bytes, c.in[0].data + first * bytes, static_cast<size_t>((last - first) * bytes));
}
constexpr Phase kReshape = {
    .split = SPLIT_ITEMS, .items = reshape_items, .run = run_reshape, .reads_all = operands(0), .writes_outputs = true};

// ---- permute, slice, expand ----

void dense_strides(const Tensor& t, int64_t* strides) {
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= t.dims[i];
  }
}

StridedCopy permute_plan(const Call& c) {
  StridedCopy copy;
  int64_t strides[kMaxRank];
  dense_strides(c.in[0], strides);
  const int64_t* order = c.attrs[kPermuteOrder].list;
  for (int32_t i = 0; i < c.out[0].rank; ++i)
    copy.add(c.out[0].dims[i], strides[order[i] < 0 ? order[i] + c.out[0].rank : order[i]]);
  copy.bytes = dtype_bytes(c.out[0].dtype);
  copy.plan();
  return copy;
}

StridedCopy slice_plan(const Call& c) {
  StridedCopy copy;
  int64_t strides[kMaxRank];
  dense_strides(c.in[0], strides);
  const bool empty = num_elements(c.out[0]) == 0;  // its begins may be past the end of the input
  for (int32_t i = 0; i < c.out[0].rank; ++i) {
    if (!empty) copy.base += c.attrs[kSliceBegins].list[i] * strides[i];
    copy.add(c.out[0].dims[i], c.attrs[kSliceSteps].list[i] * strides[i]);
  }
  copy.bytes = dtype_bytes(c.out[0].dtype);
  copy.plan();
  return copy;
}

StridedCopy expand_plan(const Call& c) {
  StridedCopy copy;
  int64_t strides[kMaxRank];
  dense_strides(c.in[0], strides);
  const int32_t more = c.out[0].rank - c.in[0].rank;
  for (int32_t i = 0; i < c.out[0].rank; ++i)
    copy.add(c.out[0].dims[i], i < more || c.in[0].dims[i - more] == 1 ? 0 : strides[i - more]);
  copy.bytes = dtype_bytes(c.out[0].dtype);
  copy.plan();
  return copy;
}

template <StridedCopy (*plan)(const Call&)>
constexpr Phase strided_phase() {
  return Phase{.split = SPLIT_ITEMS,
               .items = [](const Call& c) { return plan(c).items(); },
               .run = [](const Call& c, int64_t begin, int64_t end,
                         int32_t) { plan(c).run(c.in[0].data, c.out[0].data, begin, end); },
               .reads_all = operands(0),
               .writes_outputs = true};
}
constexpr Phase kPermute = strided_phase<permute_plan>(), kSlice = strided_phase<slice_plan>(),
                kExpand = strided_phase<expand_plan>();

// ---- concat ----

void run_concat(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor& y = c.out[0];
  const int32_t axis = static_cast<int32_t>(c.attrs[kConcatAxis].i);
  const int64_t row = extent(y, axis, y.rank), total = num_elements(y), bytes = dtype_bytes(y.dtype);
  const int64_t last = end * kItem < total ? end * kItem : total;
  int64_t outer = begin * kItem / row, inside = begin * kItem % row, sizes[kConcatInputs];
  for (int32_t i = 0; i < kConcatInputs; ++i) sizes[i] = c.in[i].data ? extent(c.in[i], axis, y.rank) : 0;
  for (int64_t at = begin * kItem; at < last; ++outer, inside = 0) {
    int64_t start = 0;  // offset of an input in the row
    for (int32_t i = 0; i < kConcatInputs && at < last; ++i) {
      const int64_t own = sizes[i];
      if (inside < start + own) {
        const int64_t from = inside - start, left = own - from, n = left < last - at ? left : last - at;
        copy_elements(y.data + at * bytes, c.in[i].data + (outer * own + from) * bytes, n * bytes);
        at += n;
        inside += n;
      }
      start += own;
    }
  }
}
constexpr Phase kConcat = {.split = SPLIT_ITEMS,
                           .items = element_items,
                           .run = run_concat,
                           .reads_all = operands(0, 1, 2, 3, 4, 5, 6, 7),
                           .writes_outputs = true};

// ---- trilu ----

int64_t trilu_items(const Call& c) {
  const Tensor& y = c.out[0];
  return num_elements(y) ? extent(y, 0, y.rank - 1) : 0;
}
void run_trilu(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor& y = c.out[0];
  const int64_t cols = y.dims[y.rank - 1], rows = y.dims[y.rank - 2], bytes = dtype_bytes(y.dtype);
  for (int64_t item = begin; item < end; ++item) {
    // Columns from `edge` on belong to the upper part.
    int64_t edge = item % rows + c.attrs[kTriluDiagonal].list[0] + (c.attrs[kTriluUpper].i ? 0 : 1);
    edge = edge < 0 ? 0 : edge > cols ? cols : edge;
    const uint8_t* x = c.in[0].data + item * cols * bytes;
    uint8_t* to = y.data + item * cols * bytes;
    const size_t below = static_cast<size_t>(edge * bytes), above = static_cast<size_t>((cols - edge) * bytes);
    if (x != to) memcpy(to, x, below + above);
    if (c.attrs[kTriluUpper].i) {
      memset(to, 0, below);
    } else {
      memset(to + below, 0, above);
    }
  }
}
constexpr Phase kTrilu = {
    .split = SPLIT_ITEMS, .items = trilu_items, .run = run_trilu, .reads_all = operands(0), .writes_outputs = true};

int64_t product(const Spec& s) {
  int64_t n = 1;
  for (int32_t i = 0; i < s.rank; ++i) n *= s.dims[i].offset;
  return n;
}

}  // namespace

ps_status infer_reshape(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  const AttrValue& sizes = attrs[kReshapeSizes];
  if (sizes.i > kMaxRank)
    return fail(PS_INVALID_ARGUMENT, "sizes: expected up to %d numbers, got %lld", kMaxRank, ll(sizes.i));
  PS_TRY(set_output(in[0].dtype, static_cast<int32_t>(sizes.i), sizes.list, out));
  if (product(*out) != product(in[0]))
    return fail(PS_INVALID_ARGUMENT, "sizes: expected %lld elements as x has, got %s", ll(product(in[0])),
                describe(*out).text);
  return PS_OK;
}
Phases reshape_phases(const Call&) { return Phases{&kReshape, 1}; }
ps_status reshape_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_permute(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_length("order", attrs[kPermuteOrder], in[0].rank));
  int64_t dims[kMaxRank];
  uint32_t found = 0;
  for (int32_t i = 0; i < in[0].rank; ++i) {
    AttrValue axis{};
    axis.i = attrs[kPermuteOrder].list[i];
    PS_TRY(resolve_axis("order", &axis, in[0].rank));
    found |= 1u << axis.i;
    dims[i] = in[0].dims[axis.i].offset;
  }
  if (found != (1u << in[0].rank) - 1)
    return fail(PS_INVALID_ARGUMENT, "order: expected each axis once, got %.*s", PS_STR(attrs[kPermuteOrder].s));
  return set_output(in[0].dtype, in[0].rank, dims, out);
}
Phases permute_phases(const Call&) { return Phases{&kPermute, 1}; }
ps_status permute_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_slice(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_length("begins", attrs[kSliceBegins], in[0].rank));
  PS_TRY(expect_length("ends", attrs[kSliceEnds], in[0].rank));
  PS_TRY(expect_length("steps", attrs[kSliceSteps], in[0].rank));
  int64_t dims[kMaxRank];
  for (int32_t i = 0; i < in[0].rank; ++i) {
    const int64_t begin = attrs[kSliceBegins].list[i], end = attrs[kSliceEnds].list[i],
                  step = attrs[kSliceSteps].list[i], size = in[0].dims[i].offset;
    if (begin < -kMaxDim || begin > kMaxDim || end < -kMaxDim || end > kMaxDim)
      return fail(PS_INVALID_ARGUMENT, "begins, ends: expected places up to 2^31, got %lld to %lld", ll(begin),
                  ll(end));
    if (step == 0 || step < -kMaxDim || step > kMaxDim)
      return fail(PS_INVALID_ARGUMENT, "steps: expected a step other than 0, got %lld", ll(step));
    const int64_t distance = step > 0 ? end - begin : begin - end, stride = step > 0 ? step : -step;
    dims[i] = distance > 0 ? (distance + stride - 1) / stride : 0;
    if (dims[i] == 0) continue;
    if (dims[i] > size || begin < 0 || begin >= size || begin + (dims[i] - 1) * step < 0 ||
        begin + (dims[i] - 1) * step >= size)
      return fail(PS_INVALID_ARGUMENT, "begins, ends: expected places among the %lld of axis %d, got %lld to %lld",
                  ll(size), i, ll(begin), ll(end));
  }
  return set_output(in[0].dtype, in[0].rank, dims, out);
}
Phases slice_phases(const Call&) { return Phases{&kSlice, 1}; }
ps_status slice_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_expand(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  const AttrValue& sizes = attrs[kExpandSizes];
  if (sizes.i > kMaxRank)
    return fail(PS_INVALID_ARGUMENT, "sizes: expected up to %d numbers, got %lld", kMaxRank, ll(sizes.i));
  int64_t dims[kMaxRank];
  int32_t rank = static_cast<int32_t>(sizes.i);
  for (int32_t i = 0; i < rank; ++i) dims[i] = sizes.list[i];
  PS_TRY(broadcast(in[0], "x", dims, &rank));
  return set_output(in[0].dtype, rank, dims, out);
}
Phases expand_phases(const Call&) { return Phases{&kExpand, 1}; }
ps_status expand_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_concat(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "a", kAnyDtype));
  PS_TRY(resolve_axis("axis", &attrs[kConcatAxis], in[0].rank));
  const int32_t axis = static_cast<int32_t>(attrs[kConcatAxis].i);
  int64_t dims[kMaxRank];
  for (int32_t i = 0; i < in[0].rank; ++i) dims[i] = in[0].dims[i].offset;
  for (int32_t input = 1; input < kConcatInputs; ++input) {
    const Spec& s = in[input];
    if (s.kind == OPERAND_NONE) continue;
    bool fits = s.dtype == in[0].dtype && s.rank == in[0].rank;
    for (int32_t i = 0; i < in[0].rank && fits; ++i) fits = i == axis || equal(s.dims[i], in[0].dims[i]);
    if (!fits)
      return fail(PS_INVALID_ARGUMENT, "%c: expected %s but for axis %d, got %s", 'a' + input, describe(in[0]).text,
                  axis, describe(s).text);
    dims[axis] += s.dims[axis].offset;
  }
  return set_output(in[0].dtype, in[0].rank, dims, out);
}
Phases concat_phases(const Call&) { return Phases{&kConcat, 1}; }
ps_status concat_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_trilu(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kAnyDtype));
  PS_TRY(expect_length("diagonal", attrs[kTriluDiagonal], 1));
  if (in[0].rank < 2) return fail(PS_INVALID_ARGUMENT, "x: expected 2 dims or more, got %s", describe(in[0]).text);
  copy_type(in[0], out);
  return PS_OK;
}
Phases trilu_phases(const Call&) { return Phases{&kTrilu, 1}; }
ps_status trilu_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
