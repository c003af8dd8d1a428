// Ops of general networks: arg_reduce, top_k, cumsum.
// Hot: runs in every step.
#include "arrays/integers.h"
#include "ops/expect.h"
#include "base/size_list.h"

namespace ps {
namespace {

constexpr int32_t kArgKind = attr_at(OP_ARG_REDUCE, "str kind"), kArgAxis = attr_at(OP_ARG_REDUCE, "int axis"),
                  kArgKeep = attr_at(OP_ARG_REDUCE, "bool keep"), kArgLast = attr_at(OP_ARG_REDUCE, "bool last"),
                  kTopSize = attr_at(OP_TOP_K, "int[] k"), kTopAxis = attr_at(OP_TOP_K, "int axis"),
                  kTopLargest = attr_at(OP_TOP_K, "bool largest"), kSumAxis = attr_at(OP_CUMSUM, "int axis"),
                  kSumExclusive = attr_at(OP_CUMSUM, "bool exclusive"),
                  kSumReverse = attr_at(OP_CUMSUM, "bool reverse");

// The positions of a column's elements in x [outer, n, inner], which has outer * inner columns.
struct Columns {
  int64_t n, inner;
  int32_t dtype;
  const uint8_t* data;

  Columns(const Tensor& x, int64_t axis)
      : n(x.rank ? x.dims[axis] : 1),
        inner(x.rank ? extent(x, static_cast<int32_t>(axis) + 1, x.rank) : 1),
        dtype(x.dtype),
        data(x.data) {}
  int64_t first(int64_t column) const { return column / inner * n * inner + column % inner; }
};
int64_t num_columns(const Tensor& x, int64_t axis) {
  return x.rank ? extent(x, 0, static_cast<int32_t>(axis)) * extent(x, static_cast<int32_t>(axis) + 1, x.rank) : 1;
}

// Maps elements to integers of the same order; zeros are equal, NaN is the largest.
void load_keys(int32_t dtype, const uint8_t* data, int64_t step, int64_t n, int64_t* out) {
  if (dtype != PS_F32) return load_integers(dtype, data, step, n, out);
  for (int64_t i = 0; i < n; ++i) {
    const float x = reinterpret_cast<const float*>(data)[i * step] + 0.f;
    int32_t bits;
    memcpy(&bits, &x, 4);
    out[i] = x != x ? int64_t{INT32_MAX} + 1 : int64_t{bits ^ (bits >> 31 & INT32_MAX)};
  }
}

// ---- arg_reduce ----

int64_t arg_items(const Call& c) { return num_elements(c.out[0]); }

void run_arg_reduce(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Columns x(c.in[0], c.attrs[kArgAxis].i);
  const bool last = c.attrs[kArgLast].i, smallest = c.attrs[kArgKind].i;
  const int64_t bytes = dtype_bytes(x.dtype), nan = x.dtype == PS_F32 ? int64_t{INT32_MAX} + 1 : INT64_MAX;
  int64_t* y = reinterpret_cast<int64_t*>(c.out[0].data);
  for (int64_t item = begin; item < end; ++item) {
    const uint8_t* column = x.data + x.first(item) * bytes;
    int64_t keys[kBlock], best = 0, place = 0;
    for (int64_t i = 0; i < x.n; i += kBlock) {
      const int64_t n = x.n - i < kBlock ? x.n - i : kBlock;
      load_keys(x.dtype, column + i * x.inner * bytes, x.inner, n, keys);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t key = !smallest || (x.dtype == PS_F32 && keys[j] == nan) ? keys[j] : ~keys[j];
        if ((i + j == 0) || key > best || (last && key == best)) {
          best = key;
          place = i + j;
        }
      }
    }
    y[item] = place;
  }
}
constexpr Phase kArgReduce = {
    .split = SPLIT_ITEMS, .items = arg_items, .run = run_arg_reduce, .reads_all = operands(0), .writes_outputs = true};

// ---- top_k ----

struct Entry { int64_t key, index; };
bool is_before(const Entry& a, const Entry& b) { return a.key != b.key ? a.key > b.key : a.index < b.index; }

// A heap whose top is the last in the order.
void sink(Entry* heap, int64_t n, int64_t at) {
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && is_before(heap[child], heap[child + 1])) ++child;
    if (!is_before(heap[at], heap[child])) return;
    const Entry entry = heap[at];
    heap[at] = heap[child];
    heap[child] = entry;
  }
}

