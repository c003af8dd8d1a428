// Validation of a general network: its structure, and its shapes at the example sizes of the file.
#include "bundle/network_shapes.h"
#include "bundle/validate.h"
#include "ops/layout.h"

namespace ps {
namespace {

long long ll(int64_t v) { return static_cast<long long>(v); }

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "metadata: out of memory"); }

ps_status check_empty(const char* name, int64_t found, int64_t expected) {
  if (found == expected) return PS_OK;
  return fail(PS_INVALID_FILE, "metadata.%s: expected %lld in a general network, got %lld", name, ll(expected),
              ll(found));
}

ps_status validate_header(const Graph& graph) {
  PS_TRY(check_empty("vocab_size", graph.vocab_size, 0));
  PS_TRY(check_empty("context_len", graph.context_len, 0));
  PS_TRY(check_empty("states", graph.states.size(), 0));
  PS_TRY(check_empty("page_groups", graph.page_groups.size(), 0));
  PS_TRY(check_empty("output", graph.output, -1));
  if (graph.network_outputs.size() < 1) return fail(PS_INVALID_FILE, "metadata.outputs: expected 1 to 64, got none");
  return PS_OK;
}

int32_t rows_dtype(int32_t layout) {
  switch (layout) {
    case PS_ROWS_F32: return PS_F32;
    case PS_ROWS_F16: return PS_F16;
    case PS_ROWS_BF16: return PS_BF16;
    case PS_ROWS_I32: return PS_I32;
    case PS_ROWS_I64: return PS_I64;
    case PS_ROWS_I8: return PS_I8;
    case PS_ROWS_U8: return PS_U8;
    case PS_ROWS_BOOL: return PS_BOOL;
    default: return 0;
  }
}

// A constant is one row, and the sizes of its shape must give as many elements; an empty one has one column.
ps_status validate_constant(const Graph& graph, int64_t index) {
  const Value& value = graph.values[index];
  if (value.weight < -1 || value.weight >= graph.weights.size()) {
    return fail(PS_INVALID_FILE, "values[%lld].weight: expected less than %lld, got %d", ll(index),
                ll(graph.weights.size()), value.weight);
  }
  if (value.weight < 0) return PS_OK;
  const Weight& weight = graph.weights[value.weight];
  if (rows_dtype(weight.layout) != value.dtype) {
    return fail(PS_INVALID_FILE, "values[%lld].dtype: expected that of its constant, of layout %s, got %s", ll(index),
                layout_name(weight.layout), dtype_name(value.dtype));
  }
  int64_t elements = 1;
  for (int32_t d = 0; d < weight.rank; ++d) {
    const int64_t size = weight.shape[d];
    if (size < 0 || size > kMaxDim || !checked_mul(elements, size, &elements)) {
      return fail(PS_INVALID_FILE, "weights[%d].shape[%d]: expected 0 to 2^31, got %lld", value.weight, d, ll(size));
    }
  }
  if (weight.rows == 1 && weight.cols == (elements ? elements : 1)) return PS_OK;
  return fail(PS_INVALID_FILE, "weights[%d].shape: expected one row of %lld elements, got [%lld, %lld]", value.weight,
              ll(elements), ll(weight.rows), ll(weight.cols));
}

ps_status validate_values(Graph* graph) {
  for (int64_t i = 0; i < graph->values.size(); ++i) {
    Value& v = graph->values[i];
    if (!dtype_name(v.dtype))
      return fail(PS_INVALID_FILE, "values[%lld].dtype: expected 1 to 8, got %d", ll(i), v.dtype);
    if (v.base != -1) return fail(PS_INVALID_FILE, "values[%lld].base: expected -1, got %d", ll(i), v.base);
    if (v.offset) return fail(PS_INVALID_FILE, "values[%lld].offset: expected 0, got %lld", ll(i), ll(v.offset));
    v.root = static_cast<int32_t>(i);
    v.producer = -1;
    v.bound = constant(0);
    PS_TRY(validate_constant(*graph, i));
  }
  return PS_OK;
}

