// The functions of penstock_dev.h that pack and unpack weights.
#include "api/api.h"
#include "ops/layout.h"
#include "pack/pack.h"

using namespace ps;

namespace ps {
namespace {

constexpr float kMaxColumnWeight = 1e15f;  // times 32 * 254^2 it is still a float

bool is_packable(int32_t layout) { return layout != PS_ROWS_I32; }

ps_status check_range(int32_t layout, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows) {
  int64_t bytes;
  PS_TRY(checked_bytes(layout, rows, cols, &bytes));
  if (row_start < 0 || num_rows < 0 || row_start > rows || num_rows > rows - row_start) {
    return fail(PS_INVALID_ARGUMENT, "row_start, num_rows: expected a range within %lld rows, got %lld and %lld",
                static_cast<long long>(rows), static_cast<long long>(row_start), static_cast<long long>(num_rows));
  }
  return PS_OK;
}

ps_status check_quantized(int32_t layout, const int8_t* groups) {
  if (layout == PS_T16_I8 && groups) return fail(PS_INVALID_ARGUMENT, "groups: expected null for t16_i8");
  if (layout == PS_T16_I4G32) return require(groups, "groups");
  if (layout == PS_T16_I8) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "layout: expected t16_i8 or t16_i4g32, got %s",
              layout_name(layout) ? layout_name(layout) : "an unknown layout");
}

}  // namespace
}  // namespace ps

ps_status ps_layout_bytes(int32_t layout, int64_t rows, int64_t cols, int64_t* bytes) {
  PS_TRY(require(bytes, "bytes"));
  return checked_bytes(layout, rows, cols, bytes);
}

ps_status ps_pack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows,
                  int32_t src_dtype, const void* src, void* dst) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(src && dst, "src, dst"));
  PS_TRY(check_range(layout, rows, cols, row_start, num_rows));
  if (!is_packable(layout)) return fail(PS_UNSUPPORTED, "layout: rows_i32 is not packed from numbers");
  if (layout >= PS_T16_Q8_0)
    return fail(PS_UNSUPPORTED, "layout: %s is packed from blocks of GGUF", layout_name(layout));
  if (src_dtype != PS_F32 && src_dtype != PS_F16 && src_dtype != PS_BF16) {
    return fail(PS_INVALID_ARGUMENT, "src_dtype: expected f32, f16 or bf16, got %s",
                dtype_name(src_dtype) ? dtype_name(src_dtype) : "an unknown type");
  }
  const PackArgs args{layout,  rows,   cols, row_start, num_rows, src_dtype, src, static_cast<uint8_t*>(dst),
                      nullptr, nullptr};
  return pack(context, args);
}

ps_status ps_pack_weighted(ps_context* context, int64_t rows, int64_t cols, int64_t row_start, int64_t num_rows,
                           const float* src, const float* column_weights, const float* scales, int32_t even_offsets,
                           void* dst) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(src && dst, "src, dst"));
  PS_TRY(check_range(PS_T16_I4G32, rows, cols, row_start, num_rows));
  if (even_offsets != 0 && even_offsets != 1) {
    return fail(PS_INVALID_ARGUMENT, "even_offsets: expected 0 or 1, got %d", even_offsets);
  }
  for (int64_t i = 0; column_weights && i < cols; ++i) {
    if (!(column_weights[i] >= 0.f && column_weights[i] <= kMaxColumnWeight))
      return fail(PS_INVALID_ARGUMENT, "column_weights: expected numbers from 0 to 1e15, got others in column %lld",
                  static_cast<long long>(i));
  }
  for (int64_t i = 0; scales && i < num_rows; ++i) {
    if (!(scales[i] >= 0.f && scales[i] <= 3e38f))
      return fail(PS_INVALID_ARGUMENT, "scales: expected finite scales, got others in row %lld",
                  static_cast<long long>(row_start + i));
  }
  const PackArgs args{PS_T16_I4G32,
                      rows,
                      cols,
                      row_start,
                      num_rows,
                      PS_F32,
                      src,
                      static_cast<uint8_t*>(dst),
                      column_weights,
                      scales,
                      even_offsets != 0};
  return pack(context, args);
}

ps_status ps_pack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                            int64_t num_rows, const int8_t* q, const float* scales, const int8_t* groups, void* dst) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(q && scales && dst, "q, scales, dst"));
  PS_TRY(check_quantized(layout, groups));
  PS_TRY(check_range(layout, rows, cols, row_start, num_rows));
  return pack_quantized(context, PackRange{layout, rows, cols, row_start, num_rows}, q, scales, groups,
                        static_cast<uint8_t*>(dst));
}

ps_status ps_unpack_quantized(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                              int64_t num_rows, const void* src, int8_t* q, float* scales, int8_t* groups) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(src && q && scales, "src, q, scales"));
  PS_TRY(check_quantized(layout, groups));
  PS_TRY(check_range(layout, rows, cols, row_start, num_rows));
  return unpack_quantized(context, PackRange{layout, rows, cols, row_start, num_rows}, static_cast<const uint8_t*>(src),
                          q, scales, groups);
}

ps_status ps_pack_blocks(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                         int64_t num_rows, const void* src, void* dst) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(src && dst, "src, dst"));
  PS_TRY(check_range(layout, rows, cols, row_start, num_rows));
  if (layout < PS_T16_Q8_0) return fail(PS_UNSUPPORTED, "layout: %s does not hold blocks of GGUF", layout_name(layout));
  return pack_blocks(context, PackRange{layout, rows, cols, row_start, num_rows}, static_cast<const uint8_t*>(src),
                     static_cast<uint8_t*>(dst));
}

ps_status ps_unpack(ps_context* context, int32_t layout, int64_t rows, int64_t cols, int64_t row_start,
                    int64_t num_rows, const void* src, float* dst) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(src && dst, "src, dst"));
  PS_TRY(check_range(layout, rows, cols, row_start, num_rows));
  if (!is_packable(layout)) return fail(PS_UNSUPPORTED, "layout: rows_i32 holds no numbers to unpack");
  return unpack(context, PackRange{layout, rows, cols, row_start, num_rows}, static_cast<const uint8_t*>(src), dst);
}