int64_t top_items(const Call& c) { return num_elements(c.out[0]) ? num_columns(c.in[0], c.attrs[kTopAxis].i) : 0; }

void run_top_k(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Columns x(c.in[0], c.attrs[kTopAxis].i);
  const int64_t k = c.attrs[kTopSize].list[0], bytes = dtype_bytes(x.dtype);
  Entry* heap = reinterpret_cast<Entry*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  for (int64_t item = begin; item < end; ++item) {
    const uint8_t* column = x.data + x.first(item) * bytes;
    int64_t keys[kBlock];
    for (int64_t i = 0; i < x.n; i += kBlock) {
      const int64_t n = x.n - i < kBlock ? x.n - i : kBlock;
      load_keys(x.dtype, column + i * x.inner * bytes, x.inner, n, keys);
      for (int64_t j = 0; j < n; ++j) {
        const Entry entry{c.attrs[kTopLargest].i ? keys[j] : ~keys[j], i + j};
        if (i + j < k) {
          heap[i + j] = entry;
          if (i + j + 1 == k) {
            for (int64_t at = k / 2; at-- > 0;) sink(heap, k, at);
          }
        } else if (is_before(entry, heap[0])) {
          heap[0] = entry;
          sink(heap, k, 0);
        }
      }
    }
    for (int64_t left = k - 1; left > 0; --left) {
      const Entry entry = heap[0];
      heap[0] = heap[left];
      heap[left] = entry;
      sink(heap, left, 0);
    }
    const int64_t first = item / x.inner * k * x.inner + item % x.inner;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t to = first + i * x.inner;
      memcpy(c.out[0].data + to * bytes, column + heap[i].index * x.inner * bytes, static_cast<size_t>(bytes));
      reinterpret_cast<int64_t*>(c.out[1].data)[to] = heap[i].index;
    }
  }
}
constexpr Phase kTopK = {
    .split = SPLIT_ITEMS, .items = top_items, .run = run_top_k, .reads_all = operands(0), .writes_outputs = true};

// ---- cumsum ----

constexpr int64_t kLanes = 16;

int64_t cumsum_items(const Call& c) {
  const Columns x(c.in[0], c.attrs[kSumAxis].i);
  return num_elements(c.in[0]) ? num_columns(c.in[0], c.attrs[kSumAxis].i) / x.inner * num_blocks(x.inner, kLanes) : 0;
}

void run_cumsum(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Columns x(c.in[0], c.attrs[kSumAxis].i);
  const bool exclusive = c.attrs[kSumExclusive].i, reverse = c.attrs[kSumReverse].i;
  const int64_t blocks = num_blocks(x.inner, kLanes), bytes = dtype_bytes(x.dtype);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item % blocks * kLanes, left = x.inner - column, lanes = left < kLanes ? left : kLanes;
    float sums[kLanes] = {};
    int64_t totals[kLanes] = {}, values[kLanes];
    for (int64_t i = 0; i < x.n; ++i) {
      const int64_t place = reverse ? x.n - 1 - i : i;
      const int64_t at = (item / blocks * x.n + place) * x.inner + column;
      if (x.dtype == PS_F32) {
        const float* from = reinterpret_cast<const float*>(x.data) + at;
        float* to = reinterpret_cast<float*>(c.out[0].data) + at;
        for (int64_t j = 0; j < lanes; ++j) {
          const float sum = sums[j] + from[j];
          to[j] = exclusive ? sums[j] : sum;
          sums[j] = sum;
        }
        continue;
      }
      load_integers(x.dtype, x.data + at * bytes, 1, lanes, values);
      if (exclusive) store_integers(x.dtype, totals, lanes, c.out[0].data + at * bytes);
      for (int64_t j = 0; j < lanes; ++j)
        totals[j] = static_cast<int64_t>(static_cast<uint64_t>(totals[j]) + static_cast<uint64_t>(values[j]));
      if (!exclusive) store_integers(x.dtype, totals, lanes, c.out[0].data + at * bytes);
    }
  }
}
constexpr Phase kCumsum = {
    .split = SPLIT_ITEMS, .items = cumsum_items, .run = run_cumsum, .reads_all = operands(0), .writes_outputs = true};

