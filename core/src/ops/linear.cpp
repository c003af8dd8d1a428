// The phases of linear and embedding.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "base/tiles.h"
#include "ops/ops.h"

namespace ps {
namespace {

WeightView weight_view(const Tensor& t) { return WeightView{t.data, t.layout, t.dims[0], t.dims[1]}; }
float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }

// Activations rounded to integers, in the shared scratch: rows, sums of groups, sums of rows, scales.
struct QuantizedBytes { int64_t q, group_sums, sums, total; };

int32_t planes(const Call& c) { return activation_planes(c.attrs[kLinearScheme].i); }

ps_status quantized_bytes(int64_t tokens, int32_t planes, int64_t cols, QuantizedBytes* out) {
  const int64_t stride = round_up(cols, kPairColumns);  // the columns of a weight are bounded
  int64_t rows, scales;
  if (!checked_mul(tokens, planes, &rows) || !checked_mul(rows, stride, &out->q) ||
      !checked_align(out->q, 64, &out->q) || !checked_mul(rows, stride / kGroupColumns * 2, &out->group_sums) ||
      !checked_align(out->group_sums, 64, &out->group_sums) || !checked_mul(rows, 4, &out->sums) ||
      !checked_align(out->sums, 64, &out->sums) || !checked_mul(tokens, 4, &scales) ||
      !checked_add(out->q, out->group_sums, &out->total) || !checked_add(out->total, out->sums, &out->total) ||
      !checked_add(out->total, scales + 64, &out->total)) {
    return fail(PS_INVALID_ARGUMENT, "max_tokens: the rounded activations do not fit in memory");
  }
  return PS_OK;
}

QuantizedRows quantized_rows(const Call& c) {
  QuantizedBytes bytes;
  if (quantized_bytes(c.in[0].dims[0], planes(c), c.in[0].dims[1], &bytes) != PS_OK) return QuantizedRows{};
  uint8_t* const group_sums = c.scratch + bytes.q;
  uint8_t* const sums = group_sums + bytes.group_sums;
  return QuantizedRows{reinterpret_cast<int8_t*>(c.scratch),    reinterpret_cast<float*>(sums + bytes.sums),
                       reinterpret_cast<int32_t*>(sums),        reinterpret_cast<int16_t*>(group_sums),
                       round_up(c.in[0].dims[1], kPairColumns), planes(c)};
}

bool is_bf16(const Call& c) { return c.attrs[kLinearScheme].i == LINEAR_BF16; }

// Activations rounded to bf16, in the shared scratch.
ps_status rounded_bytes(const Call& c, int64_t* stride, int64_t* total) {
  *stride = round_up(c.in[0].dims[1], 32) * c.kernels->bf16_bytes;
  if (checked_mul(c.in[0].dims[0], *stride, total)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "max_tokens: the rounded activations do not fit in memory");
}

QuantizedRows rounded_rows(const Call& c) {
  int64_t stride = 0, total = 0;
  if (rounded_bytes(c, &stride, &total) != PS_OK) return QuantizedRows{};
  QuantizedRows rows{};
  rows.q = reinterpret_cast<int8_t*>(c.scratch);
  rows.stride = stride;
  return rows;
}

// Activations rounded in groups for GGUF's block types, in the shared scratch.
bool has_blocks(const Call& c) { return c.attrs[kLinearScheme].i >= LINEAR_Q8_0; }

int64_t group_stride(const Call& c) {
  return round_up(c.in[0].dims[1], kPairColumns) / kGroupColumns * static_cast<int64_t>(sizeof(RoundedGroup));
}

ps_status groups_bytes(const Call& c, int64_t* total) {
  if (checked_mul(c.in[0].dims[0], group_stride(c), total)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "max_tokens: the rounded activations do not fit in memory");
}

QuantizedRows grouped_rows(const Call& c) {
  QuantizedRows rows{};
  rows.q = reinterpret_cast<int8_t*>(c.scratch);
  rows.stride = group_stride(c);
  return rows;
}

int64_t linear_rows(const Call& c) { return c.in[0].dims[0]; }
int64_t linear_tiles(const Call& c) { return c.in[0].dims[0] ? (c.out[0].dims[1] + kTileRows - 1) / kTileRows : 0; }

// Rotates each row into the thread's scratch, which is free in this phase.  A stride of 0 makes every row this one.
void run_rotate(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  float* const rotated = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  for (int64_t row = begin; row < end; ++row) {
    c.kernels->rotate_row(f32(c.in[0]) + row * c.in[0].row_stride, rotated, c.in[0].dims[1]);
    c.kernels->quantize_rows(rotated, 0, c.in[0].dims[1], c.in[0].dims[0], c.in[kLinearWeight].layout,
                             quantized_rows(c), row, row + 1);
  }
}

void run_quantize(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  if (is_rotated(c.attrs[kLinearScheme].i)) return run_rotate(c, begin, end, thread);
  c.kernels->quantize_rows(f32(c.in[0]), c.in[0].row_stride, c.in[0].dims[1], c.in[0].dims[0],
                           c.in[kLinearWeight].layout, quantized_rows(c), begin, end);
}

void run_round(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->round_rows_bf16(f32(c.in[0]), c.in[0].row_stride, c.in[0].dims[1], c.in[0].dims[0], rounded_rows(c), begin,
                             end);
}

void run_groups(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->quantize_groups(f32(c.in[0]), c.in[0].row_stride, c.in[0].dims[1], grouped_rows(c), begin, end);
}

void run_linear(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  LinearArgs args{};
  args.weight = weight_view(c.in[kLinearWeight]);
  args.bias = f32(c.in[kLinearBias]);
  args.x = f32(c.in[0]);
  args.x_stride = c.in[0].row_stride;
  if (planes(c)) args.qx = quantized_rows(c);
  if (is_bf16(c)) args.qx = rounded_rows(c);
  if (has_blocks(c)) args.qx = grouped_rows(c);
  args.y = f32(c.out[0]);
  args.y_stride = c.out[0].row_stride;
  args.m = static_cast<int32_t>(c.in[0].dims[0]);
  args.panel = c.thread_scratch + thread * c.thread_scratch_bytes;
  args.short_prefetch = c.kernels->short_prefetch;
  args.gated = c.gated;
  args.residual = f32(c.in[kResidual]);
  args.residual_stride = c.in[kResidual].row_stride;
  c.kernels->linear[c.attrs[kLinearScheme].i](args, begin, end);
}

void run_embedding(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->embedding(weight_view(c.in[kEmbeddingWeight]), reinterpret_cast<const int32_t*>(c.in[0].data),
                       f32(c.out[0]), c.out[0].row_stride, begin, end);
}

constexpr int64_t kTilesAtOnce = 2, kTilesAtOnceFloat = 4;  // for the widest kernels
constexpr Phase kLinearFloat = {.split = SPLIT_SHARES,
                                .items = linear_tiles,
                                .run = run_linear,
                                .reads_all = operands(0, kResidual),
                                .writes_outputs = true,
                                .reads_scratch = true,
                                .grain = kTilesAtOnceFloat};
constexpr Phase kLinear[] = {
    {.split = SPLIT_ROWS, .items = linear_rows, .run = run_quantize, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_SHARES,
     .items = linear_tiles,
     .run = run_linear,
     .reads_all = operands(0, kResidual),
     .writes_outputs = true,
     .reads_scratch = true,
     .grain = kTilesAtOnce},
};
constexpr Phase kLinearBf16[] = {
    {.split = SPLIT_ROWS, .items = linear_rows, .run = run_round, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_SHARES,
     .items = linear_tiles,
     .run = run_linear,
     .reads_all = operands(0, kResidual),
     .writes_outputs = true,
     .reads_scratch = true,
     .grain = kTilesAtOnce},
};
constexpr Phase kLinearBlocks[] = {
    {.split = SPLIT_ROWS, .items = linear_rows, .run = run_groups, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_SHARES,
     .items = linear_tiles,
     .run = run_linear,
     .reads_all = operands(0, kResidual),
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kEmbedding[] = {{.split = SPLIT_ROWS,
                                 .items = linear_rows,
                                 .run = run_embedding,
                                 .reads_rows = operands(0),
                                 .writes_outputs = true}};

}  // namespace

Phases linear_phases(const Call& c) {
  if (is_bf16(c)) return Phases{kLinearBf16, 2};
  if (has_blocks(c)) return Phases{kLinearBlocks, 2};
  return planes(c) ? Phases{kLinear, 2} : Phases{&kLinearFloat, 1};
}

ps_status linear_scratch(const Call& c, Scratch* out) {
  int64_t stride = 0;
  if (is_bf16(c)) return rounded_bytes(c, &stride, &out->shared);
  if (has_blocks(c)) return groups_bytes(c, &out->shared);
  if (!planes(c)) return PS_OK;
  QuantizedBytes bytes;
  PS_TRY(quantized_bytes(c.in[0].dims[0], planes(c), c.in[0].dims[1], &bytes));
  out->shared = bytes.total;
  out->per_thread = c.kernels->linear_panel_bytes(c.in[kLinearWeight].layout, c.in[kLinearWeight].dims[1],
                                                  c.in[0].dims[0], planes(c));
  if (is_rotated(c.attrs[kLinearScheme].i)) {
    out->per_thread = std::max<int64_t>(out->per_thread, round_up(c.in[0].dims[1], 16) * 4);
  }
  return PS_OK;
}

Phases embedding_phases(const Call&) { return Phases{kEmbedding, 1}; }

}  // namespace ps
