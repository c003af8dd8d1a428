// The phases of the ops over pages: kv_append, attention, both for latents, the short convolution, the gated delta
// rule, selective state spaces, prefix lengths.
// Hot: runs in every step.
#include <algorithm>

#include "base/memory.h"
#include "paged/attention.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
const int32_t* i32(const Tensor& t) { return reinterpret_cast<const int32_t*>(t.data); }

KvView kv_view(const Tensor& state) {
  return KvView{state.data,
                state.layout,
                static_cast<int32_t>(state.dims[1]),
                static_cast<int32_t>(state.dims[2]),
                state.row_stride,
                state_shape(state).latent_dim};
}

// `at`: the argument `positions`; request_starts and page_tables follow it.
RaggedView ragged_view(const Call& c, int32_t at, int64_t group) {
  const Tensor& tables = c.in[at + 2];
  RaggedView view{};
  view.positions = i32(c.in[at]);
  view.request_starts = i32(c.in[at + 1]);
  view.token_request = c.token_request;
  view.page_table = i32(tables) + group * tables.dims[1] * tables.dims[2];
  view.num_tokens = static_cast<int32_t>(c.in[at].dims[0]);
  view.num_requests = static_cast<int32_t>(tables.dims[1]);
  view.page_table_width = static_cast<int32_t>(tables.dims[2]);
  return view;
}

// For few tokens of long requests, threads share the partitions of a context and merge the results afterwards, with the
// same arithmetic.  The bounds keep the memory for the results small.
constexpr int64_t kMaxSharedHeads = 64, kMaxSharedParts = 512;

struct Sharing {
  int64_t parts;    // of the longest context
  int64_t tokens;   // the most that are shared
  int64_t results;  // at least tokens x parts, and monotonic in every dim
};

Sharing sharing(const Call& c) {
  const int64_t requests = c.in[kAttentionPageTables].dims[1];
  const int64_t parts = (c.in[kAttentionPageTables].dims[2] + kPartitionPages - 1) / kPartitionPages;
  if (parts < 2) return Sharing{1, 0, 0};
  const int64_t by_heads = std::max<int64_t>(1, kMaxSharedHeads / c.in[kAttentionState].dims[1]);
  const int64_t most = std::min(by_heads, requests);
  return Sharing{parts, std::min(most, std::max<int64_t>(1, kMaxSharedParts / parts)),
                 std::min(most * parts, std::max(parts, kMaxSharedParts))};
}

// Partitions are shared only if each request has one token: several tokens of a request read each page once for all
// of them.
bool is_shared(const Call& c) {
  return c.in[kAttentionQ].dims[0] == c.in[kAttentionPageTables].dims[1] &&
         c.in[kAttentionQ].dims[0] <= sharing(c).tokens;
}

int64_t tokens(const Call& c) { return c.in[0].dims[0]; }
int64_t shared_tokens(const Call& c) { return is_shared(c) ? c.in[kAttentionQ].dims[0] : 0; }
int64_t attention_items(const Call& c) {
  return c.in[kAttentionQ].dims[0] * c.in[kAttentionState].dims[1] * (is_shared(c) ? sharing(c).parts : 1);
}
int64_t value_dim(const Call& c) { return c.in[kAttentionState].dims[c.in[kAttentionState].rank == 4 ? 3 : 2]; }
int32_t num_heads(const Call& c) { return static_cast<int32_t>(row_elements(c.in[kAttentionQ]) / value_dim(c)); }

void run_kv_append(const Call& c, int64_t begin, int64_t end, int32_t) {
  KvAppendArgs args{};
  args.k = f32(c.in[kKvAppendK]);
  args.k_stride = c.in[kKvAppendK].row_stride;
  args.v = f32(c.in[kKvAppendV]);
  args.v_stride = c.in[kKvAppendV].row_stride;
  args.kv = kv_view(c.in[kKvAppendState]);
  args.batch = ragged_view(c, kKvAppendPositions, c.attrs[kKvAppendGroup].i);
  c.kernels->kv_append(args, begin, end);
}

void run_latent_append(const Call& c, int64_t begin, int64_t end, int32_t) {
  LatentAppendArgs args{};
  args.latent = f32(c.in[kLatentAppendLatent]);
  args.latent_stride = c.in[kLatentAppendLatent].row_stride;
  args.rope = f32(c.in[kLatentAppendRope]);
  args.rope_stride = c.in[kLatentAppendRope].row_stride;
  args.kv = kv_view(c.in[kKvAppendState]);
  args.batch = ragged_view(c, kKvAppendPositions, c.attrs[kKvAppendGroup].i);
  c.kernels->latent_append(args, begin, end);
}