// Normalizes the axis of a tensor; a scalar has the axes -1 and 0.
ps_status take_axis(AttrValue* axis, int32_t rank) {
  if (rank == 0 && (axis->i == 0 || axis->i == -1)) {
    axis->i = 0;
    return PS_OK;
  }
  return resolve_axis("axis", axis, rank);
}

}  // namespace

ps_status infer_arg_reduce(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kIntsAndBool | dtypes(PS_F32)));
  AttrValue& kind = attrs[kArgKind];
  if (!equal(kind.s, "max") && !equal(kind.s, "min"))
    return fail(PS_UNSUPPORTED, "kind: expected max or min, got \"%.*s\"", PS_STR(kind.s));
  kind.i = equal(kind.s, "min");
  PS_TRY(take_axis(&attrs[kArgAxis], in[0].rank));
  int64_t dims[kMaxRank];
  int32_t rank = 0;
  for (int32_t i = 0; i < in[0].rank; ++i) {
    const bool reduced = i == attrs[kArgAxis].i;
    if (reduced && in[0].dims[i].offset == 0)
      return fail(PS_INVALID_ARGUMENT, "x: expected elements along axis %d, got %s", i, describe(in[0]).text);
    if (!reduced || attrs[kArgKeep].i) dims[rank++] = reduced ? 1 : in[0].dims[i].offset;
  }
  return set_output(PS_I64, rank, dims, out);
}
Phases arg_reduce_phases(const Call&) { return Phases{&kArgReduce, 1}; }
ps_status arg_reduce_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_top_k(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kIntsAndBool | dtypes(PS_F32)));
  PS_TRY(take_axis(&attrs[kTopAxis], in[0].rank));
  const AttrValue& k = attrs[kTopSize];
  const int64_t size = in[0].rank ? in[0].dims[attrs[kTopAxis].i].offset : 1;
  if (k.i != 1 || k.list[0] < 0 || k.list[0] > size)
    return fail(PS_INVALID_ARGUMENT, "k: expected 0 to %lld, got %.*s", static_cast<long long>(size), PS_STR(k.s));
  int64_t dims[kMaxRank];
  for (int32_t i = 0; i < in[0].rank; ++i) dims[i] = i == attrs[kTopAxis].i ? k.list[0] : in[0].dims[i].offset;
  PS_TRY(set_output(in[0].dtype, in[0].rank, dims, &out[0]));
  return set_output(PS_I64, in[0].rank, dims, &out[1]);
}
Phases top_k_phases(const Call&) { return Phases{&kTopK, 1}; }
ps_status top_k_scratch(const Call& c, Scratch* out) {
  out->per_thread = c.attrs[kTopSize].list[0] * static_cast<int64_t>(sizeof(Entry));
  return PS_OK;
}

ps_status infer_cumsum(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_dtype(in[0], "x", kInts | dtypes(PS_F32)));
  PS_TRY(take_axis(&attrs[kSumAxis], in[0].rank));
  copy_type(in[0], out);
  return PS_OK;
}
Phases cumsum_phases(const Call&) { return Phases{&kCumsum, 1}; }
ps_status cumsum_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
