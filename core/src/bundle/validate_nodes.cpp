// Validation of the nodes of a graph: operands, attributes, and shapes, which are inferred again.
#include "bundle/validate.h"
#include "ops/loaded.h"

namespace ps {
namespace {

long long ll(int64_t v) { return static_cast<long long>(v); }

ps_status out_of_range(const char* what, int32_t at, int64_t limit, int32_t found) {
  return fail(PS_INVALID_ARGUMENT, "%s[%d]: expected an index below %lld, got %d", what, at, ll(limit), found);
}

ps_status check_operand(const Graph& graph, const Vec<uint8_t>& defined, const Operand& operand, int32_t at) {
  const int64_t limits[] = {1, graph.values.size(), graph.weights.size(), graph.states.size()};
  if (operand.kind < OPERAND_NONE || operand.kind > OPERAND_STATE) {
    return fail(PS_INVALID_ARGUMENT, "inputs[%d].kind: expected 0 to 3, got %d", at, operand.kind);
  }
  if (operand.kind == OPERAND_NONE) return PS_OK;
  if (operand.index < 0 || operand.index >= limits[operand.kind])
    return out_of_range("inputs", at, limits[operand.kind], operand.index);
  if (operand.kind == OPERAND_VALUE && !defined[graph.values[operand.index].root]) {
    return fail(PS_INVALID_ARGUMENT, "inputs[%d]: value %d (%.*s) is used before it is defined", at, operand.index,
                PS_STR(graph.values[operand.index].name));
  }
  return PS_OK;
}

// Built-in ops require contiguous indices; custom ops receive their stride.
ps_status check_indices(const Graph& graph, const Node& node, int32_t at) {
  const Operand& operand = node.inputs[at];
  if (operand.kind != OPERAND_VALUE || as_loaded(node.op)) return PS_OK;
  const Value& value = graph.values[operand.index];
  if (value.dtype != PS_I32 || value.rank != 1 || value.row_stride == 1) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "inputs[%d]: expected contiguous indices, got some %lld apart", at,
              ll(value.row_stride));
}

// positions, request_starts and page_tables must be the step's own, because only those were checked against the pages.
ps_status check_batch_inputs(const Graph& graph, const Node& node, int32_t at) {
  static const char* const names[] = {"positions", "request_starts", "page_tables"};
  for (int32_t i = 0; i < 3; ++i) {
    const int32_t expected = graph.inputs[INPUT_POSITIONS + i];
    if (node.inputs[at + i].index != expected) {
      return fail(PS_INVALID_ARGUMENT, "%s: expected the graph's input, value %d, got value %d", names[i], expected,
                  node.inputs[at + i].index);
    }
  }
  return PS_OK;
}

// A window wider than that of its page group would read freed pages.
ps_status check_window(const Graph& graph, int64_t group, int64_t window) {
  const int32_t group_window = graph.page_groups[group];
  if (group_window == 0 || (window > 0 && window <= group_window)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "window: expected 1 to %d, what page group %lld keeps, got %lld", group_window,
              ll(group), ll(window));
}

ps_status check_pages(const Graph& graph, const Node& node, const AttrValue* attrs) {
  if (appends_to_pages(node.op)) return check_batch_inputs(graph, node, kKvAppendPositions);
  if (is_gated_delta(node.op)) {
    PS_TRY(check_batch_inputs(graph, node, kGatedDeltaPositions));
    return check_window(graph, attrs[kGatedDeltaGroup].i, kStateWindow);
  }
  if (node.op == OP_SSM_SCAN) {
    PS_TRY(check_batch_inputs(graph, node, kSsmScanPositions));
    return check_window(graph, attrs[kSsmScanGroup].i, kStateWindow);
  }
  if (node.op == OP_PREFIX_LENGTHS) {
    PS_TRY(check_batch_inputs(graph, node, kPrefixPositions));
    return check_window(graph, attrs[kPrefixGroup].i, kStateWindow);
  }
  if (!reads_pages(node.op)) return PS_OK;
  PS_TRY(check_batch_inputs(graph, node, kAttentionPositions));
  if (node.op == OP_SHORT_CONV) return check_window(graph, attrs[kShortConvGroup].i, attrs[kShortConvWindow].i);
  return check_window(graph, attrs[kAttentionGroup].i, attrs[kAttentionWindow].i);
}

ps_status define_outputs(Graph* graph, Vec<uint8_t>* defined, const Node& node, int64_t index, const Spec* inferred) {
  for (int32_t i = 0; i < node.num_outputs; ++i) {
    const int32_t v = node.outputs[i];
    if (v < 0 || v >= graph->values.size()) return out_of_range("outputs", i, graph->values.size(), v);
    Value& value = graph->values[v];
    if (value.base >= 0)
      return fail(PS_INVALID_ARGUMENT, "outputs[%d]: expected a value of its own, got the view %d", i, v);
    if ((*defined)[v])
      return fail(PS_INVALID_ARGUMENT, "outputs[%d]: value %d (%.*s) is defined twice", i, v, PS_STR(value.name));
    const Spec stored = spec_of(*graph, Operand{OPERAND_VALUE, v});
    if (!same_type(stored, inferred[i])) {
      return fail(PS_INVALID_ARGUMENT, "outputs[%d]: inferred %s, the file says %s", i, describe(inferred[i]).text,
                  describe(stored).text);
    }
    (*defined)[v] = 1;
    value.producer = static_cast<int32_t>(index);
    value.bound = inferred[i].bound;
  }
  return PS_OK;
}

ps_status validate_node(Graph* graph, Vec<uint8_t>* defined, int64_t index) {
  Node& node = graph->nodes[index];
  const Signature& sig = signature(node.op);
  if (is_general(node.op)) return fail(PS_UNSUPPORTED, "an op of general networks, which a language model cannot have");
  Spec in[kMaxOperands] = {}, out[kMaxOutputs] = {};
  AttrValue attrs[kMaxAttrs] = {};
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    PS_TRY(check_operand(*graph, *defined, node.inputs[i], i));
    PS_TRY(check_indices(*graph, node, i));
    in[i] = spec_of(*graph, node.inputs[i]);
  }
  PS_TRY(check_operands(node.op, in, node.num_inputs));
  PS_TRY(bind_attrs(node.op, node.attrs, node.num_attrs, attrs));
  if (node.num_outputs != sig.num_outputs) {
    return fail(PS_INVALID_ARGUMENT, "outputs: expected %d, got %d", sig.num_outputs, node.num_outputs);
  }
  PS_TRY(infer_op(node.op, in, attrs, out));
  PS_TRY(check_pages(*graph, node, attrs));
  return define_outputs(graph, defined, node, index, out);
}

}  // namespace

ps_status bind_node_attrs(const Node& node, AttrValue* out) {
  return bind_attrs(node.op, node.attrs, node.num_attrs, out);
}

ps_status validate_nodes(Graph* graph) {
  Vec<uint8_t> defined;
  if (!defined.resize(graph->values.size())) return fail(PS_OUT_OF_MEMORY, "metadata: out of memory");
  for (int32_t input : graph->inputs) defined[input] = 1;
  for (int64_t i = 0; i < graph->nodes.size(); ++i) {
    const Node& node = graph->nodes[i];
    const ps_status status = validate_node(graph, &defined, i);
    if (status == PS_OK) continue;
    return prefix(status == PS_INVALID_ARGUMENT ? PS_INVALID_FILE : status, "nodes[%lld] (%s %.*s): ", ll(i),
                  op_name(node.op), PS_STR(node.name));
  }
  return PS_OK;
}

}  // namespace ps
