// The shapes of general networks.  Files and callers are not trusted, so everything is checked again here.
#include "bundle/network_shapes.h"

#include "bundle/validate.h"
#include "ops/layout.h"
#include "ops/loaded.h"

namespace ps {
namespace {

long long ll(int64_t v) { return static_cast<long long>(v); }

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "network: out of memory"); }

// Dims within the limits, and a number of elements that does not overflow.
ps_status check_spec(const Spec& spec) {
  if (spec.rank < 0 || spec.rank > kMaxRank)
    return fail(PS_INVALID_ARGUMENT, "expected 0 to %d dims, got %d", kMaxRank, spec.rank);
  int64_t elements = 1;
  bool is_sound = true, is_empty = false;
  for (int32_t d = 0; d < spec.rank && is_sound; ++d) {
    const int64_t size = spec.dims[d].offset;
    is_sound = is_constant(spec.dims[d]) && size >= 0 && size <= kMaxDim;
    is_empty |= size == 0;
    if (is_sound && size) is_sound = checked_mul(elements, size, &elements) && elements <= kMaxElements;
  }
  if (is_sound) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "expected dims of 0 to 2^31 and at most 2^40 elements, got %s", describe(spec).text);
}

ps_status read_sizes(const Value& value, const NetworkSizes& sizes, Spec* out) {
  int64_t dims[kMaxListLen];
  int32_t count;
  *out = Spec{OPERAND_VALUE, value.dtype, 0, {}, 0, -1, constant(0)};
  PS_TRY(evaluate_sizes(value.sizes, sizes.names(), dims, &count));
  if (count > kMaxRank) return fail(PS_INVALID_ARGUMENT, "expected at most %d dims, got %d", kMaxRank, count);
  out->rank = count;
  for (int32_t d = 0; d < count; ++d) out->dims[d] = constant(dims[d]);
  return check_spec(*out);
}

Spec spec_of_constant(const Graph& graph, const Value& value) {
  const Weight& weight = graph.weights[value.weight];
  Spec spec{OPERAND_VALUE, value.dtype, weight.rank, {}, 0, -1, constant(0)};
  for (int32_t d = 0; d < weight.rank; ++d) spec.dims[d] = constant(weight.shape[d]);
  return spec;
}

// The ops of language models count rows in 32 bits and expect rows that are not empty.
ps_status check_rows(const Spec& spec, Str name) {
  if (spec.kind != OPERAND_VALUE) return PS_OK;
  int64_t row = 1;
  for (int32_t d = 1; d < spec.rank; ++d) row *= spec.dims[d].offset;
  if (spec.rank >= 1 && spec.rank <= 4 && spec.dims[0].offset <= INT32_MAX && row >= 1 && row <= kMaxDim) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%.*s: expected 1 to 4 dims, rows that are not empty and less than 2^31, got %s",
              PS_STR(name), describe(spec).text);
}

ps_status check_outputs(const Graph& graph, const Node& node, const Spec* out, Vec<Spec>* specs) {
  for (int32_t i = 0; i < node.num_outputs; ++i) {
    ps_status status = check_spec(out[i]);
    if (status == PS_OK && !is_general(node.op)) status = check_rows(out[i], Str{"rows", 4});
    const int32_t dtype = graph.values[node.outputs[i]].dtype;
    if (status == PS_OK && out[i].dtype != dtype)
      status = fail(PS_INVALID_ARGUMENT, "inferred %s, the file says %s", describe(out[i]).text, dtype_name(dtype));
    if (status != PS_OK) return prefix(status, "outputs[%d]: ", i);
    Spec& spec = (*specs)[node.outputs[i]];
    spec = out[i];
    spec.kind = OPERAND_VALUE;
    spec.bound = constant(0);
  }
  return PS_OK;
}

