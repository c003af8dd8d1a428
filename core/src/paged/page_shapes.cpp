// Shape rules of the ops that read or write pages.
#include <float.h>

#include "ops/expect.h"

namespace ps {
namespace {

constexpr int32_t kMaxConvWindow = 32;  // inputs of a short convolution

ps_status expect_batch(const Spec* in, int32_t at, const Spec& tokens, const char* tokens_name) {
  PS_TRY(expect_indices(in[at], "positions"));
  PS_TRY(expect_indices(in[at + 1], "request_starts"));
  if (!equal(in[at].dims[0], tokens.dims[0])) {
    return fail(PS_INVALID_ARGUMENT, "positions: expected as many tokens as %s, %s, got %s", tokens_name,
                describe(tokens).text, describe(in[at]).text);
  }
  if (is_tensor(in[at + 2], PS_I32, 3, 3)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "page_tables: expected i32 with three dims, got %s", describe(in[at + 2]).text);
}

// Rows of whole heads: [T, heads, head_dim] or [T, heads * head_dim].
ps_status expect_heads(const Spec& s, const char* name, int64_t head_dim, int64_t* num_heads) {
  PS_TRY(expect_f32(s, name, 2, 3));
  int64_t elements = 1;
  for (int32_t i = 1; i < s.rank; ++i) elements *= s.dims[i].offset;
  *num_heads = elements / head_dim;
  if (elements % head_dim || (s.rank == 3 && last_dim(s) != head_dim) || *num_heads < 1 || *num_heads > kMaxHeads) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected rows of 1 to %d heads of %lld, got %s", name, kMaxHeads,
                static_cast<long long>(head_dim), describe(s).text);
  }
  return PS_OK;
}

ps_status expect_group(const AttrValue& attr, const Spec& state, const Spec& page_tables) {
  if (attr.i < 0 || attr.i >= page_tables.dims[0].offset) {
    return fail(PS_INVALID_ARGUMENT, "group: expected less than the %lld page tables, got %lld",
                static_cast<long long>(page_tables.dims[0].offset), static_cast<long long>(attr.i));
  }
  if (state.group >= 0 && state.group != attr.i) {
    return fail(PS_INVALID_ARGUMENT, "group: expected %d, that of the state, got %lld", state.group,
                static_cast<long long>(attr.i));
  }
  return PS_OK;
}

// A state of latents, or one of keys and values.
ps_status expect_latents(const Spec& state, bool expected) {
  if ((state.rank == 4) == expected) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "state: expected pages of %s, got pages of %s",
              expected ? "latents" : "keys and values", expected ? "keys and values" : "latents");
}

}  // namespace

ps_status infer_kv_append(const Spec* in, AttrValue* attrs, Spec*) {
  const Spec& state = in[kKvAppendState];
  int64_t heads;
  PS_TRY(expect_latents(state, false));
  PS_TRY(expect_heads(in[kKvAppendK], "k", state.dims[2].offset, &heads));
  if (heads != state.dims[1].offset) {
    return fail(PS_INVALID_ARGUMENT, "k: expected the state's %lld heads, got %s",
                static_cast<long long>(state.dims[1].offset), describe(in[kKvAppendK]).text);
  }
  PS_TRY(expect_same(in[kKvAppendV], in[kKvAppendK], "v", "k"));
  PS_TRY(expect_batch(in, kKvAppendPositions, in[kKvAppendK], "k"));
  return expect_group(attrs[kKvAppendGroup], state, in[kKvAppendPageTables]);
}

namespace {

ps_status expect_attention_attrs(const Spec* in, const AttrValue* attrs) {
  PS_TRY(expect_batch(in, kAttentionPositions, in[kAttentionQ], "q"));
  PS_TRY(expect_group(attrs[kAttentionGroup], in[kAttentionState], in[kAttentionPageTables]));
  if (attrs[kAttentionWindow].i < 0 || attrs[kAttentionWindow].i > kMaxContextLen) {
    return fail(PS_INVALID_ARGUMENT, "window: expected 0 to %d, got %lld", kMaxContextLen,
                static_cast<long long>(attrs[kAttentionWindow].i));
  }
  if (attrs[kAttentionSoftcap].f < 0)
    return fail(PS_INVALID_ARGUMENT, "softcap: expected 0 or more, got %g", attrs[kAttentionSoftcap].f);
  return PS_OK;
}

}  // namespace

