// The phases of expert_linear: rows sorted by expert, and one blocked matmul for each expert that has rows. head_linear
// is the same with heads for experts: slot h of each token goes to expert h.
//
// The weight stacks the out_features rows of all experts, in the layout of a linear.  An expert whose rows begin or end
// inside a tile computes the whole tile, and only its own columns are copied to the output.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "base/tiles.h"
#include "ops/ops.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }

bool by_heads(const Call& c) { return c.in[kExpertIds].rank == 0; }  // head_linear has no ids
int64_t num_slots(const Call& c) { return by_heads(c) ? c.attrs[kExpertNum].i : c.in[kExpertIds].dims[1]; }
int64_t expert_of(const Call& c, int64_t row) {
  return by_heads(c) ? row % num_slots(c) : reinterpret_cast<const int32_t*>(c.in[kExpertIds].data)[row];
}
int64_t num_rows(const Call& c) { return c.in[0].dims[0] * num_slots(c); }  // tokens times slots
int64_t in_features(const Call& c) { return c.in[kExpertWeight].dims[1]; }
int64_t most_active(const Call& c) { return std::min(num_rows(c), c.attrs[kExpertNum].i); }

// The maximum number of tiles that an expert touches.
int64_t most_tiles(const Call& c) {
  const int64_t rows = c.attrs[kExpertOutFeatures].i;
  return rows % kTileRows ? rows / kTileRows + 2 : rows / kTileRows;
}

int32_t planes(const Call& c) { return activation_planes(c.attrs[kExpertScheme].i); }
bool is_bf16(const Call& c) { return c.attrs[kExpertScheme].i == LINEAR_BF16; }
bool has_blocks(const Call& c) { return c.attrs[kExpertScheme].i >= LINEAR_Q8_0; }

// Bytes of a row of activations after rounding.
int64_t rounded_stride(const Call& c) {
  const int64_t cols = in_features(c);
  if (has_blocks(c)) return round_up(cols, kPairColumns) / kGroupColumns * static_cast<int64_t>(sizeof(RoundedGroup));
  return planes(c) ? round_up(cols, kPairColumns) : is_bf16(c) ? round_up(cols, 32) * c.kernels->bf16_bytes : 0;
}

// Bytes of a sorted row, and offsets in the shared scratch.
struct Offsets { int64_t stride, starts, active, places, sources, x, q, group_sums, sums, scales, y, total; };

struct Adder {
  int64_t total = 0;
  bool fits = true;
  int64_t add(int64_t count, int64_t bytes) {
    const int64_t at = total;
    int64_t size;
    fits &= checked_mul(count, bytes, &size) && checked_align(size, 64, &size) && checked_add(total, size, &total);
    return at;
  }
};

bool offsets_of(const Call& c, Offsets* o) {
  const int64_t rows = num_rows(c), cols = in_features(c), p = planes(c);
  o->stride = rounded_stride(c);
  Adder sum;
  o->starts = sum.add(c.attrs[kExpertNum].i + 2, 4);  // and the number of active experts
  o->active = sum.add(c.attrs[kExpertNum].i, 4);
  o->places = sum.add(rows, 4);
  o->sources = sum.add(rows, 4);
  o->x = sum.add(rows, round_up(cols, 16) * 4);
  o->q = sum.add(rows * std::max<int64_t>(p, 1), o->stride);
  o->group_sums = sum.add(rows * p, o->stride / kGroupColumns * 2);
  o->sums = sum.add(rows * p, 4);
  o->scales = sum.add(rows, 4);
  o->y = sum.add(rows, most_tiles(c) * kTileRows * 4);
  o->total = sum.total;
  return sum.fits;
}

struct Sorted {
  Offsets o;
  int32_t *starts, *active, *places, *sources;
  int32_t& num_active(const Call& c) const { return starts[c.attrs[kExpertNum].i + 1]; }
};

Sorted sorted_of(const Call& c) {
  Sorted s{};
  offsets_of(c, &s.o);
  s.starts = reinterpret_cast<int32_t*>(c.scratch + s.o.starts);
  s.active = reinterpret_cast<int32_t*>(c.scratch + s.o.active);
  s.places = reinterpret_cast<int32_t*>(c.scratch + s.o.places);
  s.sources = reinterpret_cast<int32_t*>(c.scratch + s.o.sources);
  return s;
}

