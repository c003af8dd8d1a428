// The C ABI: where a step's time goes, and what each node of a graph reads.
#include "api.h"
#include "model.h"
#include "program.h"

using namespace ps;

namespace ps {
namespace {

const char* text(Str s) { return s.data ? s.data : ""; }  // strings of the metadata are terminated

void describe_weights(const Graph& graph, const Node& node, ps_node_info* info) {
  const bool is_table = strcmp(info->op, "embedding") == 0;
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    if (node.inputs[i].kind != OPERAND_WEIGHT) continue;
    const Weight& weight = graph.weights[node.inputs[i].index];
    info->weight_bytes += is_table ? weight.bytes / weight.rows : weight.bytes;
    if (info->layout) continue;
    info->layout = weight.layout;
    info->rows = weight.rows;
    info->cols = weight.cols;
  }
}

void describe_state(const Graph& graph, const Node& node, ps_node_info* info) {
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    if (node.inputs[i].kind != OPERAND_STATE) continue;
    const State& state = graph.states[node.inputs[i].index];
    info->num_kv_heads = state.num_kv_heads;
    info->head_dim = state.head_dim;
    info->window = graph.page_groups[state.group];
  }
}

void describe_output(const Graph& graph, const Node& node, ps_node_info* info) {
  info->output = "";
  if (!node.num_outputs) return;
  const Value& value = graph.values[node.outputs[0]];
  info->output = text(value.name);
  info->output_rank = value.rank;
  for (int32_t d = 0; d < value.rank; ++d) {
    const Dim& dim = value.dims[d];
    info->output_dims[d] = ps_dim{dim.symbol, 0, dim.factor, dim.offset};
  }
}

}  // namespace
}  // namespace ps

ps_status ps_model_node(const ps_model* model, int32_t index, ps_node_info* out) {
  PS_TRY(require(model && out, "model, out"));
  const Graph& graph = model->graph;
  if (index < 0 || index >= graph.nodes.size()) {
    return fail(PS_INVALID_ARGUMENT, "index: expected less than %lld, found %d",
                static_cast<long long>(graph.nodes.size()), index);
  }
  const Node& node = graph.nodes[index];
  ps_node_info info{};
  info.op = kOps[node.op].name;
  info.name = text(node.name);
  info.scheme = "";
  for (int32_t i = 0; i < node.num_attrs; ++i) {
    if (equal(node.attrs[i].name, "scheme")) info.scheme = text(node.attrs[i].s);
  }
  info.kept = node.kept;
  describe_weights(graph, node, &info);
  describe_state(graph, node, &info);
  describe_output(graph, node, &info);
  return write_struct(info, out, "out");
}

ps_status ps_program_profile(ps_program* program, int32_t on) {
  PS_TRY(require(program, "program"));
  program->profiling = false;
  program->num_spans = 0;
  program->spans.release();
  if (!on) return PS_OK;
  const int64_t threads = program->context->pool.num_threads(), steps = program->steps.size();
  const int64_t bytes = (1 + threads * steps) * static_cast<int64_t>(sizeof(ps_span));
  if (!program->spans.allocate(bytes))
    return fail(PS_OUT_OF_MEMORY, "profile: no memory for %lld bytes", static_cast<long long>(bytes));
  ps_span* span = spans_of(program);
  *span++ = ps_span{-1, 0, 0, 0, 0, 0, 0};
  for (int64_t t = 0; t < threads; ++t) {
    for (int64_t s = 0; s < steps; ++s) *span++ = label_span(*program, s, static_cast<int32_t>(t));
  }
  program->profiling = true;
  return PS_OK;
}

ps_status ps_program_profile_spans(const ps_program* program, const ps_span** spans, int64_t* count) {
  PS_TRY(require(program && spans && count, "program, spans, count"));
  *spans = reinterpret_cast<const ps_span*>(program->spans.data());
  *count = program->num_spans;
  return PS_OK;
}