ps_status infer_latent_append(const Spec* in, AttrValue* attrs, Spec*) {
  const Spec& state = in[kKvAppendState];
  int64_t heads, rope_heads;
  PS_TRY(expect_latents(state, true));
  PS_TRY(expect_heads(in[kLatentAppendLatent], "latent", state.dims[3].offset, &heads));
  PS_TRY(expect_heads(in[kLatentAppendRope], "rope", state.dims[2].offset - state.dims[3].offset, &rope_heads));
  if (heads != 1 || rope_heads != 1 || !equal(in[kLatentAppendRope].dims[0], in[kLatentAppendLatent].dims[0])) {
    return fail(PS_INVALID_ARGUMENT, "rope: expected one head for each row of latent, %s, got %s",
                describe(in[kLatentAppendLatent]).text, describe(in[kLatentAppendRope]).text);
  }
  PS_TRY(expect_batch(in, kKvAppendPositions, in[kLatentAppendLatent], "latent"));
  return expect_group(attrs[kKvAppendGroup], state, in[kKvAppendPageTables]);
}

ps_status infer_latent_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec& state = in[kAttentionState];
  int64_t heads, rope_heads;
  PS_TRY(expect_latents(state, true));
  PS_TRY(expect_heads(in[kAttentionQ], "q", state.dims[3].offset, &heads));
  PS_TRY(expect_heads(in[kLatentAttentionRope], "q_rope", state.dims[2].offset - state.dims[3].offset, &rope_heads));
  if (heads != rope_heads || !equal(in[kLatentAttentionRope].dims[0], in[kAttentionQ].dims[0])) {
    return fail(PS_INVALID_ARGUMENT, "q_rope: expected the %lld heads of q, %s, got %s", static_cast<long long>(heads),
                describe(in[kAttentionQ]).text, describe(in[kLatentAttentionRope]).text);
  }
  PS_TRY(expect_attention_attrs(in, attrs));
  copy_type(in[kAttentionQ], out);
  return PS_OK;
}

namespace {

// Finds the number of query heads, a multiple of those of the keys.
ps_status expect_query_heads(const Spec* in, int64_t* heads) {
  const Spec& state = in[kAttentionState];
  PS_TRY(expect_latents(state, false));
  PS_TRY(expect_heads(in[kAttentionQ], "q", state.dims[2].offset, heads));
  if (*heads % state.dims[1].offset) {
    return fail(PS_INVALID_ARGUMENT, "q: expected a multiple of the state's %lld heads, got %lld heads",
                static_cast<long long>(state.dims[1].offset), static_cast<long long>(*heads));
  }
  return PS_OK;
}

// Scores of every head by distance: [T, heads, buckets], with the rows of q.  `buckets` is 0 or that of the other
// tensor.
ps_status expect_distance_scores(const Spec& s, const char* name, const Spec& q, int64_t heads, int64_t* buckets) {
  if (s.kind == OPERAND_NONE) return PS_OK;
  PS_TRY(expect_f32(s, name, 3, 3));
  const int64_t columns = last_dim(s);
  if (!equal(s.dims[0], q.dims[0]) || s.dims[1].offset != heads || columns < 1 || (*buckets && columns != *buckets)) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected the rows of q, %lld heads and equal buckets, got %s", name,
                static_cast<long long>(heads), describe(s).text);
  }
  *buckets = columns;
  return PS_OK;
}

}  // namespace

// A key's row of p2c is found by its position in the step, so a step holds whole requests, as in other bidirectional
// attention.
ps_status infer_disentangled_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec& weight = in[kDisentangledBuckets];
  int64_t heads, buckets = 0;
  PS_TRY(expect_query_heads(in, &heads));
  PS_TRY(expect_distance_scores(in[kDisentangledC2p], "c2p", in[kAttentionQ], heads, &buckets));
  PS_TRY(expect_distance_scores(in[kDisentangledP2c], "p2c", in[kAttentionQ], heads, &buckets));
  if (!buckets) return fail(PS_INVALID_ARGUMENT, "c2p: expected this tensor, or p2c, or both");
  if (weight.dims[1].offset % 2 == 0) {
    return fail(PS_INVALID_ARGUMENT, "buckets: expected an odd number of columns, got %lld",
                static_cast<long long>(weight.dims[1].offset));
  }
  PS_TRY(expect_vector(weight, "buckets", weight.dims[1].offset));
  if (attrs[kAttentionCausal].i) return fail(PS_INVALID_ARGUMENT, "causal: expected false");
  if (attrs[kAttentionSoftcap].f != 0)
    return fail(PS_INVALID_ARGUMENT, "softcap: expected 0, got %g", attrs[kAttentionSoftcap].f);
  PS_TRY(expect_attention_attrs(in, attrs));
  copy_type(in[kAttentionQ], out);
  return PS_OK;
}

