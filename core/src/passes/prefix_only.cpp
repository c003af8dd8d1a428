// Selects the prefix-only nodes.
#include "passes/prefix_only.h"

#include "bundle/validate.h"

namespace ps {
namespace {

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "nodes: out of memory"); }

// For each state: whether something outside the prefix reads it.
ps_status find_read_states(const Graph& graph, Vec<uint8_t>* read) {
  if (!read->resize(graph.states.size())) return no_memory();
  for (const Node& node : graph.nodes) {
    AttrValue attrs[kMaxAttrs] = {};
    PS_TRY(bind_node_attrs(node, attrs));
    const bool in_prefix = appends_to_pages(node.op) ||
                           (node.op == OP_RELATIVE_ATTENTION && equal(attrs[kRelativeAttentionKeys].s, "prefix"));
    for (int32_t i = 0; i < node.num_inputs && !in_prefix; ++i)
      if (node.inputs[i].kind == OPERAND_STATE) (*read)[node.inputs[i].index] = 1;
  }
  return PS_OK;
}

}  // namespace

ps_status mark_prefix_only(Graph* g) {
  Graph& graph = *g;
  if (graph.prefix_token < 0) return PS_OK;
  Vec<uint8_t> read, needed;  // states, and the roots of values
  PS_TRY(find_read_states(graph, &read));
  if (!needed.resize(graph.values.size())) return no_memory();
  if (graph.output >= 0) needed[graph.values[graph.output].root] = 1;
  for (int64_t n = graph.nodes.size() - 1; n >= 0; --n) {
    Node& node = graph.nodes[n];
    bool only = node.num_outputs > 0 ? !keeps_state(node.op)
                                     : appends_to_pages(node.op) && !read[node.inputs[kKvAppendState].index];
    for (int32_t i = 0; i < node.num_outputs; ++i) only &= !needed[graph.values[node.outputs[i]].root];
    node.prefix_only = only;
    for (int32_t i = 0; i < node.num_inputs && !only; ++i)
      if (node.inputs[i].kind == OPERAND_VALUE) needed[graph.values[node.inputs[i].index].root] = 1;
  }
  return PS_OK;
}

}  // namespace ps
