// Ops of general networks: nms.
// Hot: runs in every step.
#include "arrays/integers.h"
#include "ops/expect.h"

namespace ps {
namespace {

constexpr int64_t kMaxComparisons = int64_t{1} << 36;  // per class: about a minute of one core
constexpr int32_t kLimit = attr_at(OP_NMS, "int[] limit"), kIou = attr_at(OP_NMS, "float iou"),
                  kScore = attr_at(OP_NMS, "float score"), kFiltered = attr_at(OP_NMS, "bool filtered"),
                  kBoxes = attr_at(OP_NMS, "str format");

enum Format { CORNERS, CENTERS, ORDERED };

struct Box { float low[2], high[2], area; };

// The box whose four numbers are at b.  Corners may be in any order.
Box box_at(const float* b, int64_t format) {
  Box box;
  for (int32_t i = 0; i < 2; ++i) {
    if (format == CENTERS) {
      const float half = b[2 + i] / 2;
      box.low[i] = b[i] - half;
      box.high[i] = b[i] + half;
    } else {
      const bool swapped = format == CORNERS && b[i] > b[2 + i];
      box.low[i] = b[swapped ? 2 + i : i];
      box.high[i] = b[swapped ? i : 2 + i];
    }
  }
  box.area = (box.high[0] - box.low[0]) * (box.high[1] - box.low[1]);
  return box;
}

bool overlaps(const Box& a, const Box& b, double limit) {
  float sides[2];
  for (int32_t i = 0; i < 2; ++i) {
    sides[i] = (a.high[i] < b.high[i] ? a.high[i] : b.high[i]) - (a.low[i] > b.low[i] ? a.low[i] : b.low[i]);
    if (!(sides[i] > 0)) return false;
  }
  const float common = sides[0] * sides[1];
  return static_cast<double>(common / (a.area + b.area - common)) > limit;
}

// A candidate box.  The heap's top has the highest score, and the lowest index among equals.
struct Scored {
  float score;
  int32_t index;
};
bool is_before(const Scored& a, const Scored& b) {
  const bool is_nan = a.score != a.score, other = b.score != b.score;  // NaN is the largest, as in top_k
  if (is_nan != other) return is_nan;
  return is_nan || a.score == b.score ? a.index < b.index : a.score > b.score;
}
void sink(Scored* heap, int64_t n, int64_t at) {
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && is_before(heap[child + 1], heap[child])) ++child;
    if (!is_before(heap[child], heap[at])) return;
    const Scored moved = heap[at];
    heap[at] = heap[child];
    heap[child] = moved;
  }
}

// The shared scratch: for each class of each image the number of selected boxes, then room for `limit` of them.
int32_t* selection(const Call& c, int64_t item) {
  return reinterpret_cast<int32_t*>(c.scratch) + item * (c.attrs[kLimit].list[0] + 1);
}
// The number of classes of all images; 0 if `limit` is 0, when the product is not bounded by the number of rows.
int64_t nms_items(const Call& c) { return c.attrs[kLimit].list[0] ? c.in[1].dims[0] * c.in[1].dims[1] : 0; }

void run_select(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const int64_t n = c.in[1].dims[2], limit = c.attrs[kLimit].list[0], format = c.attrs[kBoxes].i;
  const float least = static_cast<float>(c.attrs[kScore].f);
  Box* const kept = reinterpret_cast<Box*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  Scored* const heap = reinterpret_cast<Scored*>(kept + limit);
  for (int64_t item = begin; item < end; ++item) {
    const float* scores = reinterpret_cast<const float*>(c.in[1].data) + item * n;
    const float* boxes = reinterpret_cast<const float*>(c.in[0].data) + item / c.in[1].dims[1] * n * 4;
    int64_t left = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (!c.attrs[kFiltered].i || scores[i] > least) heap[left++] = Scored{scores[i], static_cast<int32_t>(i)};
    }
    for (int64_t at = left / 2; at-- > 0;) sink(heap, left, at);
    int32_t count = 0, *const to = selection(c, item);
    while (left > 0 && count < limit) {
      const int32_t index = heap[0].index;
      heap[0] = heap[--left];
      sink(heap, left, 0);
      const Box box = box_at(boxes + index * int64_t{4}, format);
      int32_t i = 0;
      while (i < count && !overlaps(kept[i], box, c.attrs[kIou].f)) ++i;
      if (i < count) continue;
      kept[count] = box;
      to[++count] = index;
    }
    to[0] = count;
  }
}
constexpr Phase kSelect = {
    .split = SPLIT_ITEMS, .items = nms_items, .run = run_select, .reads_all = operands(0, 1), .writes_scratch = true};