ps_status infer_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  int64_t heads;
  PS_TRY(expect_query_heads(in, &heads));
  if (in[kAttentionAlibi].kind != OPERAND_NONE) PS_TRY(expect_vector(in[kAttentionAlibi], "alibi", heads));
  PS_TRY(expect_attention_attrs(in, attrs));
  copy_type(in[kAttentionQ], out);
  return PS_OK;
}

ps_status infer_sink_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(infer_attention(in, attrs, out));
  int64_t heads;
  PS_TRY(expect_heads(in[kAttentionQ], "q", in[kAttentionState].dims[2].offset, &heads));
  return expect_vector(in[kAttentionSinks], "sinks", heads);
}

ps_status infer_relative_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  static const char* const kinds[] = {"all", "prefix", "rest", "span"};  // in the order of KeyRange
  AttrValue& keys = attrs[kRelativeAttentionKeys];
  PS_TRY(infer_attention(in, attrs, out));
  int64_t heads;
  PS_TRY(expect_heads(in[kAttentionQ], "q", in[kAttentionState].dims[2].offset, &heads));
  if (in[kAttentionSinks].kind != OPERAND_NONE) PS_TRY(expect_vector(in[kAttentionSinks], "sinks", heads));
  const Spec &bias = in[kRelativeAttentionBias], &prefix = in[kRelativeAttentionPrefix];
  if (bias.kind != OPERAND_NONE &&
      (bias.layout != PS_ROWS_F32 || bias.dims[0].offset != heads || bias.dims[1].offset % 2 == 0)) {
    return fail(PS_INVALID_ARGUMENT, "bias: expected a rows_f32 weight [%lld, an odd number], got %s [%lld, %lld]",
                static_cast<long long>(heads), layout_name(bias.layout) ? layout_name(bias.layout) : "unknown layout",
                static_cast<long long>(bias.dims[0].offset), static_cast<long long>(bias.dims[1].offset));
  }
  for (keys.i = 0; keys.i < 4 && !equal(keys.s, kinds[keys.i]);) ++keys.i;
  const bool has_prefix = prefix.kind != OPERAND_NONE;
  if (has_prefix) {
    PS_TRY(expect_indices(prefix, "prefix"));
    if (!equal(prefix.dims[0], in[kAttentionQ].dims[0]))
      return fail(PS_INVALID_ARGUMENT, "prefix: expected a number for each row of q, %s, got %s",
                  describe(in[kAttentionQ]).text, describe(prefix).text);
  }
  if (keys.i == 4 || has_prefix != (keys.i != KEYS_ALL)) {
    return fail(PS_INVALID_ARGUMENT, "keys: expected %s, got \"%.*s\"",
                has_prefix ? "\"prefix\", \"rest\" or \"span\"" : "\"all\" without a prefix", PS_STR(keys.s));
  }
  if (has_prefix && attrs[kAttentionWindow].i != 0)
    return fail(PS_INVALID_ARGUMENT, "window: expected 0 with a prefix, got %lld",
                static_cast<long long>(attrs[kAttentionWindow].i));
  return PS_OK;
}

ps_status infer_prefix_lengths(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec& state = in[kPrefixState];
  PS_TRY(expect_indices(in[0], "ids"));
  PS_TRY(expect_batch(in, kPrefixPositions, in[0], "ids"));
  if (state.dims[1].offset != 1 || state.dims[2].offset != kPrefixElements) {
    return fail(PS_INVALID_ARGUMENT, "state: expected pages of one head of %d numbers, got %lld of %lld",
                kPrefixElements, static_cast<long long>(state.dims[1].offset),
                static_cast<long long>(state.dims[2].offset));
  }
  if (attrs[kPrefixToken].i < 0)
    return fail(PS_INVALID_ARGUMENT, "token: expected 0 or more, got %lld",
                static_cast<long long>(attrs[kPrefixToken].i));
  copy_type(in[0], out);
  return expect_group(attrs[kPrefixGroup], state, in[kPrefixPageTables]);
}

ps_status infer_prefix_positions(const Spec* in, AttrValue*, Spec* out) {
  PS_TRY(expect_indices(in[0], "positions"));
  PS_TRY(expect_indices(in[kPrefixPositionsPrefix], "prefix"));
  if (!equal(in[kPrefixPositionsPrefix].dims[0], in[0].dims[0]))
    return fail(PS_INVALID_ARGUMENT, "prefix: expected a number for each position, %s, got %s", describe(in[0]).text,
                describe(in[kPrefixPositionsPrefix]).text);
  copy_type(in[0], out);
  return PS_OK;
}