ps_status check_index(const Graph& graph, const char* what, int64_t at, int32_t value) {
  if (value >= 0 && value < graph.values.size()) return PS_OK;
  return fail(PS_INVALID_FILE, "%s[%lld]: expected a value below %lld, got %d", what, ll(at), ll(graph.values.size()),
              value);
}

ps_status define_inputs(const Graph& graph, Vec<uint8_t>* defined) {
  for (int64_t i = 0; i < graph.values.size(); ++i) (*defined)[i] = graph.values[i].weight >= 0;
  for (int64_t i = 0; i < graph.network_inputs.size(); ++i) {
    const int32_t v = graph.network_inputs[i];
    PS_TRY(check_index(graph, "inputs", i, v));
    if ((*defined)[v]) return fail(PS_INVALID_FILE, "inputs[%lld]: value %d is a constant or another input", ll(i), v);
    (*defined)[v] = 1;
  }
  return PS_OK;
}

ps_status check_operand(const Graph& graph, const Vec<uint8_t>& defined, const Operand& operand, int32_t at) {
  const int64_t limits[] = {1, graph.values.size(), graph.weights.size()};
  if (operand.kind < OPERAND_NONE || operand.kind > OPERAND_WEIGHT)
    return fail(PS_INVALID_FILE, "inputs[%d].kind: expected 0 to 2, got %d", at, operand.kind);
  if (operand.kind == OPERAND_NONE) return PS_OK;
  if (operand.index < 0 || operand.index >= limits[operand.kind]) {
    return fail(PS_INVALID_FILE, "inputs[%d]: expected an index below %lld, got %d", at, ll(limits[operand.kind]),
                operand.index);
  }
  if (operand.kind == OPERAND_WEIGHT || defined[operand.index]) return PS_OK;
  return fail(PS_INVALID_FILE, "inputs[%d]: value %d (%.*s) is used before it is defined", at, operand.index,
              PS_STR(graph.values[operand.index].name));
}

constexpr uint8_t kDefined = 1, kRounded = 2;  // kRounded: defined, and within the range of int8 convolutions

bool moves_values(int32_t op) {
  return op == OP_MAX_POOL || op == OP_CONCAT || op == OP_RESHAPE || op == OP_PERMUTE || op == OP_SLICE;
}

// i8 of -127 to 127 or u8 of 0 to 127: what conv_int8 and requantize write, and ops that only move their results.
bool gives_rounded(const Vec<uint8_t>& defined, const Node& node) {
  if (node.op == OP_CONV_INT8 || node.op == OP_REQUANTIZE) return true;
  if (!moves_values(node.op)) return false;
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    const Operand& operand = node.inputs[i];
    if (operand.kind == OPERAND_VALUE && defined[operand.index] != kRounded) return false;
  }
  return true;
}

// Kernels of int8 convolutions multiply pairs in 16 bits: other integers would overflow differently at each level.
ps_status check_rounded(const Graph& graph, const Vec<uint8_t>& defined, const Node& node) {
  if (node.op != OP_CONV_INT8 && node.op != OP_REQUANTIZE) return PS_OK;
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    const Operand& operand = node.inputs[i];
    if (operand.kind != OPERAND_VALUE || graph.values[operand.index].dtype == PS_F32) continue;
    if (defined[operand.index] == kRounded) continue;
    return fail(PS_INVALID_FILE, "inputs[%d]: expected int8 from conv_int8 or requantize, got value %d (%.*s)", i,
                operand.index, PS_STR(graph.values[operand.index].name));
  }
  return PS_OK;
}

