// Selects and orders wanted-only nodes, and finds their inputs.
#include "passes/wanted_rows.h"

#include <algorithm>

#include "bundle/validate.h"
#include "ops/loaded.h"

namespace ps {
namespace {

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "nodes: out of memory"); }

// Whether row i of the outputs needs only row i of the inputs.
bool is_row_wise(const Node& node) {
  const LoadedOp* loaded = as_loaded(node.op);
  if (!loaded) return op_row(node.op).row_wise;
  return loaded->op.row_inputs != 0 && loaded->phase.reads_all == 0;
}

// Returns true for causal attention and for a convolution over pages: a row needs only its own position from the step.
bool reads_own_past(const Graph& graph, const Node& node) {
  if (!reads_pages(node.op)) return false;
  AttrValue attrs[kMaxAttrs] = {};
  const int32_t inputs[] = {INPUT_POSITIONS, INPUT_REQUEST_STARTS, INPUT_PAGE_TABLES};
  for (int32_t i = 0; i < 3; ++i) {
    if (node.inputs[kAttentionPositions + i].index != graph.inputs[inputs[i]]) return false;
  }
  if (node.op == OP_SHORT_CONV) return true;
  return bind_node_attrs(node, attrs) == PS_OK && attrs[kAttentionCausal].i != 0;
}

bool is_rows_of_tokens(const Value& v) { return v.dtype == PS_F32 && equal(v.dims[0], Dim{ROLE_TOKENS, 1, 0}); }

bool can_be_wanted_only(const Graph& graph, const Node& node) {
  const bool attends = reads_own_past(graph, node);
  if (!attends && !is_row_wise(node)) return false;
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    const bool of_batch = attends && i >= kAttentionPositions && i < kAttentionPositions + 3;
    if (node.inputs[i].kind != OPERAND_VALUE || of_batch) continue;
    const Value& v = graph.values[node.inputs[i].index];
    if (!is_rows_of_tokens(v) || !is_rows_of_tokens(graph.values[v.root])) return false;
  }
  for (int32_t i = 0; i < node.num_outputs; ++i) {
    if (!is_rows_of_tokens(graph.values[node.outputs[i]])) return false;
  }
  return node.num_outputs > 0;
}

// The kinds of nodes that read a root, or a view of it.
struct Readers {
  bool wanted_only, other, behind;  // behind: after the gather of the output rows
};

int64_t find_gather(const Graph& graph) {
  for (int64_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.op == OP_GATHER_ROWS && node.inputs[kGatherRowsRows].index == graph.inputs[INPUT_OUTPUT_ROWS]) return n;
  }
  return -1;
}

// Whether only the gather reads the output rows: wanted-only nodes renumber them, and other readers would see wrong
// tokens.
bool is_only_reader(const Graph& graph, int64_t gather) {
  for (int64_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    for (int32_t i = 0; n != gather && i < node.num_inputs; ++i) {
      if (node.inputs[i].kind != OPERAND_VALUE) continue;
      if (graph.values[node.inputs[i].index].root == graph.inputs[INPUT_OUTPUT_ROWS]) return false;
    }
  }
  return true;
}

void note_inputs(const Graph& graph, const Node& node, Readers reader, Vec<Readers>* readers) {
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    if (node.inputs[i].kind != OPERAND_VALUE) continue;
    Readers& root_readers = (*readers)[graph.values[node.inputs[i].index].root];
    root_readers.wanted_only |= reader.wanted_only;
    root_readers.other |= reader.other;
    root_readers.behind |= reader.behind;
  }
}

// Returns true if the node sends the hidden rows to the next stage, only in steps that want all of them.
bool sends_hidden(const Graph& graph, const Node& node) {
  return node.op == OP_SEND && graph.values[node.inputs[0].index].root == graph.hidden;
}

// Checks that a state that a wanted-only node reads is written before it in the program's order too.
ps_status check_order(const Graph& graph, bool* sound) {
  Vec<uint8_t> written_later;  // by a node after n
  if (!written_later.resize(graph.states.size())) return no_memory();
  *sound = true;
  for (int64_t n = graph.nodes.size() - 1; n >= 0; --n) {
    const Node& node = graph.nodes[n];
    if (appends_to_pages(node.op)) written_later[node.inputs[kKvAppendState].index] = 1;
    if (node.wanted_only && reads_pages(node.op) && written_later[node.inputs[kAttentionState].index]) *sound = false;
  }
  return PS_OK;
}