ps_status infer_short_conv(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec& state = in[kAttentionState];
  const Spec& w = in[kShortConvWeight];
  int64_t heads;
  PS_TRY(expect_latents(state, false));
  PS_TRY(expect_heads(in[kShortConvGate], "gate", state.dims[2].offset, &heads));
  if (heads != 2 * state.dims[1].offset) {
    return fail(PS_INVALID_ARGUMENT, "gate: expected twice the state's %lld heads, got %s",
                static_cast<long long>(state.dims[1].offset), describe(in[kShortConvGate]).text);
  }
  PS_TRY(expect_batch(in, kAttentionPositions, in[kShortConvGate], "gate"));
  const int64_t channels = heads * state.dims[2].offset, window = attrs[kShortConvWindow].i;
  if (window < 1 || window > kMaxConvWindow) {
    return fail(PS_INVALID_ARGUMENT, "window: expected 1 to %d, got %lld", kMaxConvWindow,
                static_cast<long long>(window));
  }
  if (w.layout != PS_ROWS_F32 || w.dims[0].offset != channels || w.dims[1].offset != window) {
    return fail(PS_INVALID_ARGUMENT, "weight: expected a rows_f32 weight [%lld, %lld], got %s [%lld, %lld]",
                static_cast<long long>(channels), static_cast<long long>(window),
                layout_name(w.layout) ? layout_name(w.layout) : "unknown layout",
                static_cast<long long>(w.dims[0].offset), static_cast<long long>(w.dims[1].offset));
  }
  if (in[kShortConvBias].kind != OPERAND_NONE) PS_TRY(expect_vector(in[kShortConvBias], "bias", channels));
  copy_type(in[kShortConvGate], out);
  return expect_group(attrs[kShortConvGroup], state, in[kAttentionPageTables]);
}

namespace {

ps_status expect_conv(const Spec& conv, int64_t channels) {
  if (conv.layout == PS_ROWS_F32 && conv.dims[0].offset == channels && conv.dims[1].offset >= 1 &&
      conv.dims[1].offset <= kMaxConvWindow)
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "conv: expected a rows_f32 weight [%lld, 1 to %d], got %s [%lld, %lld]",
              static_cast<long long>(channels), kMaxConvWindow,
              layout_name(conv.layout) ? layout_name(conv.layout) : "unknown layout",
              static_cast<long long>(conv.dims[0].offset), static_cast<long long>(conv.dims[1].offset));
}

ps_status expect_numbers(const Spec& state, int64_t expected) {
  if (state.dims[2].offset == expected) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "state: expected %lld numbers for each head, got %lld",
              static_cast<long long>(expected), static_cast<long long>(state.dims[2].offset));
}

}  // namespace

// The shapes determine the value heads per key head, and the width of a value head.
ps_status infer_gated_delta(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &state = in[kGatedDeltaState], &conv = in[kGatedDeltaConv];
  const int64_t key_heads = attrs[kGatedDeltaKeyHeads].i, head_dim = attrs[kGatedDeltaHeadDim].i;
  PS_TRY(expect_f32(in[kGatedDeltaX], "x", 2, 2));
  PS_TRY(expect_f32(in[kGatedDeltaA], "a", 2, 2));
  PS_TRY(expect_same(in[kGatedDeltaB], in[kGatedDeltaA], "b", "a"));
  PS_TRY(expect_batch(in, kGatedDeltaPositions, in[kGatedDeltaX], "x"));
  PS_TRY(expect_batch(in, kGatedDeltaPositions, in[kGatedDeltaA], "a"));
  if (key_heads < 1 || key_heads != state.dims[1].offset) {
    return fail(PS_INVALID_ARGUMENT, "key_heads: expected the state's %lld heads, got %lld",
                static_cast<long long>(state.dims[1].offset), static_cast<long long>(key_heads));
  }
  if (head_dim < 1 || head_dim > kMaxDeltaDim) {
    return fail(PS_INVALID_ARGUMENT, "head_dim: expected 1 to %d, got %lld", kMaxDeltaDim,
                static_cast<long long>(head_dim));
  }
  const int64_t heads = last_dim(in[kGatedDeltaA]), channels = last_dim(in[kGatedDeltaX]),
                values = channels - 2 * key_heads * head_dim;
  if (heads % key_heads) {
    return fail(PS_INVALID_ARGUMENT, "a: expected a multiple of %lld key heads, got %s",
                static_cast<long long>(key_heads), describe(in[kGatedDeltaA]).text);
  }
  if (values < 1 || values % heads || values / key_heads > kMaxDeltaValues) {
    return fail(PS_INVALID_ARGUMENT,
                "x: expected %lld query and key channels, then those of %lld value heads, at most %d for each key "
                "head, got %s",
                static_cast<long long>(2 * key_heads * head_dim), static_cast<long long>(heads), kMaxDeltaValues,
                describe(in[kGatedDeltaX]).text);
  }
  PS_TRY(expect_conv(conv, channels));
  PS_TRY(expect_vector(in[kGatedDeltaALog], "a_log", heads));
  PS_TRY(expect_vector(in[kGatedDeltaDtBias], "dt_bias", heads));
  PS_TRY(expect_numbers(state, state_elements(head_dim, values / key_heads, conv.dims[1].offset)));
  *out = Spec{OPERAND_VALUE, PS_F32, 3, {in[kGatedDeltaX].dims[0], constant(heads), constant(values / heads)}, 0, -1,
              constant(0)};
  return expect_group(attrs[kGatedDeltaGroup], state, in[kGatedDeltaPageTables]);
}