int64_t one(const Call& c) { return num_rows(c) ? 1 : 0; }
int64_t tokens(const Call& c) { return c.in[0].dims[0]; }
int64_t tiles(const Call& c) { return most_active(c) * most_tiles(c); }

// starts: first row of each expert; places: sorted position of a token's slot; sources: the inverse.
void run_sort(const Call& c, int64_t, int64_t, int32_t) {
  const Sorted s = sorted_of(c);
  const int64_t experts = c.attrs[kExpertNum].i, rows = num_rows(c);
  memset(s.starts, 0, static_cast<size_t>(experts + 2) * 4);
  for (int64_t i = 0; i < rows; ++i) ++s.starts[expert_of(c, i) + 1];
  int32_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (s.starts[e + 1]) s.active[count++] = static_cast<int32_t>(e);
    s.starts[e + 1] += s.starts[e];
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t place = s.starts[expert_of(c, i)]++;  // advances a start to that of the next expert
    s.places[i] = place;
    s.sources[place] = static_cast<int32_t>(i);
  }
  for (int64_t e = experts; e > 0; --e) s.starts[e] = s.starts[e - 1];
  s.starts[0] = 0;
  s.num_active(c) = count;
}

// The rounded rows of an expert whose first sorted row is `first`.
QuantizedRows rounded_rows(const Call& c, const Offsets& o, int64_t first) {
  const int64_t p = std::max(planes(c), 1);
  QuantizedRows rows{};
  rows.q = reinterpret_cast<int8_t*>(c.scratch + o.q + first * p * o.stride);
  rows.scale = reinterpret_cast<float*>(c.scratch + o.scales) + first;
  rows.sums = reinterpret_cast<int32_t*>(c.scratch + o.sums) + first * p;
  rows.group_sums = reinterpret_cast<int16_t*>(c.scratch + o.group_sums) + first * p * (o.stride / kGroupColumns);
  rows.stride = o.stride;
  rows.planes = planes(c);
  return rows;
}

// Gathers sorted rows and rounds them.
void run_gather(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sorted s = sorted_of(c);
  const int64_t cols = in_features(c), stride = round_up(cols, 16), slots = num_slots(c);
  float* const x = reinterpret_cast<float*>(c.scratch + s.o.x);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t token = s.sources[p] / slots, slot = c.in[0].rank == 3 ? s.sources[p] % slots : 0;
    memcpy(x + p * stride, f32(c.in[0]) + token * c.in[0].row_stride + slot * cols, static_cast<size_t>(cols) * 4);
    if (is_rotated(c.attrs[kExpertScheme].i)) c.kernels->rotate_row(x + p * stride, x + p * stride, cols);
  }
  if (!s.o.stride) return;
  int64_t e = std::upper_bound(s.starts, s.starts + c.attrs[kExpertNum].i + 1, begin) - s.starts - 1;
  for (int64_t p = begin; p < end; ++e) {
    const int64_t first = s.starts[e], m = s.starts[e + 1] - first, stop = std::min<int64_t>(end, s.starts[e + 1]);
    if (p >= stop) continue;
    const QuantizedRows rows = rounded_rows(c, s.o, first);
    const float* own = x + first * stride;
    if (planes(c))
      c.kernels->quantize_rows(own, stride, cols, m, c.in[kExpertWeight].layout, rows, p - first, stop - first);
    else if (has_blocks(c)) c.kernels->quantize_groups(own, stride, cols, rows, p - first, stop - first);
    else c.kernels->round_rows_bf16(own, stride, cols, m, rows, p - first, stop - first);
    p = stop;
  }
}

int64_t first_tile(const Call& c, int64_t expert) { return expert * c.attrs[kExpertOutFeatures].i / kTileRows; }

