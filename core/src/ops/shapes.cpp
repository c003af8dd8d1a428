// Shape rules: checks of each op's inputs, and the shapes of its outputs. paged/page_shapes.cpp has those of ops over
// pages.
#include <float.h>

#include "base/build.h"
#include "ops/expect.h"

namespace ps {

bool is_tensor(const Spec& s, int32_t dtype, int32_t min_rank, int32_t max_rank) {
  return s.dtype == dtype && s.rank >= min_rank && s.rank <= max_rank;
}

ps_status expect_f32(const Spec& s, const char* name, int32_t min_rank, int32_t max_rank) {
  if (is_tensor(s, PS_F32, min_rank, max_rank)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected f32 with %d to %d dims, got %s", name, min_rank, max_rank,
              describe(s).text);
}

ps_status expect_same(const Spec& s, const Spec& other, const char* name, const char* other_name) {
  if (same_type(s, other)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %s as %s has, got %s", name, describe(other).text, other_name,
              describe(s).text);
}

ps_status expect_indices(const Spec& s, const char* name) {
  if (is_tensor(s, PS_I32, 1, 1)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected i32 with one dim, got %s", name, describe(s).text);
}

ps_status expect_vector(const Spec& w, const char* name, int64_t cols) {
  if (w.layout == PS_ROWS_F32 && w.dims[0].offset == 1 && (cols < 0 || w.dims[1].offset == cols)) return PS_OK;
  const char* layout = layout_name(w.layout);
  return fail(PS_INVALID_ARGUMENT, "%s: expected a rows_f32 weight [1, %lld], got %s [%lld, %lld]", name,
              static_cast<long long>(cols < 0 ? 0 : cols), layout ? layout : "unknown layout",
              static_cast<long long>(w.dims[0].offset), static_cast<long long>(w.dims[1].offset));
}

void copy_type(const Spec& from, Spec* to) {
  *to = from;
  to->kind = OPERAND_VALUE;
  to->bound = constant(0);
}

namespace {

constexpr int64_t kMaxIntegerCols = 131072;  // 128 * 127 * 131072 < 2^31: int32 sums are exact

ps_status expect_eps(const AttrValue& a) {
  if (a.f >= 0 && a.f <= 1) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "eps: expected 0 to 1, got %g", a.f);
}

struct SchemeRow {
  const char* name;
  int32_t layout;
  bool integer, built;
};
constexpr SchemeRow kSchemes[NUM_LINEAR_SCHEMES] = {
    {"f32", PS_T16_F32, false, builds_scheme("f32")},
    {"f16", PS_T16_F16, false, builds_scheme("f16")},
    {"bf16", PS_T16_BF16, false, builds_scheme("bf16")},
    {"w8a16", PS_T16_I8, true, builds_scheme("w8a16")},
    {"w8a8", PS_T16_I8, true, builds_scheme("w8a8")},
    {"w4a16", PS_T16_I4G32, true, builds_scheme("w4a16")},
    {"w4a8", PS_T16_I4G32, true, builds_scheme("w4a8")},
    {"w8a8_h32", PS_T16_I8, true, builds_scheme("w8a8_h32")},
    {"w4a8_h32", PS_T16_I4G32, true, builds_scheme("w4a8_h32")},
#define PS_BLOCKS(id, name, ...) {#name, PS_T16_##id, false, builds_scheme(#name)},
#include "base/block_schemes.inc"
};

}  // namespace

ps_status infer_embedding(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_indices(in[0], "ids"));
  const Spec& w = in[kEmbeddingWeight];
  if (w.layout == PS_ROWS_I32) return fail(PS_INVALID_ARGUMENT, "weight: expected a layout of numbers, got rows_i32");
  if (!builds_layout(w.layout)) {
    return fail(PS_UNSUPPORTED, "weight: this build leaves out %s: build it with this bundle in PENSTOCK_OPS_FROM",
                layout_name(w.layout) ? layout_name(w.layout) : "its layout");
  }
  if (attrs[kEmbeddingDim].i != w.dims[1].offset) {
    return fail(PS_INVALID_ARGUMENT, "dim: expected the weight's %lld columns, got %lld",
                static_cast<long long>(w.dims[1].offset), static_cast<long long>(attrs[kEmbeddingDim].i));
  }
  if (!is_constant(in[0].bound) || in[0].bound.offset < 1 || in[0].bound.offset > w.dims[0].offset) {
    return fail(PS_INVALID_ARGUMENT, "ids: expected token ids or positions that the weight's %lld rows cover",
                static_cast<long long>(w.dims[0].offset));
  }
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], w.dims[1]}, 0, -1, constant(0)};
  return PS_OK;
}

