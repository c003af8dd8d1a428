// Estimates a step's time from the weights that it reads and the keys that it attends to.
#include "program/estimate.h"

#include "bundle/validate.h"
#include "program/program.h"

namespace ps {
namespace {

// The approximate work of a thread per nanosecond: bytes of weights read, bytes of weights multiplied, products of
// attention over f32 pages and over smaller types.
constexpr int64_t kReadBytes = 20, kMultipliedBytes = 200;
constexpr double kF32Products = 10, kProducts = 20;
constexpr double kMaxEstimate = 1e15;  // nanoseconds
constexpr int64_t kMaxWindows = 32;    // number of windows counted separately

// The number of keys that the queries of these positions see.  Without a causal mask they see more, which is ignored.
int64_t count_keys(const int32_t* positions, int64_t count, int32_t window) {
  const int64_t most = window > 0 ? window : INT32_MAX;
  int64_t keys = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t num_keys = int64_t{positions[i]} + 1;
    keys += num_keys < most ? num_keys : most;
  }
  return keys;
}

}  // namespace

static ps_status find_attention(const Graph& graph, Vec<AttentionWork>* out) {
  out->clear();
  for (const Node& node : graph.nodes) {
    if (!is_attention(node.op)) continue;
    AttrValue attrs[kMaxAttrs] = {};
    PS_TRY(bind_node_attrs(node, attrs));
    const int32_t window = static_cast<int32_t>(attrs[kAttentionWindow].i);
    const double row = static_cast<double>(graph.values[node.inputs[0].index].row_elements);
    const double products = 2.0 * row / (node.op == OP_CONTEXT_ATTENTION ? graph.context_world : 1);
    int64_t i = 0;
    while (i < out->size() && ((*out)[i].window != window || (*out)[i].wanted_only != node.wanted_only)) ++i;
    if (i == kMaxWindows) --i;  // counted with another window's, which suffices for an estimate
    if (i == out->size() && !out->push(AttentionWork{window, node.wanted_only, 0}))
      return fail(PS_OUT_OF_MEMORY, "program: out of memory");
    (*out)[i].products += products;
  }
  return PS_OK;
}

ps_status find_work(const ps_model& model, StepWork* out) {
  out->token_bytes = bytes_per_token(model);
  return find_attention(model.graph, &out->attention);
}

int64_t estimate_step(const ps_program& p, int64_t num_tokens) {
  const int64_t weights = p.work.token_bytes / kReadBytes + p.work.token_bytes / kMultipliedBytes * num_tokens;
  double products = 0;
  for (const AttentionWork& work : p.work.attention) {
    const int32_t* positions = work.wanted_only ? p.batch.wanted_positions : p.batch.positions;
    products += work.products * static_cast<double>(count_keys(
                                    positions, work.wanted_only ? p.batch.num_wanted : num_tokens, work.window));
  }
  const double all =
      static_cast<double>(weights) + products / (p.options.kv_layout == PS_KV_F32 ? kF32Products : kProducts);
  return static_cast<int64_t>(all < kMaxEstimate ? all : kMaxEstimate);
}

}  // namespace ps
