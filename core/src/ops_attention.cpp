// kv_append and attention over pages.
#include "memory.h"
#include "ops.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
const int32_t* i32(const Tensor& t) { return reinterpret_cast<const int32_t*>(t.data); }

KvView kv_view(const Tensor& state) {
  return KvView{state.data, state.layout, static_cast<int32_t>(state.dims[1]), static_cast<int32_t>(state.dims[2]),
                state.row_stride};
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

int64_t tokens(const Call& c) { return c.in[0].dims[0]; }
int64_t token_heads(const Call& c) { return c.in[0].dims[0] * c.in[1].dims[1]; }
int32_t num_heads(const Call& c) { return static_cast<int32_t>(row_elements(c.in[0]) / c.in[1].dims[2]); }

void run_kv_append(const Call& c, int64_t begin, int64_t end, int32_t) {
  KvAppendArgs args{};
  args.k = f32(c.in[0]);
  args.k_stride = c.in[0].row_stride;
  args.v = f32(c.in[1]);
  args.v_stride = c.in[1].row_stride;
  args.kv = kv_view(c.in[2]);
  args.batch = ragged_view(c, 3, c.attrs[0].i);
  c.kernels->kv_append(args, begin, end);
}

void run_attention(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  AttentionArgs args{};
  args.q = f32(c.in[0]);
  args.q_stride = c.in[0].row_stride;
  args.out = f32(c.out[0]);
  args.out_stride = c.out[0].row_stride;
  args.kv = kv_view(c.in[1]);
  args.batch = ragged_view(c, 2, c.attrs[1].i);
  args.num_heads = num_heads(c);
  args.scale = static_cast<float>(c.attrs[0].f);
  args.softcap = static_cast<float>(c.attrs[4].f);
  args.alibi = f32(c.in[5]);
  args.causal = static_cast<int32_t>(c.attrs[2].i);
  args.window = static_cast<int32_t>(c.attrs[3].i);
  c.kernels->attention(args, begin, end, c.thread_scratch + thread * c.thread_scratch_bytes);
}

// Two tokens may meet in a page, never in a slot of it.
constexpr Phase kAppend = {SPLIT_ROWS, tokens, run_kv_append, 3, 0, false, false, false, false, true};
constexpr Phase kAttention = {SPLIT_SHARES, token_heads, run_attention, 0, 1, true, false, false, true, false};

}  // namespace

Phases kv_append_phases(const Call&) { return Phases{&kAppend, 1}; }
Phases attention_phases(const Call&) { return Phases{&kAttention, 1}; }

ps_status attention_scratch(const Call& c, Scratch* out) {
  const int64_t bytes = c.kernels->attention_scratch_bytes(num_heads(c), static_cast<int32_t>(c.in[1].dims[1]),
                                                           static_cast<int32_t>(c.in[1].dims[2]));
  out->per_thread = round_up(bytes, 64);
  return PS_OK;
}

}  // namespace ps