namespace {

// Checks the scheme of a matmul against the weight's layout and columns.
ps_status expect_scheme(AttrValue* attr, const Spec& w) {
  attr->i = -1;
  for (int32_t i = 0; i < NUM_LINEAR_SCHEMES; ++i) {
    if (equal(attr->s, kSchemes[i].name)) attr->i = i;
  }
  if (attr->i < 0) {
    return fail(PS_UNSUPPORTED, "scheme: \"%.*s\" is not a linear scheme that this version knows", PS_STR(attr->s));
  }
  const SchemeRow& scheme = kSchemes[attr->i];
  if (!scheme.built) {
    return fail(PS_UNSUPPORTED, "scheme: this build leaves out %s: build it with this bundle in PENSTOCK_OPS_FROM",
                scheme.name);
  }
  if (w.layout != scheme.layout) {
    return fail(PS_INVALID_ARGUMENT, "weight: expected layout %s for scheme %s, got %s", layout_name(scheme.layout),
                scheme.name, layout_name(w.layout) ? layout_name(w.layout) : "unknown");
  }
  if (scheme.integer && w.dims[1].offset > kMaxIntegerCols) {
    return fail(PS_UNSUPPORTED, "weight: scheme %s sums exactly up to %lld columns, got %lld", scheme.name,
                static_cast<long long>(kMaxIntegerCols), static_cast<long long>(w.dims[1].offset));
  }
  return PS_OK;
}

ps_status expect_columns(const Spec& x, const Spec& w) {
  if (equal(x.dims[x.rank - 1], w.dims[1])) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: expected rows of %lld, the weight's columns, got %s",
              static_cast<long long>(w.dims[1].offset), describe(x).text);
}

}  // namespace

ps_status infer_linear(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 2));
  const Spec& w = in[kLinearWeight];
  PS_TRY(expect_scheme(&attrs[kLinearScheme], w));
  if (attrs[kLinearOutFeatures].i != w.dims[0].offset) {
    return fail(PS_INVALID_ARGUMENT, "out_features: expected the weight's %lld rows, got %lld",
                static_cast<long long>(w.dims[0].offset), static_cast<long long>(attrs[kLinearOutFeatures].i));
  }
  PS_TRY(expect_columns(in[0], w));
  if (in[kLinearBias].kind != OPERAND_NONE) PS_TRY(expect_vector(in[kLinearBias], "bias", w.dims[0].offset));
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], w.dims[0]}, 0, -1, constant(0)};
  return PS_OK;
}

namespace {

// The expert ids of each token: i32 [T, k] below num_experts.
ps_status expect_experts(const Spec& ids, const Spec& x, int64_t num_experts) {
  if (!is_tensor(ids, PS_I32, 2, 2) || !equal(ids.dims[0], x.dims[0]) || !is_constant(ids.dims[1])) {
    return fail(PS_INVALID_ARGUMENT, "ids: expected i32 with a row for each row of x, %s, got %s", describe(x).text,
                describe(ids).text);
  }
  if (is_constant(ids.bound) && ids.bound.offset >= 1 && ids.bound.offset <= num_experts) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "ids: expected experts from 0 to %lld", static_cast<long long>(num_experts - 1));
}

}  // namespace

ps_status infer_expert_linear(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &x = in[0], &w = in[kExpertWeight], &ids = in[kExpertIds];
  PS_TRY(expect_f32(x, "x", 2, 3));
  PS_TRY(expect_scheme(&attrs[kExpertScheme], w));
  const int64_t num_experts = attrs[kExpertNum].i, rows = attrs[kExpertOutFeatures].i, all = w.dims[0].offset;
  if (num_experts < 1 || num_experts > all) {
    return fail(PS_INVALID_ARGUMENT, "num_experts: expected 1 to the weight's %lld rows, got %lld",
                static_cast<long long>(all), static_cast<long long>(num_experts));
  }
  if (all % num_experts || rows != all / num_experts) {
    return fail(PS_INVALID_ARGUMENT, "out_features: expected the weight's %lld rows divided by num_experts, got %lld",
                static_cast<long long>(all), static_cast<long long>(rows));
  }
  PS_TRY(expect_columns(x, w));
  PS_TRY(expect_experts(ids, x, num_experts));
  if (x.rank == 3 && !equal(x.dims[1], ids.dims[1])) {
    return fail(PS_INVALID_ARGUMENT, "x: expected a row for each of ids, %s, got %s", describe(ids).text,
                describe(x).text);
  }
  const Spec& bias = in[kExpertBias];
  if (bias.kind != OPERAND_NONE &&
      (bias.layout != PS_ROWS_F32 || bias.dims[0].offset != num_experts || bias.dims[1].offset != rows)) {
    return fail(PS_INVALID_ARGUMENT, "bias: expected a rows_f32 weight [%lld, %lld], got [%lld, %lld]",
                static_cast<long long>(num_experts), static_cast<long long>(rows),
                static_cast<long long>(bias.dims[0].offset), static_cast<long long>(bias.dims[1].offset));
  }
  *out = Spec{OPERAND_VALUE, PS_F32, 3, {x.dims[0], ids.dims[1], constant(rows)}, 0, -1, constant(0)};
  return PS_OK;
}