void run_move(const Call& c, int64_t begin, int64_t end, int32_t) {
  for (int64_t i = begin; i < end; ++i) {
    const Tensor& t = c.in[i];
    const size_t bytes = static_cast<size_t>(t.dims[1]) * sizeof(float);
    for (int64_t r = 0; r < t.dims[0]; ++r) {
      const int64_t from = c.token_request[r];
      if (from != r) memcpy(t.data + r * t.row_stride * 4, t.data + from * t.row_stride * 4, bytes);
    }
  }
}

int64_t moved(const Call& c) {
  int64_t count = 0;
  while (count < kMaxOperands && c.in[count].data) ++count;
  return c.in[0].dims[0] < c.out[0].dims[0] ? count : 0;
}

}  // namespace

const Phase kMoveWanted = {.split = SPLIT_ITEMS, .items = moved, .run = run_move};

WantedSources find_sources(const Graph& graph) {
  WantedSources out{{}, 0};
  for (const Node& node : graph.nodes) {
    for (int32_t i = 0; node.wanted_only && i < node.num_inputs; ++i) {
      if (node.inputs[i].kind != OPERAND_VALUE) continue;
      const Value& v = graph.values[node.inputs[i].index];
      const int32_t producer = graph.values[v.root].producer;
      if (producer < 0 || graph.nodes[producer].wanted_only) continue;
      const WantedSource source{v.root, v.root_offset, v.root_offset + v.row_elements};
      WantedSource* same = std::find_if(out.items, out.items + out.count,
                                        [&](const WantedSource& item) { return item.root == source.root; });
      if (same < out.items + out.count) {
        *same = WantedSource{source.root, std::min(same->begin, source.begin), std::max(same->end, source.end)};
      } else if (out.count == kMaxOperands) {
        out.count = -1;
        return out;
      } else {
        out.items[out.count++] = source;
      }
    }
  }
  return out;
}

ps_status mark_wanted_only(Graph* g) {
  Graph& graph = *g;
  const int64_t gather = find_gather(graph);
  if (graph.hidden < 0 || gather < 0 || !is_only_reader(graph, gather)) return PS_OK;
  Vec<Readers> readers;
  if (!readers.resize(graph.values.size())) return no_memory();
  for (int64_t n = graph.nodes.size() - 1; n >= 0; --n) {
    Node& node = graph.nodes[n];
    bool is_read = false, wanted_only = n < gather && can_be_wanted_only(graph, node);
    for (int32_t i = 0; i < node.num_outputs; ++i) {
      const Readers& output_readers = readers[node.outputs[i]];
      is_read |= output_readers.wanted_only;
      wanted_only &= !output_readers.other && !output_readers.behind;
    }
    node.wanted_only = wanted_only && is_read;
    if (sends_hidden(graph, node)) continue;
    note_inputs(graph, node, Readers{node.wanted_only || n == gather, !node.wanted_only && n<gather, n> gather},
                &readers);
  }
  const WantedSources sources = find_sources(graph);
  bool sound = true;
  PS_TRY(check_order(graph, &sound));
  sound &= sources.count >= 0;
  for (int32_t i = 0; sound && i < sources.count; ++i) sound = !readers[sources.items[i].root].behind;
  if (sound) return PS_OK;
  for (Node& node : graph.nodes) node.wanted_only = false;
  return PS_OK;
}

ps_status order_nodes(const Graph& graph, Vec<int32_t>* order) {
  const int64_t count = graph.nodes.size(), gather = find_gather(graph);
  for (const bool wanted_only : {false, true}) {
    for (int64_t n = 0; n < gather; ++n) {
      if (graph.nodes[n].wanted_only == wanted_only && !order->push(static_cast<int32_t>(n))) return no_memory();
    }
  }
  for (int64_t n = gather < 0 ? 0 : gather; n < count; ++n) {
    if (!order->push(static_cast<int32_t>(n))) return no_memory();
  }
  return PS_OK;
}

}  // namespace ps
