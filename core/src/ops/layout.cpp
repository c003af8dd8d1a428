// Names and sizes of weight and KV layouts.
// Hot: runs in every step.
#include "ops/layout.h"

#include "base/memory.h"
#include "base/tiles.h"

namespace ps {
namespace {

struct LayoutRow {
  int32_t layout;
  const char* name;
  int64_t row_step, col_step;  // padding
  int64_t tile_bytes;          // per kTileRows rows, before the columns
  int64_t step_bytes;          // per row_step rows x col_step columns
  int64_t block_columns;       // the columns are a multiple of this; 0: any
};

constexpr LayoutRow kLayouts[] = {
    {PS_ROWS_F32, "rows_f32", 1, 1, 0, 4, 0},
    {PS_ROWS_F16, "rows_f16", 1, 1, 0, 2, 0},
    {PS_ROWS_BF16, "rows_bf16", 1, 1, 0, 2, 0},
    {PS_ROWS_I32, "rows_i32", 1, 1, 0, 4, 0},
    {PS_ROWS_I64, "rows_i64", 1, 1, 0, 8, 0},
    {PS_ROWS_I8, "rows_i8", 1, 1, 0, 1, 0},
    {PS_ROWS_U8, "rows_u8", 1, 1, 0, 1, 0},
    {PS_ROWS_BOOL, "rows_bool", 1, 1, 0, 1, 0},
    {PS_T16_F32, "t16_f32", kTileRows, 1, 0, 64, 0},
    {PS_T16_F16, "t16_f16", kTileRows, 1, 0, 32, 0},
    {PS_T16_BF16, "t16_bf16", kTileRows, 2, 0, 64, 0},
    {PS_T16_I8, "t16_i8", kTileRows, kI8LineColumns, kScaleBytes, kLineBytes, 0},
    {PS_T16_I4G32, "t16_i4g32", kTileRows, kPairColumns, kScaleBytes, kPairBytes, 0},
#define PS_BLOCKS(id, name, columns, bytes, tile_columns, tile_bytes) \
  {PS_T16_##id, "t16_" #name, kTileRows, tile_columns, 0, tile_bytes, columns},
#include "base/block_schemes.inc"
};

constexpr int32_t kOldI8 = 19, kOldI4 = 20;  // retired numbers are never reused

const LayoutRow* find_layout(int32_t layout) {
  for (const LayoutRow& row : kLayouts) {
    if (row.layout == layout) return &row;
  }
  return nullptr;
}

}  // namespace

const char* layout_name(int32_t layout) {
  const LayoutRow* row = find_layout(layout);
  return row ? row->name : nullptr;
}

const char* dtype_name(int32_t dtype) {
  static const char* const names[] = {nullptr, "f32", "f16", "bf16", "i8", "i32", "u8", "i64", "bool"};
  return dtype >= PS_F32 && dtype <= PS_BOOL ? names[dtype] : nullptr;
}

int64_t dtype_bytes(int32_t dtype) {
  static const int64_t bytes[] = {0, 4, 2, 2, 1, 4, 1, 8, 1};
  return dtype >= PS_F32 && dtype <= PS_BOOL ? bytes[dtype] : 0;
}

const char* kv_layout_name(int32_t layout) {
  static const char* const names[] = {nullptr, "f32", "bf16", "int8", "int4"};
  return layout >= PS_KV_F32 && layout <= PS_KV_INT4 ? names[layout] : nullptr;
}

ps_status checked_bytes(int32_t layout, int64_t rows, int64_t cols, int64_t* bytes) {
  const LayoutRow* row = find_layout(layout);
  if (layout == kOldI8 || layout == kOldI4) {
    return fail(PS_UNSUPPORTED, "layout: %d is how an older version stored %d-bit weights: export the bundle again",
                layout, layout == kOldI8 ? 8 : 4);
  }
  if (!row) return fail(PS_UNSUPPORTED, "layout: %d is not a weight layout that this version knows", layout);
  if (rows < 1 || rows > kMaxDim)
    return fail(PS_INVALID_ARGUMENT, "rows: expected 1 to 2^31, got %lld", static_cast<long long>(rows));
  if (cols < 1 || cols > kMaxDim)
    return fail(PS_INVALID_ARGUMENT, "cols: expected 1 to 2^31, got %lld", static_cast<long long>(cols));
  if (row->block_columns && cols % row->block_columns) {
    return fail(PS_INVALID_ARGUMENT, "cols: expected a multiple of %lld for %s, got %lld",
                static_cast<long long>(row->block_columns), row->name, static_cast<long long>(cols));
  }
  const int64_t tiles = round_up(rows, row->row_step) / row->row_step;
  const int64_t steps = round_up(cols, row->col_step) / row->col_step;
  int64_t tile;
  if (!checked_mul(steps, row->step_bytes, &tile) || !checked_add(tile, row->tile_bytes, &tile) ||
      !checked_mul(tile, tiles, bytes)) {
    return fail(PS_INVALID_ARGUMENT, "rows x cols: %lld x %lld is too large", static_cast<long long>(rows),
                static_cast<long long>(cols));
  }
  return PS_OK;
}

int32_t auto_kv_layout(Str scheme) { return equal(scheme, "f32") ? PS_KV_F32 : PS_KV_BF16; }

ps_status kv_page_bytes(int32_t kv_layout, const StateShape& shape, int64_t* bytes) {
  if (kv_layout == kStatePages) {
    *bytes = 4 * int64_t{shape.num_kv_heads} * shape.head_dim;
    return PS_OK;
  }
  if (!kv_layout_name(kv_layout)) {
    return fail(PS_INVALID_ARGUMENT, "kv_layout: expected 1 (f32), 2 (bf16), 3 (int8) or 4 (int4), got %d", kv_layout);
  }
  if (kv_layout == PS_KV_INT4) {
    if (shape.latent_dim)
      return fail(PS_UNSUPPORTED, "kv_layout: expected f32, bf16 or int8 for a model with latents (MLA), got int4");
    *bytes = shape.num_kv_heads * PS_PAGE_TOKENS * 2 * ((int64_t{shape.head_dim} + 1) / 2 + 4);  // nibbles, a scale
    return PS_OK;
  }
  const int64_t element = kv_layout == PS_KV_F32 ? 4 : kv_layout == PS_KV_BF16 ? 2 : 1;
  const int64_t scales = kv_layout == PS_KV_INT8 ? PS_PAGE_TOKENS * 4 : 0;
  const int64_t pad = kv_layout == PS_KV_BF16 ? shape.head_dim % 2 : 0;  // keys are stored as pairs of dimensions
  const int64_t rows = shape.latent_dim ? 1 : 2;
  *bytes = shape.num_kv_heads *
           (PS_PAGE_TOKENS * element * (rows * shape.head_dim + pad) + rows * scales);  // every factor is bounded
  return PS_OK;
}

}  // namespace ps