// The arguments that all kinds of attention have.
AttentionArgs common_args(const Call& c) {
  AttentionArgs args{};
  args.q = f32(c.in[kAttentionQ]);
  args.q_stride = c.in[kAttentionQ].row_stride;
  args.out = f32(c.out[0]);
  args.out_stride = c.out[0].row_stride;
  args.kv = kv_view(c.in[kAttentionState]);
  args.batch = ragged_view(c, kAttentionPositions, c.attrs[kAttentionGroup].i);
  args.num_heads = num_heads(c);
  args.scale = static_cast<float>(c.attrs[kAttentionScale].f);
  args.softcap = static_cast<float>(c.attrs[kAttentionSoftcap].f);
  args.causal = static_cast<int32_t>(c.attrs[kAttentionCausal].i);
  args.window = static_cast<int32_t>(c.attrs[kAttentionWindow].i);
  return args;
}

AttentionArgs disentangled_args(const Call& c) {
  AttentionArgs args = common_args(c);
  const Tensor &c2p = c.in[kDisentangledC2p], &p2c = c.in[kDisentangledP2c], &buckets = c.in[kDisentangledBuckets];
  args.c2p = f32(c2p);
  args.c2p_stride = c2p.row_stride;
  args.p2c = f32(p2c);
  args.p2c_stride = p2c.row_stride;
  args.num_buckets = row_elements(c2p.data ? c2p : p2c) / args.num_heads;
  args.buckets = f32(buckets);
  args.bucket_reach = buckets.dims[1] / 2;
  return args;
}

using MakeArgs = AttentionArgs (*)(const Call&);

template <MakeArgs kArgs>
AttentionArgs shared_args(const Call& c) {
  AttentionArgs args = kArgs(c);
  if (is_shared(c)) {
    args.partials = reinterpret_cast<float*>(c.scratch);
    args.num_parts = static_cast<int32_t>(sharing(c).parts);
  }
  return args;
}

template <MakeArgs kArgs>
void run_attention(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const AttentionArgs args = shared_args<kArgs>(c);
  auto* kernel = args.partials ? c.kernels->attention_part : c.kernels->attention;
  kernel(args, begin, end, c.thread_scratch + thread * c.thread_scratch_bytes);
}

template <MakeArgs kArgs>
void run_merge(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->attention_merge(shared_args<kArgs>(c), begin, end);
}

void run_short_conv(const Call& c, int64_t begin, int64_t end, int32_t) {
  ShortConvArgs args{};
  args.gate = f32(c.in[kShortConvGate]);
  args.gate_stride = c.in[kShortConvGate].row_stride;
  args.out = f32(c.out[0]);
  args.out_stride = c.out[0].row_stride;
  args.kv = kv_view(c.in[kAttentionState]);
  args.batch = ragged_view(c, kAttentionPositions, c.attrs[kShortConvGroup].i);
  args.weight = f32(c.in[kShortConvWeight]);
  args.bias = f32(c.in[kShortConvBias]);
  args.window = static_cast<int32_t>(c.attrs[kShortConvWindow].i);
  c.kernels->short_conv(args, begin, end);
}

int64_t delta_items(const Call& c) { return c.in[kGatedDeltaPageTables].dims[1] * c.attrs[kGatedDeltaKeyHeads].i; }

template <bool kTiled>
void run_gated_delta(const Call& c, int64_t begin, int64_t end, int32_t) {
  GatedDeltaArgs args{};
  args.x = f32(c.in[kGatedDeltaX]);
  args.a = f32(c.in[kGatedDeltaA]);
  args.b = f32(c.in[kGatedDeltaB]);
  args.x_stride = c.in[kGatedDeltaX].row_stride;
  args.a_stride = c.in[kGatedDeltaA].row_stride;
  args.b_stride = c.in[kGatedDeltaB].row_stride;
  args.out = f32(c.out[0]);
  args.out_stride = c.out[0].row_stride;
  args.state = c.in[kGatedDeltaState].data;
  args.page_bytes = c.in[kGatedDeltaState].row_stride;
  args.batch = ragged_view(c, kGatedDeltaPositions, c.attrs[kGatedDeltaGroup].i);
  args.conv = f32(c.in[kGatedDeltaConv]);
  args.a_log = f32(c.in[kGatedDeltaALog]);
  args.dt_bias = f32(c.in[kGatedDeltaDtBias]);
  args.key_heads = static_cast<int32_t>(c.attrs[kGatedDeltaKeyHeads].i);
  args.heads_per_key = static_cast<int32_t>(c.out[0].dims[1]) / args.key_heads;
  args.head_dim = static_cast<int32_t>(c.attrs[kGatedDeltaHeadDim].i);
  args.value_dim = static_cast<int32_t>(c.out[0].dims[2]);
  args.window = static_cast<int32_t>(c.in[kGatedDeltaConv].dims[1]);
  args.key_step = kTiled ? 1 : args.heads_per_key;
  args.value_step = kTiled ? args.key_heads : 1;
  c.kernels->gated_delta(args, begin, end);
}