ps_status infer_head_linear(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &x = in[0], &w = in[kExpertWeight];
  PS_TRY(expect_f32(x, "x", 3, 3));
  PS_TRY(expect_scheme(&attrs[kExpertScheme], w));
  const int64_t num_heads = attrs[kExpertNum].i, rows = attrs[kExpertOutFeatures].i, all = w.dims[0].offset;
  if (num_heads < 1 || num_heads > kMaxHeads || !equal(x.dims[1], constant(num_heads))) {
    return fail(PS_INVALID_ARGUMENT, "num_heads: expected the heads of x, %s, and up to %d, got %lld", describe(x).text,
                kMaxHeads, static_cast<long long>(num_heads));
  }
  if (all % num_heads || rows != all / num_heads) {
    return fail(PS_INVALID_ARGUMENT, "out_features: expected the weight's %lld rows divided by num_heads, got %lld",
                static_cast<long long>(all), static_cast<long long>(rows));
  }
  PS_TRY(expect_columns(x, w));
  *out = Spec{OPERAND_VALUE, PS_F32, 3, {x.dims[0], x.dims[1], constant(rows)}, 0, -1, constant(0)};
  return PS_OK;
}

ps_status infer_combine(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 3, 3));
  PS_TRY(expect_f32(in[kCombineWeights], "weights", 2, 2));
  if (!equal(in[0].dims[0], in[kCombineWeights].dims[0]) || !equal(in[0].dims[1], in[kCombineWeights].dims[1])) {
    return fail(PS_INVALID_ARGUMENT, "weights: expected a weight for each row of x, %s, got %s", describe(in[0]).text,
                describe(in[kCombineWeights]).text);
  }
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], in[0].dims[2]}, 0, -1, constant(0)};
  return PS_OK;
}

ps_status infer_rms_norm(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 3));
  const bool by_group =
      in[0].rank == 3 && is_constant(in[0].dims[1]) && in[kRmsNormWeight].dims[1].offset != last_dim(in[0]);
  PS_TRY(
      expect_vector(in[kRmsNormWeight], "weight", by_group ? in[0].dims[1].offset * last_dim(in[0]) : last_dim(in[0])));
  copy_type(in[0], out);
  return expect_eps(attrs[kNormEps]);
}

ps_status infer_add_rms_norm(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 3));
  PS_TRY(expect_same(in[kAddRmsNormResidual], in[0], "residual", "x"));
  PS_TRY(expect_vector(in[kAddRmsNormWeight], "weight", last_dim(in[0])));
  copy_type(in[0], &out[0]);
  copy_type(in[0], &out[1]);
  return expect_eps(attrs[kNormEps]);
}

ps_status infer_layer_norm(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(infer_rms_norm(in, attrs, out));
  PS_TRY(expect_vector(in[kLayerNormWeight], "weight", last_dim(in[0])));
  return in[kLayerNormBias].kind == OPERAND_NONE ? PS_OK : expect_vector(in[kLayerNormBias], "bias", last_dim(in[0]));
}

ps_status infer_rotary_embedding(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_indices(in[0], "positions"));
  PS_TRY(expect_vector(in[kRotaryInvFreq], "inv_freq", -1));
  if (in[kRotaryInvFreq].dims[1].offset > kMaxHeadDim / 2) {
    return fail(PS_INVALID_ARGUMENT, "inv_freq: expected up to %d columns, got %lld", kMaxHeadDim / 2,
                static_cast<long long>(in[kRotaryInvFreq].dims[1].offset));
  }
  *out = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], constant(2 * in[kRotaryInvFreq].dims[1].offset)}, 0, -1,
              constant(0)};
  return PS_OK;
}