void multiply(const Call& c, const Sorted& s, int64_t expert, int64_t begin, int64_t end, int32_t thread) {
  const int64_t tile = first_tile(c, expert), rows = c.attrs[kExpertOutFeatures].i, first = s.starts[expert];
  const int64_t count = (((expert + 1) * rows + kTileRows - 1) / kTileRows) - tile;
  end = std::min(end, count);
  if (begin >= end) return;
  int64_t tile_bytes = 0;
  if (checked_bytes(c.in[kExpertWeight].layout, kTileRows, in_features(c), &tile_bytes) != PS_OK) return;
  LinearArgs args{};
  const int64_t left = c.in[kExpertWeight].dims[0] - tile * kTileRows;
  args.weight = WeightView{c.in[kExpertWeight].data + tile * tile_bytes, c.in[kExpertWeight].layout,
                           std::min(left, count * kTileRows), in_features(c)};
  args.x_stride = round_up(in_features(c), 16);
  args.x = reinterpret_cast<float*>(c.scratch + s.o.x) + first * args.x_stride;
  if (s.o.stride) args.qx = rounded_rows(c, s.o, first);
  args.y_stride = most_tiles(c) * kTileRows;
  args.y = reinterpret_cast<float*>(c.scratch + s.o.y) + first * args.y_stride;
  args.m = s.starts[expert + 1] - s.starts[expert];
  args.panel = c.thread_scratch + thread * c.thread_scratch_bytes;
  args.short_prefetch = c.kernels->short_prefetch;
  c.kernels->linear[c.attrs[kExpertScheme].i](args, begin, end);
}

void run_multiply(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const Sorted s = sorted_of(c);
  const int64_t each = most_tiles(c);
  for (int64_t item = begin; item < end;) {
    const int64_t at = item / each, stop = std::min(end, (at + 1) * each);
    if (at >= s.num_active(c)) return;
    multiply(c, s, s.active[at], item - at * each, stop - at * each, thread);
    item = stop;
  }
}

// Scatters the results to their tokens, and adds the bias.
void run_scatter(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sorted s = sorted_of(c);
  const int64_t slots = num_slots(c), cols = c.attrs[kExpertOutFeatures].i, stride = most_tiles(c) * kTileRows;
  const float *results = reinterpret_cast<float*>(c.scratch + s.o.y), *bias = f32(c.in[kExpertBias]);
  for (int64_t i = begin * slots; i < end * slots; ++i) {
    const int64_t expert = expert_of(c, i);
    const float* x = results + s.places[i] * stride + (expert * cols - first_tile(c, expert) * kTileRows);
    float* y = f32(c.out[0]) + i / slots * c.out[0].row_stride + i % slots * cols;
    memcpy(y, x, static_cast<size_t>(cols) * 4);
    for (int64_t j = 0; bias && j < cols; ++j) y[j] = y[j] + bias[expert * cols + j];
  }
}

constexpr Phase kPhases[] = {
    {.split = SPLIT_ITEMS, .items = one, .run = run_sort, .reads_all = operands(kExpertIds), .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = num_rows,
     .run = run_gather,
     .reads_all = operands(0),
     .reads_scratch = true,
     .writes_scratch = true},
    {.split = SPLIT_SHARES,
     .items = tiles,
     .run = run_multiply,
     .reads_scratch = true,
     .writes_scratch = true,
     .grain = 2},
    {.split = SPLIT_ROWS,
     .items = tokens,
     .run = run_scatter,
     .reads_rows = operands(kExpertIds),
     .writes_outputs = true,
     .reads_scratch = true},
};

}  // namespace

Phases expert_linear_phases(const Call&) { return Phases{kPhases, 4}; }
Phases head_linear_phases(const Call&) { return Phases{kPhases, 4}; }

ps_status expert_linear_scratch(const Call& c, Scratch* out) {
  Offsets o;
  if (num_rows(c) > INT32_MAX || !offsets_of(c, &o)) {
    return fail(PS_INVALID_ARGUMENT, "max_tokens: the sorted rows do not fit in memory");
  }
  out->shared = o.total;
  if (planes(c))
    out->per_thread = c.kernels->linear_panel_bytes(c.in[kExpertWeight].layout, in_features(c), num_rows(c), planes(c));
  return PS_OK;
}

}  // namespace ps