ps_status check_output_sizes(const Graph& graph, const NetworkSizes& sizes, const Vec<Spec>& specs) {
  for (int64_t i = 0; i < graph.network_outputs.size(); ++i) {
    const int32_t v = graph.network_outputs[i];
    Spec declared;
    ps_status status = read_sizes(graph.values[v], sizes, &declared);
    if (status == PS_OK && !same_type(declared, specs[v]))
      status =
          fail(PS_INVALID_ARGUMENT, "inferred %s, the file says %s", describe(specs[v]).text, describe(declared).text);
    if (status != PS_OK) return prefix(status, "outputs[%lld] (%.*s): ", ll(i), PS_STR(graph.values[v].name));
  }
  return PS_OK;
}

// One equation: a dim of an input as an expression over sizes, and the caller's value.
struct SizeEquation {
  Str expression, input;
  int32_t dim;
  int64_t given;
  uint64_t unknown;  // a bit for each unknown size
};

ps_status unsolved(const SizeEquation& e) {
  return fail(PS_INVALID_ARGUMENT, "%.*s: dims[%d]: expected %.*s, got %lld", PS_STR(e.input), e.dim,
              PS_STR(e.expression), ll(e.given));
}

ps_status evaluate_one(const SizeEquation& e, const NetworkSizes& sizes, int64_t* out) {
  int64_t list[kMaxListLen];
  int32_t count;
  PS_TRY(evaluate_sizes(e.expression, sizes.names(), list, &count));
  if (count != 1) return fail(PS_INVALID_ARGUMENT, "expected one size, got \"%.*s\"", PS_STR(e.expression));
  *out = list[0];
  return PS_OK;
}

ps_status collect_equations(const Graph& graph, const InputDims* inputs, const SizeNames& names,
                            Vec<SizeEquation>* out) {
  for (int64_t i = 0; i < graph.network_inputs.size(); ++i) {
    const Value& value = graph.values[graph.network_inputs[i]];
    Str parts[kMaxListLen];
    int32_t count;
    PS_TRY(split_sizes(value.sizes, parts, &count));
    if (count != inputs[i].rank) {
      return fail(PS_INVALID_ARGUMENT, "%.*s: expected %d dims, [%.*s], got %d", PS_STR(value.name), count,
                  PS_STR(value.sizes), inputs[i].rank);
    }
    for (int32_t d = 0; d < count; ++d) {
      const SizeEquation equation{parts[d], value.name, d, inputs[i].dims[d], sizes_used(parts[d], names)};
      if (!out->push(equation)) return no_memory();
    }
  }
  return PS_OK;
}

// Solves the equation for the size `index`, if the expression is linear in it.
ps_status solve_one(const Graph& graph, const SizeEquation& e, int32_t index, NetworkSizes* sizes) {
  const Symbol& symbol = graph.symbols[index];
  int64_t at_zero, at_one, slope, rest;
  sizes->items[index].value = 0;
  PS_TRY(evaluate_one(e, *sizes, &at_zero));
  sizes->items[index].value = 1;
  PS_TRY(evaluate_one(e, *sizes, &at_one));
  if (__builtin_sub_overflow(at_one, at_zero, &slope) || __builtin_sub_overflow(e.given, at_zero, &rest) ||
      slope == 0 || rest % slope) {
    return unsolved(e);
  }
  const int64_t size = slope == -1 ? -rest : rest / slope;
  if (size < symbol.min || size > symbol.max || size % symbol.multiple) {
    return fail(PS_INVALID_ARGUMENT,
                "%.*s: dims[%d]: expected %.*s with %.*s from %lld to %lld, a multiple of %lld, "
                "got %lld",
                PS_STR(e.input), e.dim, PS_STR(e.expression), PS_STR(symbol.name), ll(symbol.min), ll(symbol.max),
                ll(symbol.multiple), ll(e.given));
  }
  sizes->items[index].value = size;
  return PS_OK;
}

}  // namespace

NetworkSizes example_sizes(const Graph& graph) {
  NetworkSizes sizes{};
  sizes.count = static_cast<int32_t>(graph.symbols.size());
  for (int32_t i = 0; i < sizes.count; ++i) sizes.items[i] = NamedSize{graph.symbols[i].name, graph.symbols[i].example};
  return sizes;
}