// One thread concatenates the selected boxes of all classes, because their number is known only now.  The remaining
// rows become 0, which is a valid box index, so a gather by them stays in range.
int64_t one_item(const Call&) { return 1; }
void run_collect(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (begin == end) return;
  int64_t* const rows = reinterpret_cast<int64_t*>(c.out[0].data);
  const int64_t classes = c.in[1].dims[1];
  int64_t count = 0;
  for (int64_t item = 0; item < nms_items(c); ++item) {
    const int32_t* from = selection(c, item);
    for (int32_t i = 0; i < from[0]; ++i, ++count) {
      rows[count * 3] = item / classes;
      rows[count * 3 + 1] = item % classes;
      rows[count * 3 + 2] = from[1 + i];
    }
  }
  for (int64_t i = count * 3; i < num_elements(c.out[0]); ++i) rows[i] = 0;
  *reinterpret_cast<int64_t*>(c.out[1].data) = count;
}
constexpr Phase kCollect = {
    .split = SPLIT_ITEMS, .items = one_item, .run = run_collect, .writes_outputs = true, .reads_scratch = true};
constexpr Phase kNms[] = {kSelect, kCollect};

}  // namespace

ps_status infer_nms(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "boxes", 3, 3));
  PS_TRY(expect_f32(in[1], "scores", 3, 3));
  const Dim *boxes = in[0].dims, *scores = in[1].dims;
  if (boxes[2].offset != 4 || boxes[0].offset != scores[0].offset || boxes[1].offset != scores[2].offset)
    return fail(PS_INVALID_ARGUMENT, "boxes: expected [%lld, %lld, 4] for the scores %s, got %s",
                static_cast<long long>(scores[0].offset), static_cast<long long>(scores[2].offset),
                describe(in[1]).text, describe(in[0]).text);
  const AttrValue& limit = attrs[kLimit];
  if (limit.i != 1 || limit.list[0] < 0 || limit.list[0] > scores[2].offset)
    return fail(PS_INVALID_ARGUMENT, "limit: expected 0 to %lld, got %.*s", static_cast<long long>(scores[2].offset),
                PS_STR(limit.s));
  if (limit.list[0] && scores[2].offset > kMaxComparisons / limit.list[0])
    return fail(PS_INVALID_ARGUMENT, "limit: expected up to %lld of %lld boxes of a class, got %lld",
                static_cast<long long>(kMaxComparisons / scores[2].offset), static_cast<long long>(scores[2].offset),
                static_cast<long long>(limit.list[0]));
  if (!(attrs[kIou].f >= 0 && attrs[kIou].f <= 1))
    return fail(PS_INVALID_ARGUMENT, "iou: expected 0 to 1, got %g", attrs[kIou].f);
  AttrValue& format = attrs[kBoxes];
  if (equal(format.s, "corners")) {
    format.i = CORNERS;
  } else if (equal(format.s, "centers")) {
    format.i = CENTERS;
  } else if (equal(format.s, "ordered")) {
    format.i = ORDERED;
  } else {
    return fail(PS_UNSUPPORTED, "format: expected corners, centers or ordered, got \"%.*s\"", PS_STR(format.s));
  }
  const int64_t pairs[2] = {scores[0].offset, scores[1].offset}, one = 1;
  PS_TRY(set_output(PS_I64, 2, pairs, &out[0]));  // bounds the product below
  const int64_t most = pairs[0] * pairs[1];
  if (limit.list[0] && most > kMaxDim / limit.list[0])
    return fail(PS_INVALID_ARGUMENT, "limit: expected up to 2^31 boxes in all, got %lld for each of %lld classes",
                static_cast<long long>(limit.list[0]), static_cast<long long>(most));
  const int64_t dims[2] = {most * limit.list[0], 3};
  PS_TRY(set_output(PS_I64, 2, dims, &out[0]));
  return set_output(PS_I64, 1, &one, &out[1]);
}
Phases nms_phases(const Call&) { return Phases{kNms, 2}; }
ps_status nms_scratch(const Call& c, Scratch* out) {
  const int64_t limit = c.attrs[kLimit].list[0];
  out->shared = nms_items(c) * (limit + 1) * static_cast<int64_t>(sizeof(int32_t));
  out->per_thread = limit * static_cast<int64_t>(sizeof(Box)) + c.in[1].dims[2] * static_cast<int64_t>(sizeof(Scored));
  return PS_OK;
}

}  // namespace ps