int64_t ssm_items(const Call& c) { return c.in[kSsmScanPageTables].dims[1] * c.attrs[kSsmScanBlocks].i; }

void run_ssm_scan(const Call& c, int64_t begin, int64_t end, int32_t) {
  SsmScanArgs args{};
  args.x = f32(c.in[kSsmScanX]);
  args.dt = f32(c.in[kSsmScanDt]);
  args.x_stride = c.in[kSsmScanX].row_stride;
  args.dt_stride = c.in[kSsmScanDt].row_stride;
  args.out = f32(c.out[0]);
  args.out_stride = c.out[0].row_stride;
  args.state = c.in[kSsmScanState].data;
  args.page_bytes = c.in[kSsmScanState].row_stride;
  args.batch = ragged_view(c, kSsmScanPositions, c.attrs[kSsmScanGroup].i);
  args.conv = f32(c.in[kSsmScanConv]);
  args.conv_bias = f32(c.in[kSsmScanConvBias]);
  args.a_log = f32(c.in[kSsmScanALog]);
  args.dt_bias = f32(c.in[kSsmScanDtBias]);
  args.d = f32(c.in[kSsmScanD]);
  args.heads = static_cast<int32_t>(c.out[0].dims[1]);
  args.blocks = static_cast<int32_t>(c.attrs[kSsmScanBlocks].i);
  args.groups = static_cast<int32_t>(c.attrs[kSsmScanGroups].i);
  args.state_dim = static_cast<int32_t>(c.attrs[kSsmScanStateDim].i);
  args.head_dim = static_cast<int32_t>(c.out[0].dims[2]);
  args.window = static_cast<int32_t>(c.in[kSsmScanConv].dims[1]);
  args.dt_min = static_cast<float>(c.attrs[kSsmScanDtMin].f);
  args.dt_max = static_cast<float>(c.attrs[kSsmScanDtMax].f);
  c.kernels->ssm_scan(args, begin, end);
}

// The first number of a request's state is the length of its prefix, or 0 before the prefix ends; the last is the
// number of tokens so far.
void run_prefix_lengths(const Call& c, int64_t begin, int64_t end, int32_t) {
  const RaggedView batch = ragged_view(c, kPrefixPositions, c.attrs[kPrefixGroup].i);
  const Tensor& state = c.in[kPrefixState];
  const auto cell = [&](int64_t request, int32_t position) {
    const int32_t page = batch.page_table[request * batch.page_table_width + position / PS_PAGE_TOKENS];
    return reinterpret_cast<float*>(state.data + page * state.row_stride);
  };
  const int32_t* ids = i32(c.in[0]);
  int32_t* out = reinterpret_cast<int32_t*>(c.out[0].data);
  for (int64_t request = begin; request < end; ++request) {
    const int32_t first = batch.request_starts[request], stop = batch.request_starts[request + 1];
    if (first == stop) continue;
    int32_t prefix = batch.positions[first] ? static_cast<int32_t>(cell(request, batch.positions[first] - 1)[0]) : 0;
    for (int32_t t = first; t < stop; ++t) {
      const int32_t position = batch.positions[t];
      if (!prefix && position && ids[t] == c.attrs[kPrefixToken].i) prefix = position;
      float* of = cell(request, position);
      of[0] = static_cast<float>(prefix);
      of[kPrefixElements - 1] = static_cast<float>(position + 1);
    }
    for (int32_t t = first; t < stop; ++t) out[t] = prefix ? prefix : batch.positions[stop - 1] + 1;
  }
}
int64_t requests(const Call& c) { return c.in[kPrefixPageTables].dims[1]; }

// Two tokens may share a page, but never a slot of it.
constexpr Phase kAppend = {.split = SPLIT_ROWS,
                           .items = tokens,
                           .run = run_kv_append,
                           .reads_rows = operands(kKvAppendK, kKvAppendV),
                           .writes_state = true};
constexpr Phase kLatentAppend = {.split = SPLIT_ROWS,
                                 .items = tokens,
                                 .run = run_latent_append,
                                 .reads_rows = operands(kLatentAppendLatent, kLatentAppendRope),
                                 .writes_state = true};