// The shapes determine the heads of a block, and the width of a head.
ps_status infer_ssm_scan(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec &state = in[kSsmScanState], &conv = in[kSsmScanConv];
  const int64_t groups = attrs[kSsmScanGroups].i, blocks = attrs[kSsmScanBlocks].i,
                state_dim = attrs[kSsmScanStateDim].i;
  PS_TRY(expect_f32(in[kSsmScanX], "x", 2, 2));
  PS_TRY(expect_f32(in[kSsmScanDt], "dt", 2, 2));
  PS_TRY(expect_batch(in, kSsmScanPositions, in[kSsmScanX], "x"));
  PS_TRY(expect_batch(in, kSsmScanPositions, in[kSsmScanDt], "dt"));
  const int64_t heads = last_dim(in[kSsmScanDt]), channels = last_dim(in[kSsmScanX]);
  if (blocks < 1 || blocks != state.dims[1].offset || heads % blocks) {
    return fail(PS_INVALID_ARGUMENT, "blocks: expected the state's %lld, which divide %lld heads, got %lld",
                static_cast<long long>(state.dims[1].offset), static_cast<long long>(heads),
                static_cast<long long>(blocks));
  }
  if (groups < 1 || blocks % groups) {
    return fail(PS_INVALID_ARGUMENT, "groups: expected a divisor of %lld blocks, got %lld",
                static_cast<long long>(blocks), static_cast<long long>(groups));
  }
  if (state_dim < 1 || state_dim > kMaxDeltaDim) {
    return fail(PS_INVALID_ARGUMENT, "state_dim: expected 1 to %d, got %lld", kMaxDeltaDim,
                static_cast<long long>(state_dim));
  }
  const int64_t values = channels - 2 * groups * state_dim;
  if (values < 1 || values % heads || values / blocks > kMaxDeltaValues) {
    return fail(PS_INVALID_ARGUMENT, "x: expected the channels of %lld heads, at most %d in a block, then %lld, got %s",
                static_cast<long long>(heads), kMaxDeltaValues, static_cast<long long>(2 * groups * state_dim),
                describe(in[kSsmScanX]).text);
  }
  PS_TRY(expect_conv(conv, channels));
  if (in[kSsmScanConvBias].kind != OPERAND_NONE) PS_TRY(expect_vector(in[kSsmScanConvBias], "conv_bias", channels));
  PS_TRY(expect_vector(in[kSsmScanALog], "a_log", heads));
  PS_TRY(expect_vector(in[kSsmScanDtBias], "dt_bias", heads));
  PS_TRY(expect_vector(in[kSsmScanD], "d", heads));
  const double least = attrs[kSsmScanDtMin].f, most = attrs[kSsmScanDtMax].f;
  if (!(most >= 0 && most <= FLT_MAX))
    return fail(PS_INVALID_ARGUMENT, "dt_max: expected 0 to %g, got %g", double{FLT_MAX}, most);
  if (!(least >= 0 && least <= most))
    return fail(PS_INVALID_ARGUMENT, "dt_min: expected 0 to dt_max, %g, got %g", most, least);
  PS_TRY(expect_numbers(state, state_elements(state_dim, values / blocks, conv.dims[1].offset)));
  *out = Spec{OPERAND_VALUE, PS_F32, 3, {in[kSsmScanX].dims[0], constant(heads), constant(values / heads)}, 0, -1,
              constant(0)};
  return expect_group(attrs[kSsmScanGroup], state, in[kSsmScanPageTables]);
}

}  // namespace ps