ps_status validate_node(Graph* graph, Vec<uint8_t>* defined, int32_t index) {
  const Node& node = graph->nodes[index];
  if (!is_network_op(node.op)) return fail(PS_UNSUPPORTED, "an op that only language models have");
  Spec in[kMaxOperands] = {};
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    PS_TRY(check_operand(*graph, *defined, node.inputs[i], i));
    in[i].kind = node.inputs[i].kind;
  }
  PS_TRY(check_operands(node.op, in, node.num_inputs));
  PS_TRY(check_rounded(*graph, *defined, node));
  const uint8_t kind = gives_rounded(*defined, node) ? kRounded : kDefined;
  const Signature& sig = signature(node.op);
  if (node.num_outputs != sig.num_outputs)
    return fail(PS_INVALID_FILE, "outputs: expected %d, got %d", sig.num_outputs, node.num_outputs);
  for (int32_t i = 0; i < node.num_outputs; ++i) {
    const int32_t v = node.outputs[i];
    PS_TRY(check_index(*graph, "outputs", i, v));
    if ((*defined)[v])
      return fail(PS_INVALID_FILE, "outputs[%d]: value %d (%.*s) is defined twice", i, v,
                  PS_STR(graph->values[v].name));
    (*defined)[v] = kind;
    graph->values[v].producer = index;
  }
  // A reshape moves nothing: its result shares the memory of its input.
  if (node.op == OP_RESHAPE) graph->values[node.outputs[0]].root = graph->values[node.inputs[0].index].root;
  return PS_OK;
}

// Checks that all shapes can be inferred, and that the inputs determine all sizes.
ps_status check_example(const Graph& graph) {
  const NetworkSizes sizes = example_sizes(graph);
  Vec<Spec> specs;
  PS_TRY(infer_network(graph, sizes, &specs));
  Vec<InputDims> inputs;
  uint64_t used = 0;
  for (int32_t v : graph.network_inputs) {
    used |= sizes_used(graph.values[v].sizes, sizes.names());
    InputDims dims{specs[v].rank, {}};
    for (int32_t d = 0; d < dims.rank; ++d) dims.dims[d] = specs[v].dims[d].offset;
    if (!inputs.push(dims)) return no_memory();
  }
  for (int32_t i = 0; i < sizes.count; ++i) {
    if (used >> i & 1) continue;
    return fail(PS_INVALID_FILE, "symbols[%d] (%.*s): expected a size of an input", i, PS_STR(graph.symbols[i].name));
  }
  NetworkSizes solved;
  return solve_sizes(graph, inputs.data(), &solved);
}

ps_status as_file_error(ps_status status) { return status == PS_INVALID_ARGUMENT ? PS_INVALID_FILE : status; }

}  // namespace

ps_status validate_network(Graph* graph) {
  PS_TRY(validate_header(*graph));
  PS_TRY(validate_values(graph));
  Vec<uint8_t> defined;
  if (!defined.resize(graph->values.size())) return no_memory();
  PS_TRY(define_inputs(*graph, &defined));
  for (int32_t i = 0; i < graph->nodes.size(); ++i) {
    const ps_status status = validate_node(graph, &defined, i);
    if (status == PS_OK) continue;
    const Node& node = graph->nodes[i];
    return prefix(as_file_error(status), "nodes[%d] (%s %.*s): ", i, op_name(node.op), PS_STR(node.name));
  }
  Vec<uint8_t> listed;
  if (!listed.resize(graph->values.size())) return no_memory();
  for (int64_t i = 0; i < graph->network_outputs.size(); ++i) {
    const int32_t v = graph->network_outputs[i];
    PS_TRY(check_index(*graph, "outputs", i, v));
    if (!defined[v]) return fail(PS_INVALID_FILE, "outputs[%lld]: value %d is not defined", ll(i), v);
    if (listed[v])
      return fail(PS_INVALID_FILE, "outputs[%lld]: value %d (%.*s) is listed twice", ll(i), v,
                  PS_STR(graph->values[v].name));
    listed[v] = 1;
  }
  return as_file_error(check_example(*graph));
}

}  // namespace ps