ps_status infer_rope(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 3, 3));
  PS_TRY(expect_f32(in[kRopeCosSin], "cos_sin", 2, 2));
  const int64_t turned = in[kRopeCosSin].dims[1].offset;
  if (!equal(in[0].dims[0], in[kRopeCosSin].dims[0]) || turned % 2 || turned > last_dim(in[0])) {
    return fail(PS_INVALID_ARGUMENT,
                "cos_sin: expected the rows of x, %s, and an even number of columns up to its last dim, got %s",
                describe(in[0]).text, describe(in[kRopeCosSin]).text);
  }
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_unary_rows(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 3));
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_binary_rows(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "first argument", 2, 3));
  PS_TRY(expect_same(in[1], in[0], "second argument", "the first"));
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_gelu(const Spec* in, AttrValue* attrs, Spec* out) {
  const bool tanh_form = equal(attrs[kGeluApproximate].s, "tanh");
  if (!tanh_form && !equal(attrs[kGeluApproximate].s, "none")) {
    return fail(PS_INVALID_ARGUMENT, "approximate: expected \"none\" or \"tanh\", got \"%.*s\"",
                PS_STR(attrs[kGeluApproximate].s));
  }
  attrs[kGeluApproximate].i = tanh_form;
  return infer_unary_rows(in, attrs, out);
}

ps_status infer_scale(const Spec* in, AttrValue* attrs, Spec* out) { return infer_unary_rows(in, attrs, out); }

static ps_status infer_capped(const Spec* in, AttrValue* attrs, Spec* out, const char* name) {
  const double cap = attrs[kScaledBy].f;
  if (!(cap >= FLT_MIN)) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected a normal float32 above 0, got %g", name, cap);
  }
  return infer_unary_rows(in, attrs, out);
}

ps_status infer_softcap(const Spec* in, AttrValue* attrs, Spec* out) { return infer_capped(in, attrs, out, "cap"); }
ps_status infer_clamp(const Spec* in, AttrValue* attrs, Spec* out) { return infer_capped(in, attrs, out, "limit"); }

ps_status infer_clamped_swiglu(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 2));
  const double limit = attrs[kClampedLimit].f;
  if (!(limit >= FLT_MIN)) return fail(PS_INVALID_ARGUMENT, "limit: expected a normal float32 above 0, got %g", limit);
  if (!is_constant(in[0].dims[1]) || in[0].dims[1].offset % 2) {
    return fail(PS_INVALID_ARGUMENT, "x: expected an even number of columns, got %s", describe(in[0]).text);
  }
  copy_type(in[0], out);
  out->dims[1] = constant(in[0].dims[1].offset / 2);
  return PS_OK;
}

ps_status infer_scale_channels(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 2));
  PS_TRY(expect_vector(in[kScaleChannelsWeight], "weight",
                       in[kScaleChannelsWeight].dims[1].offset == 1 ? 1 : last_dim(in[0])));
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_match_rms(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 2));
  PS_TRY(expect_same(in[kMatchRmsTarget], in[0], "target", "x"));
  const double floor = attrs[kMatchFloor].f;
  if (!(floor >= FLT_MIN)) return fail(PS_INVALID_ARGUMENT, "floor: expected a normal float32 above 0, got %g", floor);
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_gaussian_topk(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 2));
  (void)attrs;  // any finite number of deviations is valid
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_gather_rows(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 2, 3));
  PS_TRY(expect_indices(in[kGatherRowsRows], "rows"));
  const bool unknown = is_constant(in[kGatherRowsRows].bound) &&
                       in[kGatherRowsRows].bound.offset < 1;  // also true for an x without rows
  if (unknown || !equal(in[kGatherRowsRows].bound, in[0].dims[0])) {
    return fail(PS_INVALID_ARGUMENT, "rows: expected indices below the number of rows of x, %s", describe(in[0]).text);
  }
  copy_type(in[0], out);
  out->dims[0] = in[kGatherRowsRows].dims[0];
  return PS_OK;
}

ps_status infer_argmax(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_f32(in[0], "logits", 2, 2));
  *out = Spec{OPERAND_VALUE, PS_I32, 1, {in[0].dims[0]}, 0, -1, in[0].dims[1]};
  return PS_OK;
}

ps_status infer_topk(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "logits", 2, 2));
  if (attrs[kTopkK].i < 1 || attrs[kTopkK].i > last_dim(in[0])) {
    return fail(PS_INVALID_ARGUMENT, "k: expected 1 to %lld, got %lld", static_cast<long long>(last_dim(in[0])),
                static_cast<long long>(attrs[kTopkK].i));
  }
  out[0] = Spec{OPERAND_VALUE, PS_F32, 2, {in[0].dims[0], constant(attrs[kTopkK].i)}, 0, -1, constant(0)};
  out[1] = Spec{OPERAND_VALUE, PS_I32, 2, {in[0].dims[0], constant(attrs[kTopkK].i)}, 0, -1, in[0].dims[1]};
  return PS_OK;
}

}  // namespace ps