ps_status solve_sizes(const Graph& graph, const InputDims* inputs, NetworkSizes* out) {
  *out = example_sizes(graph);
  Vec<SizeEquation> equations;
  PS_TRY(collect_equations(graph, inputs, out->names(), &equations));
  uint64_t unknown = 0;
  for (const SizeEquation& e : equations) unknown |= e.unknown;
  for (bool found = true; unknown && found;) {  // each round finds a size
    found = false;
    for (const SizeEquation& e : equations) {
      const uint64_t left = e.unknown & unknown;
      if (!left || left & (left - 1)) continue;
      PS_TRY(solve_one(graph, e, __builtin_ctzll(left), out));
      unknown &= ~left;
      found = true;
    }
  }
  for (const SizeEquation& e : equations) {
    int64_t size = 0;
    if (e.unknown & unknown)
      return fail(PS_INVALID_ARGUMENT, "%.*s: dims[%d]: %.*s has sizes that no input tells", PS_STR(e.input), e.dim,
                  PS_STR(e.expression));
    PS_TRY(evaluate_one(e, *out, &size));
    if (size != e.given) return unsolved(e);
  }
  return PS_OK;
}

bool is_network_op(int32_t op) {
  if (is_general(op) || as_loaded(op)) return true;
  return kOps[op].row_wise && op != OP_ALL_GATHER && op != OP_ALL_GATHER_ROUNDED;
}

Spec network_operand(const Graph& graph, const Vec<Spec>& specs, const Operand& operand) {
  return operand.kind == OPERAND_VALUE ? specs[operand.index] : spec_of(graph, operand);
}

ps_status infer_network_node(const Graph& graph, const Node& node, const NetworkSizes& sizes, Vec<Spec>* specs,
                             AttrValue* attrs, int64_t* lists) {
  Spec in[kMaxOperands] = {}, out[kMaxOutputs] = {};
  const Signature& sig = signature(node.op);
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    in[i] = network_operand(graph, *specs, node.inputs[i]);
    if (!is_general(node.op)) PS_TRY(check_rows(in[i], sig.arguments[i].name));
  }
  PS_TRY(bind_node_attrs(node, attrs));
  PS_TRY(evaluate_lists(node.op, sizes.names(), attrs, lists));
  PS_TRY(infer_op(node.op, in, attrs, out));
  return check_outputs(graph, node, out, specs);
}

ps_status infer_network(const Graph& graph, const NetworkSizes& sizes, Vec<Spec>* specs) {
  specs->clear();
  if (!specs->resize(graph.values.size())) return no_memory();
  for (int64_t v = 0; v < graph.values.size(); ++v) {
    if (graph.values[v].weight < 0) continue;
    (*specs)[v] = spec_of_constant(graph, graph.values[v]);
    const ps_status status = check_spec((*specs)[v]);
    if (status != PS_OK) return prefix(status, "values[%lld] (%.*s): ", ll(v), PS_STR(graph.values[v].name));
  }
  for (int64_t i = 0; i < graph.network_inputs.size(); ++i) {
    const int32_t v = graph.network_inputs[i];
    const ps_status status = read_sizes(graph.values[v], sizes, &(*specs)[v]);
    if (status != PS_OK) return prefix(status, "inputs[%lld] (%.*s): ", ll(i), PS_STR(graph.values[v].name));
  }
  AttrValue attrs[kMaxAttrs];
  int64_t lists[kMaxAttrs * kMaxListLen];
  for (int64_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const ps_status status = infer_network_node(graph, node, sizes, specs, attrs, lists);
    if (status != PS_OK) return prefix(status, "nodes[%lld] (%s %.*s): ", ll(n), op_name(node.op), PS_STR(node.name));
  }
  return check_output_sizes(graph, sizes, *specs);
}

}  // namespace ps
