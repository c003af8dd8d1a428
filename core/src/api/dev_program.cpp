// The functions of penstock_dev.h for programs: flags, spans, what each node reads, and KV pages.
#include "api/api.h"
#include "ops/layout.h"

using namespace ps;

namespace ps {
namespace {

const char* text(Str s) { return s.data ? s.data : ""; }  // strings of the metadata are terminated

void describe_weights(const Graph& graph, const Node& node, ps_node_info* info) {
  const bool is_table = node.op == OP_EMBEDDING;
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

ps_status ps_program_create_flagged(ps_model* model, ps_context* context, const ps_program_options* options,
                                    uint32_t flags, ps_program** out) {
  if (flags & ~(PS_PROGRAM_EMPTY_KERNELS | PS_PROGRAM_POISON | PS_PROGRAM_ALL_THREADS | PS_PROGRAM_INPUT_SUMS))
    return fail(PS_UNSUPPORTED, "flags: 0x%x has bits that this version does not know", flags);
  return create_program(model, context, options, flags, out);
}

ps_status ps_model_node(const ps_model* model, int32_t index, ps_node_info* out) {
  PS_TRY(check_open(model));
  PS_TRY(require(out, "out"));
  const Graph& graph = model->graph;
  if (index < 0 || index >= graph.nodes.size()) {
    return fail(PS_INVALID_ARGUMENT, "index: expected less than %lld, got %d",
                static_cast<long long>(graph.nodes.size()), index);
  }
  const Node& node = graph.nodes[index];
  ps_node_info info{};
  info.op = op_name(node.op);
  info.name = text(node.name);
  info.scheme = "";
  for (int32_t i = 0; i < node.num_attrs; ++i) {
    if (equal(node.attrs[i].name, "scheme")) info.scheme = text(node.attrs[i].s);
  }
  info.kept = node.wanted_only;
  describe_weights(graph, node, &info);
  describe_state(graph, node, &info);
  describe_output(graph, node, &info);
  return write_struct(info, out, "out");
}

ps_status ps_model_file(const ps_model* model, int64_t out[4]) {
  PS_TRY(check_open(model));
  PS_TRY(require(out, "out"));
  const struct stat& found = model->file.as_opened();
  out[0] = static_cast<int64_t>(found.st_dev);
  out[1] = static_cast<int64_t>(found.st_ino);
  out[2] = found.st_size;
  out[3] = int64_t{found.st_mtim.tv_sec} * 1000000000 + found.st_mtim.tv_nsec;
  return PS_OK;
}

int32_t ps_auto_kv_layout(const char* scheme) {
  return scheme ? auto_kv_layout(Str{scheme, static_cast<uint32_t>(strlen(scheme))}) : 0;
}

ps_status ps_program_profile(ps_program* program, int32_t on) {
  const Use use(program, kAnyKind);
  PS_TRY(use.status());
  return profile_program(program, on != 0);
}

ps_status ps_program_profile_spans(const ps_program* program, const ps_span** spans, int64_t* count) {
  const Use use(program, kAnyKind);
  PS_TRY(use.status());
  PS_TRY(require(spans && count, "spans, count"));
  *spans = reinterpret_cast<const ps_span*>(program->spans.memory.data());
  *count = program->spans.count;
  return PS_OK;
}

ps_status ps_program_sum_inputs(ps_program* program, int32_t index, double* squares, float* maxima, float* rows,
                                int32_t* experts) {
  const Use use(program);
  PS_TRY(use.status());
  if (!has_flag(*program, PS_PROGRAM_INPUT_SUMS))
    return fail(PS_INVALID_ARGUMENT, "flags: expected a program with PS_PROGRAM_INPUT_SUMS");
  const Vec<Node>& nodes = program->model->graph.nodes;
  const int32_t op = index < 0 || index >= nodes.size() ? -1 : nodes[index].op;
  if (op != OP_LINEAR && op != OP_EXPERT_LINEAR)
    return fail(PS_INVALID_ARGUMENT, "index: expected a node that is a linear, got %d", index);
  if (experts && op == OP_LINEAR)
    return fail(PS_INVALID_ARGUMENT, "experts: expected null for a linear without experts, node %d", index);
  program->input_sums[index] = InputSums{squares, maxima, rows, experts};
  return PS_OK;
}

ps_status ps_program_kv(ps_program* program, int32_t state, void** data, int64_t* page_bytes, int32_t* num_pages) {
  PS_TRY(check_handle(program, HANDLE_PROGRAM, "program"));  // allowed during a step: the caller owns the pages
  PS_TRY(require(data && page_bytes && num_pages, "data, page_bytes, num_pages"));
  const Graph& graph = program->model->graph;
  if (state < 0 || state >= graph.states.size()) {
    return fail(PS_INVALID_ARGUMENT, "state: expected less than %lld, got %d",
                static_cast<long long>(graph.states.size()), state);
  }
  const State& s = graph.states[state];
  *data = program->kv.data() + program->plan.state_offsets[state];
  *num_pages = program->plan.group_pages[s.group];
  return page_bytes_of(s, program->options.kv_layout, page_bytes);
}
