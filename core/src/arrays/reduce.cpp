// Ops of general networks: softmax, reduce.
// Hot: runs in every step.
#include "arrays/integers.h"
#include "arrays/strided_copy.h"
#include "ops/expect.h"

namespace ps {
namespace {

constexpr int32_t kSoftmaxAxis = attr_at(OP_SOFTMAX, "int axis"), kSoftmaxLog = attr_at(OP_SOFTMAX, "bool log"),
                  kReduceKind = attr_at(OP_REDUCE, "str kind"), kReduceAxes = attr_at(OP_REDUCE, "int[] axes"),
                  kReduceKeep = attr_at(OP_REDUCE, "bool keep");

constexpr const char* kReduceKinds[NUM_REDUCE_KINDS] = {"sum", "mean", "max",        "min",     "prod",
                                                        "l1",  "l2",   "sum_square", "log_sum", "log_sum_exp"};

const float* f32(const uint8_t* data) { return reinterpret_cast<const float*>(data); }
float* f32(uint8_t* data) { return reinterpret_cast<float*>(data); }

// ---- softmax ----

struct Middle { int64_t outer, n, inner; };
Middle middle_of(const Tensor& t, int32_t axis) {
  return Middle{extent(t, 0, axis), t.dims[axis], extent(t, axis + 1, t.rank)};
}
Middle softmax_middle(const Call& c) {
  return c.in[0].rank ? middle_of(c.in[0], static_cast<int32_t>(c.attrs[kSoftmaxAxis].i)) : Middle{1, 1, 1};
}
int64_t softmax_items(const Call& c) {
  const Middle m = softmax_middle(c);
  return m.n ? m.outer * num_blocks(m.inner, kInnerBlock) : 0;
}
void run_softmax(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Middle m = softmax_middle(c);
  c.kernels->softmax(
      SoftmaxArgs{f32(c.in[0].data), f32(c.out[0].data), m.n, m.inner, static_cast<int32_t>(c.attrs[kSoftmaxLog].i)},
      begin, end);
}
constexpr Phase kSoftmax = {
    .split = SPLIT_ITEMS, .items = softmax_items, .run = run_softmax, .reads_all = operands(0), .writes_outputs = true};

// ---- reduce ----

uint32_t reduced_axes(const AttrValue& axes, int32_t rank) {
  uint32_t mask = 0;
  for (int64_t i = 0; i < axes.i; ++i) mask |= 1u << (axes.list[i] < 0 ? axes.list[i] + rank : axes.list[i]);
  return mask;
}

// The reduced axes are adjacent, apart from axes of size 1; otherwise `copy` moves them to the end first.
struct ReducePlan {
  Middle middle{1, 1, 1};
  bool direct = true;
  StridedCopy copy;
};

ReducePlan plan_reduce(const Call& c) {
  ReducePlan plan;
  const Tensor& x = c.in[0];
  const uint32_t mask = reduced_axes(c.attrs[kReduceAxes], x.rank);
  bool begun = false, ended = false;
  for (int32_t i = 0; i < x.rank; ++i) {
    if (x.dims[i] == 1) continue;
    if (mask >> i & 1) {
      plan.direct = plan.direct && !ended;
      begun = true;
      plan.middle.n *= x.dims[i];
    } else {
      ended = begun;
      (begun ? plan.middle.inner : plan.middle.outer) *= x.dims[i];
    }
  }
  if (plan.direct) return plan;
  plan.middle.outer *= plan.middle.inner;
  plan.middle.inner = 1;
  int64_t strides[kMaxRank], stride = 1;
  for (int32_t i = x.rank - 1; i >= 0; stride *= x.dims[i--]) strides[i] = stride;
  for (uint32_t reduced = 0; reduced < 2; ++reduced) {
    for (int32_t i = 0; i < x.rank; ++i) {
      if ((mask >> i & 1) == reduced) plan.copy.add(x.dims[i], strides[i]);
    }
  }
  plan.copy.bytes = dtype_bytes(x.dtype);
  plan.copy.plan();
  return plan;
}

int64_t gathered_items(const Call& c) { return plan_reduce(c).copy.items(); }
void run_gathered(const Call& c, int64_t begin, int64_t end, int32_t) {
  plan_reduce(c).copy.run(c.in[0].data, c.scratch, begin, end);
}

int64_t reduce_items(const Call& c) {
  const Middle m = plan_reduce(c).middle;
  return m.outer * (c.in[0].dtype == PS_F32 ? num_blocks(m.inner, kInnerBlock) : m.inner);
}

int64_t reduce_integers(int32_t kind, int32_t dtype, const uint8_t* data, int64_t n, int64_t step) {
  const int64_t bytes = dtype_bytes(dtype);
  uint64_t sum = kind == REDUCE_PROD ? 1 : 0;
  int64_t best = kind == REDUCE_MAX ? INT64_MIN : INT64_MAX, block[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    load_integers(dtype, data + i * step * bytes, step, count, block);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t v = block[j];
      const uint64_t word = static_cast<uint64_t>(v);
      // clang-format off: one kind a line
      switch (kind) {
        case REDUCE_MAX: best = v > best ? v : best; break;
        case REDUCE_MIN: best = v < best ? v : best; break;
        case REDUCE_PROD: sum *= word; break;
        case REDUCE_L1: sum += v < 0 ? 0 - word : word; break;
        case REDUCE_SUM_SQUARE: sum += word * word; break;
        default: sum += word;
      }
      // clang-format on
    }
  }
  if (kind == REDUCE_MAX || kind == REDUCE_MIN) return best;
  const int64_t result = static_cast<int64_t>(sum);
  return kind == REDUCE_MEAN ? (n ? result / n : 0) : result;
}

void run_reduce(const Call& c, int64_t begin, int64_t end, int32_t) {
  const ReducePlan plan = plan_reduce(c);
  const Middle& m = plan.middle;
  const uint8_t* x = plan.direct ? c.in[0].data : c.scratch;
  const int32_t kind = static_cast<int32_t>(c.attrs[kReduceKind].i), dtype = c.in[0].dtype;
  if (dtype == PS_F32) {
    c.kernels->reduce(ReduceArgs{f32(x), f32(c.out[0].data), m.n, m.inner, kind}, begin, end);
    return;
  }
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item / m.inner * m.n * m.inner + item % m.inner;
    const int64_t result = reduce_integers(kind, dtype, x + first * bytes, m.n, m.inner);
    store_integers(dtype, &result, 1, c.out[0].data + item * bytes);
  }
}

