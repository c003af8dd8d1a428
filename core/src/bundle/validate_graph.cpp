// Validation of the header, values, states, inputs and output of a graph.
#include "bundle/validate.h"
#include "ops/layout.h"

namespace ps {
namespace {

constexpr int32_t kMaxVocab = 1 << 24;

long long ll(int64_t v) { return static_cast<long long>(v); }

Spec spec_of_value(const Value& v) {
  Spec spec{OPERAND_VALUE, v.dtype, v.rank, {}, 0, -1, v.bound};
  memcpy(spec.dims, v.dims, sizeof(spec.dims));
  return spec;
}

Spec logits_spec(const Graph& graph) {
  return Spec{OPERAND_VALUE, PS_F32, 2, {Dim{ROLE_ROWS, 1, 0}, constant(graph.vocab_size)}, 0, -1, constant(0)};
}

ps_status validate_header(const Graph& graph) {
  if (graph.vocab_size < 1 || graph.vocab_size > kMaxVocab) {
    return fail(PS_INVALID_FILE, "metadata.vocab_size: expected 1 to %d, got %d", kMaxVocab, graph.vocab_size);
  }
  if (graph.context_len < 1 || graph.context_len > kMaxContextLen) {
    return fail(PS_INVALID_FILE, "metadata.context_len: expected 1 to %d, got %d", kMaxContextLen, graph.context_len);
  }
  for (int32_t role = 0; role < NUM_ROLES; ++role) {
    if (graph.symbol_of[role] < 0)
      return fail(PS_INVALID_FILE, "metadata.symbols: expected T, B, P and R; %s is missing", kRoleNames[role]);
  }
  for (int64_t i = 0; i < graph.page_groups.size(); ++i) {
    if (graph.page_groups[i] < 0 || graph.page_groups[i] > kMaxContextLen) {
      return fail(PS_INVALID_FILE, "page_groups[%lld].window: expected 0 to %d, got %d", ll(i), kMaxContextLen,
                  graph.page_groups[i]);
    }
  }
  return PS_OK;
}

ps_status validate_states(const Graph& graph) {
  for (int64_t i = 0; i < graph.states.size(); ++i) {
    const State& s = graph.states[i];
    if (s.num_kv_heads < 1 || s.num_kv_heads > kMaxHeads) {
      return fail(PS_INVALID_FILE, "states[%lld].num_kv_heads: expected 1 to %d, got %d", ll(i), kMaxHeads,
                  s.num_kv_heads);
    }
    if (s.recurrent != 0 && s.recurrent != 1) {
      return fail(PS_INVALID_FILE, "states[%lld].recurrent: expected 0 or 1, got %d", ll(i), s.recurrent);
    }
    const int64_t most = s.recurrent ? kMaxStateElements / s.num_kv_heads : kMaxHeadDim;
    if (s.head_dim < 1 || s.head_dim > most) {
      return fail(PS_INVALID_FILE, "states[%lld].head_dim: expected 1 to %lld, got %d", ll(i), ll(most), s.head_dim);
    }
    if (s.latent_dim < 0 || s.latent_dim >= s.head_dim || (s.latent_dim && (s.num_kv_heads != 1 || s.recurrent))) {
      return fail(PS_INVALID_FILE,
                  "states[%lld].latent_dim: expected less than head_dim (%d), and 0 with %d heads, got %d", ll(i),
                  s.head_dim, s.num_kv_heads, s.latent_dim);
    }
    if (s.group < 0 || s.group >= graph.page_groups.size()) {
      return fail(PS_INVALID_FILE, "states[%lld].group: expected less than %lld, got %d", ll(i),
                  ll(graph.page_groups.size()), s.group);
    }
    for (int64_t j = 0; j < i; ++j) {  // layers of a page group share page tables, so their heads are equal
      const State& other = graph.states[j];
      if (other.group != s.group) continue;
      if (other.recurrent != s.recurrent) {
        return fail(PS_INVALID_FILE, "states[%lld].recurrent: expected %d, as states[%lld] of its group has, got %d",
                    ll(i), other.recurrent, ll(j), s.recurrent);
      }
      if (other.num_kv_heads != s.num_kv_heads || other.head_dim != s.head_dim) {
        return fail(PS_INVALID_FILE,
                    "states[%lld]: expected %d heads of %d as states[%lld] of its group has, got %d of %d", ll(i),
                    other.num_kv_heads, other.head_dim, ll(j), s.num_kv_heads, s.head_dim);
      }
      if (other.latent_dim != s.latent_dim) {
        return fail(PS_INVALID_FILE, "states[%lld].latent_dim: expected %d as states[%lld] of its group has, got %d",
                    ll(i), other.latent_dim, ll(j), s.latent_dim);
      }
      break;
    }
  }
  return PS_OK;
}

ps_status validate_view(Graph* graph, int64_t i) {
  Value& v = graph->values[i];
  if (v.base >= i) return fail(PS_INVALID_FILE, "values[%lld].base: expected a value before it, got %d", ll(i), v.base);
  const Value& base = graph->values[v.base];
  if (v.dtype != base.dtype)
    return fail(PS_INVALID_FILE, "values[%lld].dtype: expected %s, that of its base, got %d", ll(i),
                dtype_name(base.dtype), v.dtype);
  if (!equal(v.dims[0], base.dims[0])) {
    return fail(PS_INVALID_FILE, "values[%lld].shape: expected as many rows as its base, %s, got %s", ll(i),
                describe(spec_of_value(base)).text, describe(spec_of_value(v)).text);
  }
  if (v.offset < 0 || v.offset > base.row_elements || v.row_elements > base.row_elements - v.offset) {
    return fail(PS_INVALID_FILE,
                "values[%lld].offset: expected %lld elements within the %lld of its base's rows, got them at %lld",
                ll(i), ll(v.row_elements), ll(base.row_elements), ll(v.offset));
  }
  v.root = base.root;
  v.root_offset = base.root_offset + v.offset;
  v.row_stride = base.row_stride;
  return PS_OK;
}

ps_status validate_value(Graph* graph, int64_t i, bool is_page_tables) {
  Value& v = graph->values[i];
  if (v.dtype != PS_F32 && v.dtype != PS_I32) {
    return fail(PS_INVALID_FILE, "values[%lld].dtype: expected f32 or i32, got %s", ll(i),
                dtype_name(v.dtype) ? dtype_name(v.dtype) : "an unknown type");
  }
  if (v.rank < 1) return fail(PS_INVALID_FILE, "values[%lld].shape: expected 1 to 4 dims, got none", ll(i));
  if (v.base < -1) return fail(PS_INVALID_FILE, "values[%lld].base: expected -1 or a value, got %d", ll(i), v.base);
  v.row_elements = 1;
  for (int32_t d = 1; d < v.rank && !is_page_tables; ++d) {
    if (!is_constant(v.dims[d]) || v.dims[d].offset < 1) {
      return fail(PS_INVALID_FILE, "values[%lld].shape[%d]: expected a constant of at least 1, got %s", ll(i), d,
                  describe(spec_of_value(v)).text);
    }
    if (!checked_mul(v.row_elements, v.dims[d].offset, &v.row_elements) || v.row_elements > kMaxDim) {
      return fail(PS_INVALID_FILE, "values[%lld].shape: expected rows of at most 2^31 elements, got %s", ll(i),
                  describe(spec_of_value(v)).text);
    }
  }
  v.bound = constant(0);
  v.producer = -1;
  v.root = static_cast<int32_t>(i);
  v.root_offset = 0;
  v.row_stride = v.row_elements;
  if (v.base >= 0 && is_page_tables)
    return fail(PS_INVALID_FILE, "values[%lld].base: expected -1 for the page tables, got %d", ll(i), v.base);
  if (v.base < 0 && v.offset != 0)
    return fail(PS_INVALID_FILE, "values[%lld].offset: expected 0 without a base, got %lld", ll(i), ll(v.offset));
  return v.base < 0 ? PS_OK : validate_view(graph, i);
}

// The inputs' exact types, which the runtime fills in.  Token ids and positions have bounds.
ps_status validate_inputs(Graph* graph) {
  static const char* const names[NUM_INPUTS] = {"token_ids", "positions", "request_starts", "page_tables",
                                                "output_rows"};
  const Dim t{ROLE_TOKENS, 1, 0}, b{ROLE_REQUESTS, 1, 0}, b1{ROLE_REQUESTS, 1, 1}, p{ROLE_PAGES, 1, 0},
      r{ROLE_ROWS, 1, 0};
  const Dim groups = constant(graph->page_groups.size());
  const Spec expected[NUM_INPUTS] = {{OPERAND_VALUE, PS_I32, 1, {t}, 0, -1, constant(0)},
                                     {OPERAND_VALUE, PS_I32, 1, {t}, 0, -1, constant(0)},
                                     {OPERAND_VALUE, PS_I32, 1, {b1}, 0, -1, constant(0)},
                                     {OPERAND_VALUE, PS_I32, 3, {groups, b, p}, 0, -1, constant(0)},
                                     {OPERAND_VALUE, PS_I32, 1, {r}, 0, -1, constant(0)}};
  const Dim bounds[NUM_INPUTS] = {constant(graph->vocab_size), constant(graph->context_len), constant(0), constant(0),
                                  t};
  for (int32_t i = 0; i < NUM_INPUTS; ++i) {
    Value& v = graph->values[graph->inputs[i]];
    if (v.base >= 0) return fail(PS_INVALID_FILE, "inputs[%d]: expected a value of its own, got a view", i);
    for (int32_t j = 0; j < i; ++j) {
      if (graph->inputs[j] == graph->inputs[i])
        return fail(PS_INVALID_FILE, "inputs[%d]: value %d is an input already", i, graph->inputs[i]);
    }
    if (!same_type(spec_of_value(v), expected[i])) {
      return fail(PS_INVALID_FILE, "inputs[%d] (%s): expected %s, got %s", i, names[i], describe(expected[i]).text,
                  describe(spec_of_value(v)).text);
    }
    v.bound = bounds[i];
  }
  return PS_OK;
}

// The argmax or topk node over logits whose ids are the output; -1: the output is another node's.
int32_t find_tail(const Graph& graph) {
  const int32_t producer = graph.values[graph.output].producer;
  if (producer < 0) return -1;
  const Node& node = graph.nodes[producer];
  const bool is_tail = node.op == OP_ARGMAX || node.op == OP_TOPK;
  if (!is_tail || node.outputs[node.num_outputs - 1] != graph.output) return -1;
  return same_type(spec_of(graph, node.inputs[0]), logits_spec(graph)) ? producer : -1;
}

// A pipeline stage other than the last ends in rows for the next one, and has no logits.
bool ends_in_send(const Graph& graph) {
  const Value& v = graph.values[graph.output];
  return v.base < 0 && v.producer >= 0 && graph.nodes[v.producer].op == OP_SEND;
}

ps_status validate_output(Graph* g) {
  Graph& graph = *g;
  if (graph.output < 0 || graph.output >= graph.values.size()) {
    return fail(PS_INVALID_FILE, "metadata.output: expected a value below %lld, got %d", ll(graph.values.size()),
                graph.output);
  }
  const Value& v = graph.values[graph.output];
  const Spec expected = logits_spec(graph);
  if (ends_in_send(graph) && !same_type(spec_of_value(v), expected)) {
    graph.output = -1;
    return PS_OK;
  }
  graph.tail = find_tail(graph);
  graph.tail_k = graph.tail < 0 ? 0 : static_cast<int32_t>(v.row_elements);
  if (graph.tail < 0 && !same_type(spec_of_value(v), expected)) {
    return fail(PS_INVALID_FILE, "metadata.output: expected %s, or the ids that argmax or topk finds in them, got %s",
                describe(expected).text, describe(spec_of_value(v)).text);
  }
  if (v.base >= 0 || v.producer < 0)
    return fail(PS_INVALID_FILE, "metadata.output: expected the result of a node, got a view or an input");
  return PS_OK;
}

// Finds whether attention is bidirectional (a token sees later tokens of its request, so all must be in one step), and
// how many ranks share a context.  Only context_attention reads pages that are split over ranks.
ps_status find_attention_kinds(Graph* graph) {
  uint64_t dealt = 0;
  for (const State& state : graph->states) {
    if (state.recurrent) graph->whole_groups |= uint64_t{1} << state.group;
  }
  for (int64_t n = 0; n < graph->nodes.size(); ++n) {
    const Node& node = graph->nodes[n];
    AttrValue attrs[kMaxAttrs] = {};
    if (node.op == OP_PREFIX_LENGTHS) {
      PS_TRY(bind_node_attrs(node, attrs));
      if (graph->prefix_group >= 0 || attrs[kPrefixToken].i >= graph->vocab_size)
        return fail(PS_INVALID_FILE, "metadata.nodes[%lld]: expected one prefix_lengths, of a token of the vocabulary",
                    ll(n));
      graph->prefix_group = static_cast<int32_t>(attrs[kPrefixGroup].i);
      graph->prefix_token = static_cast<int32_t>(attrs[kPrefixToken].i);
    }
    if (!reads_pages(node.op)) continue;
    PS_TRY(bind_node_attrs(node, attrs));
    const bool in_prefix = node.op == OP_RELATIVE_ATTENTION && !equal(attrs[kRelativeAttentionKeys].s, "all");
    graph->bidirectional |= is_attention(node.op) && attrs[kAttentionCausal].i == 0 && !in_prefix;
    const uint64_t group = uint64_t{1} << graph->states[node.inputs[kAttentionState].index].group;
    if (node.op != OP_CONTEXT_ATTENTION) {
      graph->whole_groups |= group;
      continue;
    }
    const int64_t world = attrs[world_at(OP_CONTEXT_ATTENTION)].i;
    if (dealt && world != graph->context_world) {
      return fail(PS_INVALID_FILE,
                  "metadata.nodes[%lld]: expected attention over the pages of %d ranks, as before it, got %lld", ll(n),
                  graph->context_world, ll(world));
    }
    graph->context_world = static_cast<int32_t>(world);
    dealt |= group;
  }
  if (dealt & graph->whole_groups)
    return fail(PS_INVALID_FILE,
                "metadata: expected page groups that only context_attention reads, or no context_attention");
  return PS_OK;
}

// Finds the input of the only gather_rows over the step's output rows: contiguous float rows, one for each token.
int32_t find_hidden(const Graph& graph) {
  int32_t hidden = -1;
  for (const Node& node : graph.nodes) {
    if (node.op != OP_GATHER_ROWS || node.inputs[kGatherRowsRows].index != graph.inputs[INPUT_OUTPUT_ROWS]) continue;
    if (hidden >= 0) return -1;
    hidden = node.inputs[0].index;
  }
  if (hidden < 0) return -1;
  const Value& v = graph.values[hidden];
  const bool plain = v.dtype == PS_F32 && v.rank == 2 && v.root == hidden && v.producer >= 0 &&
                     equal(v.dims[0], Dim{ROLE_TOKENS, 1, 0});
  return plain ? hidden : -1;
}

}  // namespace

Spec spec_of(const Graph& graph, const Operand& operand) {
  Spec spec{operand.kind, 0, 0, {}, 0, -1, constant(0)};
  if (operand.kind == OPERAND_VALUE) return spec_of_value(graph.values[operand.index]);
  if (operand.kind == OPERAND_WEIGHT) {
    const Weight& w = graph.weights[operand.index];
    spec.rank = 2;
    spec.dims[0] = constant(w.rows);
    spec.dims[1] = constant(w.cols);
    spec.layout = w.layout;
  }
  if (operand.kind == OPERAND_STATE) {
    const State& s = graph.states[operand.index];
    spec.rank = s.latent_dim ? 4 : 3;
    spec.dims[0] = constant(1);  // pages: the program chooses the number
    spec.dims[1] = constant(s.num_kv_heads);
    spec.dims[2] = constant(s.head_dim);
    spec.dims[3] = constant(s.latent_dim);
    spec.group = s.group;
    spec.layout = s.recurrent ? kStatePages : 0;
  }
  return spec;
}

ps_status validate_graph(Graph* graph) {
  PS_TRY(validate_header(*graph));
  PS_TRY(validate_states(*graph));
  for (int32_t i = 0; i < NUM_INPUTS; ++i) {
    if (graph->inputs[i] < 0 || graph->inputs[i] >= graph->values.size()) {
      return fail(PS_INVALID_FILE, "inputs[%d]: expected a value below %lld, got %d", i, ll(graph->values.size()),
                  graph->inputs[i]);
    }
  }
  for (int64_t i = 0; i < graph->values.size(); ++i)
    PS_TRY(validate_value(graph, i, i == graph->inputs[INPUT_PAGE_TABLES]));
  for (int64_t i = 0; i < graph->values.size(); ++i) {
    if (graph->values[i].base == graph->inputs[INPUT_PAGE_TABLES]) {
      return fail(PS_INVALID_FILE, "values[%lld].base: the page tables have no views", ll(i));
    }
  }
  PS_TRY(validate_inputs(graph));
  PS_TRY(validate_nodes(graph));
  graph->hidden = find_hidden(*graph);
  PS_TRY(find_attention_kinds(graph));
  return validate_output(graph);
}

}  // namespace ps
