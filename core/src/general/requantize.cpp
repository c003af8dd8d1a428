// Ops of general networks: requantize.
// Hot: runs in every step.
#include "general/requantize.h"

#include "arrays/blocks.h"

namespace ps {
namespace {

constexpr int32_t kXScale = attr_at(OP_REQUANTIZE, "float x_scale");
constexpr int32_t kYScale = attr_at(OP_REQUANTIZE, "float y_scale");
constexpr int32_t kDtype = attr_at(OP_REQUANTIZE, "str dtype");

void run_requantize(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Tensor &x = c.in[0], &y = c.out[0];
  const float scale = static_cast<float>(c.attrs[kXScale].f);
  const float inverse = y.dtype == PS_F32 ? 0 : 1 / static_cast<float>(c.attrs[kYScale].f);
  const WindowKernels& kernels = c.kernels->windows;
  each_block(num_elements(y), kBlock, begin, end, [&](int64_t start, int64_t n) {
    float block[kBlock];
    const float* values = reinterpret_cast<const float*>(x.data) + start;
    if (x.dtype != PS_F32) {
      float* const to = y.dtype == PS_F32 ? reinterpret_cast<float*>(y.data) + start : block;
      kernels.from_int8(reinterpret_cast<const int8_t*>(x.data) + start, n, scale, to);
      values = to;
    }
    if (y.dtype == PS_F32) return;
    kernels.to_int8(values, n, inverse, y.dtype == PS_U8 ? 0.f : -127.f, reinterpret_cast<int8_t*>(y.data) + start);
  });
}

constexpr Phase kRequantize = {.split = SPLIT_ITEMS,
                               .items = element_items,
                               .run = run_requantize,
                               .reads_all = operands(0),
                               .writes_outputs = true};

}  // namespace

ps_status expect_int8(const Spec& s, const char* name, int32_t min_rank, int32_t max_rank) {
  if (is_tensor(s, PS_I8, min_rank, max_rank) || is_tensor(s, PS_U8, min_rank, max_rank)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected i8 or u8 of rank %d to %d, got %s of rank %d", name, min_rank,
              max_rank, dtype_name(s.dtype), s.rank);
}

ps_status check_scale(const char* name, const AttrValue& scale) {
  if (scale.f >= 1e-37 && scale.f <= 1e37) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected 1e-37 to 1e37, got %g", name, scale.f);
}

ps_status int8_output(AttrValue* dtype, const AttrValue& y_scale, Spec* out) {
  PS_TRY(parse_dtype("dtype", dtype));
  out->dtype = static_cast<int32_t>(dtype->i);
  if (out->dtype == PS_F32) return PS_OK;
  if (out->dtype == PS_I8 || out->dtype == PS_U8) return check_scale("y_scale", y_scale);
  return fail(PS_INVALID_ARGUMENT, "dtype: expected f32, i8 or u8, got %s", dtype_name(out->dtype));
}

ps_status infer_requantize(const Spec* in, AttrValue* attrs, Spec* out) {
  if (in[0].dtype != PS_F32) {
    PS_TRY(expect_int8(in[0], "x", 0, kMaxRank));
    PS_TRY(check_scale("x_scale", attrs[kXScale]));
  }
  copy_type(in[0], out);
  PS_TRY(int8_output(&attrs[kDtype], attrs[kYScale], out));
  if (in[0].dtype != PS_F32 || out->dtype != PS_F32) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "dtype: expected i8 or u8 for an x of f32, got f32");
}

Phases requantize_phases(const Call&) { return Phases{&kRequantize, 1}; }
ps_status requantize_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