constexpr Phase kReduce = {.split = SPLIT_ITEMS,
                           .items = reduce_items,
                           .run = run_reduce,
                           .reads_all = operands(0),
                           .writes_outputs = true},
                kReduceApart[] = {{.split = SPLIT_ITEMS,
                                   .items = gathered_items,
                                   .run = run_gathered,
                                   .reads_all = operands(0),
                                   .writes_scratch = true},
                                  {.split = SPLIT_ITEMS,
                                   .items = reduce_items,
                                   .run = run_reduce,
                                   .reads_all = operands(0),
                                   .writes_outputs = true,
                                   .reads_scratch = true}};

}  // namespace

ps_status infer_softmax(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", dtypes(PS_F32)));
  if (in[0].rank || attrs[kSoftmaxAxis].i < -1 || attrs[kSoftmaxAxis].i > 0)
    PS_TRY(resolve_axis("axis", &attrs[kSoftmaxAxis], in[0].rank));
  copy_type(in[0], out);
  return PS_OK;
}
Phases softmax_phases(const Call&) { return Phases{&kSoftmax, 1}; }
ps_status softmax_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_reduce(const Spec* in, AttrValue* attrs, Spec* out) {
  AttrValue& name = attrs[kReduceKind];
  name.i = -1;
  for (int32_t i = 0; i < NUM_REDUCE_KINDS; ++i) {
    if (equal(name.s, kReduceKinds[i])) name.i = i;
  }
  if (name.i < 0) return fail(PS_UNSUPPORTED, "kind: expected a reduction such as sum, got \"%.*s\"", PS_STR(name.s));
  uint32_t types = dtypes(PS_F32);
  if (name.i != REDUCE_L2 && name.i != REDUCE_LOG_SUM && name.i != REDUCE_LOG_SUM_EXP) types |= kInts;
  if (name.i == REDUCE_MAX || name.i == REDUCE_MIN) types |= dtypes(PS_BOOL);
  PS_TRY(expect_dtype(in[0], "x", types));
  const AttrValue& axes = attrs[kReduceAxes];
  for (int64_t i = 0; i < axes.i; ++i) {
    AttrValue axis{};
    axis.i = axes.list[i];
    PS_TRY(resolve_axis("axes", &axis, in[0].rank));
  }
  const uint32_t mask = reduced_axes(axes, in[0].rank);
  int64_t dims[kMaxRank];
  int32_t rank = 0;
  for (int32_t i = 0; i < in[0].rank; ++i) {
    const bool reduced = mask >> i & 1;
    if (!reduced || attrs[kReduceKeep].i) dims[rank++] = reduced ? 1 : in[0].dims[i].offset;
  }
  return set_output(in[0].dtype, rank, dims, out);
}
Phases reduce_phases(const Call& c) { return plan_reduce(c).direct ? Phases{&kReduce, 1} : Phases{kReduceApart, 2}; }
ps_status reduce_scratch(const Call& c, Scratch* out) {
  out->shared = plan_reduce(c).direct ? 0 : num_elements(c.in[0]) * dtype_bytes(c.in[0].dtype);
  return PS_OK;
}

}  // namespace ps