constexpr Phase kAttention[] = {
    {.split = SPLIT_SHARES,
     .items = attention_items,
     .run = run_attention<attention_args>,
     .reads_all = operands(kAttentionQ),
     .writes_outputs = true,
     .writes_scratch = true,
     .reads_state = true},
    {.split = SPLIT_ROWS,
     .items = shared_tokens,
     .run = run_merge<attention_args>,
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kShortConv = {.split = SPLIT_ROWS,
                              .items = tokens,
                              .run = run_short_conv,
                              .reads_rows = operands(kShortConvGate),
                              .writes_outputs = true,
                              .reads_state = true};
template <bool kTiled>
constexpr Phase kGatedDelta = {.split = SPLIT_SHARES,
                               .items = delta_items,
                               .run = run_gated_delta<kTiled>,
                               .reads_all = operands(kGatedDeltaX, kGatedDeltaA, kGatedDeltaB),
                               .writes_outputs = true,
                               .reads_state = true,
                               .writes_state = true};
constexpr Phase kSsmScan = {.split = SPLIT_SHARES,
                            .items = ssm_items,
                            .run = run_ssm_scan,
                            .reads_all = operands(kSsmScanX, kSsmScanDt),
                            .writes_outputs = true,
                            .reads_state = true,
                            .writes_state = true};
constexpr Phase kRelativeAttention[] = {
    {.split = SPLIT_SHARES,
     .items = attention_items,
     .run = run_attention<attention_args>,
     .reads_all = operands(kAttentionQ, kRelativeAttentionPrefix),
     .writes_outputs = true,
     .writes_scratch = true,
     .reads_state = true},
    {.split = SPLIT_ROWS,
     .items = shared_tokens,
     .run = run_merge<attention_args>,
     .reads_all = operands(kRelativeAttentionPrefix),
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kDisentangledAttention[] = {
    {.split = SPLIT_SHARES,
     .items = attention_items,
     .run = run_attention<disentangled_args>,
     .reads_all = operands(kAttentionQ, kDisentangledC2p, kDisentangledP2c),
     .writes_outputs = true,
     .writes_scratch = true,
     .reads_state = true},
    {.split = SPLIT_ROWS,
     .items = shared_tokens,
     .run = run_merge<disentangled_args>,
     .writes_outputs = true,
     .reads_scratch = true},
};
constexpr Phase kPrefixLengths = {.split = SPLIT_SHARES,
                                  .items = requests,
                                  .run = run_prefix_lengths,
                                  .reads_all = operands(0),
                                  .writes_outputs = true,
                                  .reads_state = true,
                                  .writes_state = true};

}  // namespace

AttentionArgs attention_args(const Call& c) {
  AttentionArgs args = common_args(c);
  if (args.kv.latent_dim) {
    args.q_rope = f32(c.in[kLatentAttentionRope]);
    args.q_rope_stride = c.in[kLatentAttentionRope].row_stride;
  } else {
    args.alibi = f32(c.in[kAttentionAlibi]);
    args.sinks = f32(c.in[kAttentionSinks]);
    args.bias = f32(c.in[kRelativeAttentionBias]);
    args.bias_reach = c.in[kRelativeAttentionBias].dims[1] / 2;
    args.prefix = i32(c.in[kRelativeAttentionPrefix]);
    if (args.prefix) args.keys = c.attrs[kRelativeAttentionKeys].i;
  }
  return args;
}

Phases kv_append_phases(const Call&) { return Phases{&kAppend, 1}; }
Phases short_conv_phases(const Call&) { return Phases{&kShortConv, 1}; }
Phases gated_delta_phases(const Call&) { return Phases{&kGatedDelta<false>, 1}; }
Phases gated_delta_tiled_phases(const Call&) { return Phases{&kGatedDelta<true>, 1}; }
Phases ssm_scan_phases(const Call&) { return Phases{&kSsmScan, 1}; }
Phases latent_append_phases(const Call&) { return Phases{&kLatentAppend, 1}; }
Phases attention_phases(const Call&) { return Phases{kAttention, 2}; }
Phases relative_attention_phases(const Call&) { return Phases{kRelativeAttention, 2}; }
Phases disentangled_attention_phases(const Call&) { return Phases{kDisentangledAttention, 2}; }
Phases prefix_lengths_phases(const Call&) { return Phases{&kPrefixLengths, 1}; }
Phases latent_attention_phases(const Call& c) { return attention_phases(c); }

ps_status attention_scratch(const Call& c, Scratch* out) {
  out->per_thread = round_up(c.kernels->attention_scratch_bytes(num_heads(c), kv_view(c.in[kAttentionState])), 64);
  const int64_t floats = 16 + (value_dim(c) + 15) / 16 * 16;
  if (!checked_mul(sharing(c).results * num_heads(c), floats * 4, &out->shared)) {
    return fail(PS_INVALID_ARGUMENT, "page_tables: the partial results of attention do not fit in memory");
  }
  return PS_OK;
}

}  // namespace ps
