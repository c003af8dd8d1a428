// Conversion of the tables of core/bundle.fbs to a Graph.  Field numbers are positions in the schema.
#include "bundle/metadata.h"

#include "base/build.h"
#include "ops/loaded.h"

namespace ps {
namespace {

constexpr uint32_t kMaxName = 512, kMaxAttr = 4096, kMaxText = 1 << 20;
constexpr uint32_t kMaxOps = 256, kMaxValues = 65536, kMaxWeights = 65536, kMaxStates = 4096, kMaxGroups = 64,
                   kMaxNodes = 16384, kMaxSegments = 256, kMaxParts = 4096, kMaxAllParts = 1 << 18,
                   kMaxProperties = 1024;

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "metadata: out of memory"); }

// Calls read(table) for each table of a vector field.
template <typename Read>
ps_status each(const FlatTable& table, int field, const char* name, uint32_t max_count, Read read) {
  FlatVector vector;
  PS_TRY(table.read_vector(field, name, 4, 4, max_count, &vector));
  for (uint32_t i = 0; i < vector.count; ++i) {
    FlatTable item;
    PS_TRY(table.table_at(vector, i, name, &item));
    PS_TRY(read(item));
  }
  return PS_OK;
}

ps_status read_name(const FlatTable& table, int field, const char* name, Str* out) {
  PS_TRY(table.read_string(field, name, kMaxName, false, out));
  if (out->size) return PS_OK;
  return fail(PS_INVALID_FILE, "%s[%lld].%s: expected a name, got none", table.place().name,
              static_cast<long long>(table.place().index), name);
}

bool is_identifier(Str name) {
  for (uint32_t i = 0; i < name.size; ++i) {
    const char c = name.data[i];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    if (!letter && (i == 0 || c < '0' || c > '9')) return false;
  }
  return !equal(name, "max") && !equal(name, "min");
}

// A size of a general network.
ps_status check_size(const Symbol& s, int64_t index) {
  if (!is_identifier(s.name)) {
    return fail(PS_INVALID_FILE, "symbols[%lld].name: expected letters, digits and _, no function, got %.*s",
                static_cast<long long>(index), PS_STR(s.name));
  }
  const bool in_range = s.min >= 0 && s.max <= INT32_MAX && s.min <= s.max && s.multiple >= 1 &&
                        s.multiple <= INT32_MAX && round_up(s.min, s.multiple) <= s.max;
  if (!in_range) {
    return fail(PS_INVALID_FILE,
                "symbols[%lld] (%.*s): expected min from 0, max up to 2^31-1, and a multiple between them, got %lld, "
                "%lld and %lld",
                static_cast<long long>(index), PS_STR(s.name), static_cast<long long>(s.min),
                static_cast<long long>(s.max), static_cast<long long>(s.multiple));
  }
  if (s.example >= s.min && s.example <= s.max && s.example % s.multiple == 0) return PS_OK;
  return fail(PS_INVALID_FILE, "symbols[%lld] (%.*s).example: expected %lld to %lld, a multiple of %lld, got %lld",
              static_cast<long long>(index), PS_STR(s.name), static_cast<long long>(s.min),
              static_cast<long long>(s.max), static_cast<long long>(s.multiple), static_cast<long long>(s.example));
}

ps_status read_size(const FlatTable& table, Symbol symbol, Graph* graph) {
  PS_TRY(table.read_i64(3, "multiple", &symbol.multiple));
  PS_TRY(table.read_i64(4, "example", &symbol.example));
  if (symbol.multiple == 0) symbol.multiple = 1;
  const bool is_sound =
      symbol.multiple > 0 && symbol.multiple <= INT32_MAX && symbol.min >= 0 && symbol.min <= INT32_MAX;
  if (symbol.example == 0 && is_sound) symbol.example = round_up(symbol.min, symbol.multiple);
  const int64_t index = table.place().index;
  PS_TRY(check_size(symbol, index));
  for (const Symbol& other : graph->symbols) {
    if (equal(other.name, symbol.name)) {
      return fail(PS_INVALID_FILE, "symbols[%lld].name: %.*s is declared twice", static_cast<long long>(index),
                  PS_STR(symbol.name));
    }
  }
  return graph->symbols.push(symbol) ? PS_OK : no_memory();
}

ps_status read_symbol(const FlatTable& table, Graph* graph) {
  Symbol symbol{};
  PS_TRY(read_name(table, 0, "name", &symbol.name));
  PS_TRY(table.read_i64(1, "min", &symbol.min));
  PS_TRY(table.read_i64(2, "max", &symbol.max));
  symbol.role = -1;
  if (graph->kind == KIND_NETWORK) return read_size(table, symbol, graph);
  for (int32_t role = 0; role < NUM_ROLES; ++role) {
    if (equal(symbol.name, kRoleNames[role])) symbol.role = role;
  }
  const int64_t index = table.place().index;
  if (symbol.role < 0) {
    return fail(PS_INVALID_FILE, "symbols[%lld].name: expected T, B, P or R, got %.*s", static_cast<long long>(index),
                PS_STR(symbol.name));
  }
  if (graph->symbol_of[symbol.role] >= 0) {
    return fail(PS_INVALID_FILE, "symbols[%lld].name: %.*s is declared twice", static_cast<long long>(index),
                PS_STR(symbol.name));
  }
  if (symbol.min < 0 || symbol.min > 1 || symbol.max < 1 || symbol.max > INT32_MAX) {
    return fail(PS_INVALID_FILE, "symbols[%lld]: expected min 0 or 1 and max from 1 to 2^31-1, got %lld and %lld",
                static_cast<long long>(index), static_cast<long long>(symbol.min), static_cast<long long>(symbol.max));
  }
  graph->symbol_of[symbol.role] = static_cast<int32_t>(index);
  return graph->symbols.push(symbol) ? PS_OK : no_memory();
}

// A custom op.  The file names it but never contains its code.
ps_status check_foreign(const OpUse& use) {
#ifdef PENSTOCK_OP_NAMES
  return PS_OK;  // core/tools/generate/bundle_ops.cpp only reads: the program that runs the bundle loads the op
#endif
  const int32_t op = find_loaded_op(use.name);
  if (op < 0) {
    return fail(
        PS_UNSUPPORTED,
        "the file needs the op %.*s, version %d, which is none of this library's: load the shared library that has it "
        "(ps_ops_load, penstock-lite --ops, penstock --ops, penstock.load_ops)",
        PS_STR(use.name), use.version);
  }
  const LoadedOp& loaded = loaded_op(op);
  if (loaded.op.version == use.version) return PS_OK;
  return fail(PS_UNSUPPORTED, "the file needs the op %.*s, version %d, and %s has version %d", PS_STR(use.name),
              use.version, loaded.source, loaded.op.version);
}

ps_status check_use(const OpUse& use) {
  if (use.version < 1) return fail(PS_INVALID_FILE, "version: expected 1 or more, got %d", use.version);
  if (is_foreign_name(use.name)) return check_foreign(use);
  const int32_t op = find_op(use.name);
  if (equal(use.name, "all_reduce")) {
    return fail(
        PS_UNSUPPORTED,
        "all_reduce adds up the results of several ranks, which would change their bits: export the network again");
  }
  if (op < 0) return fail(PS_UNSUPPORTED, "this version has no op %.*s", PS_STR(use.name));
#ifndef PENSTOCK_OP_NAMES
  if (!is_built(op)) {
    return fail(PS_UNSUPPORTED, "this build leaves out %s.%d: build it with this bundle in PENSTOCK_OPS_FROM",
                op_name(op), kOps[op].version);
  }
#endif
  if (use.version <= kOps[op].version) return PS_OK;
  return fail(PS_UNSUPPORTED, "this version has %s up to version %d, the file needs version %d", op_name(op),
              kOps[op].version, use.version);
}

ps_status read_op(const FlatTable& table, Graph* graph) {
  OpUse use;
  PS_TRY(read_name(table, 0, "name", &use.name));
  PS_TRY(table.read_i32(1, "version", 0, &use.version));
  const ps_status status = check_use(use);
  if (status != PS_OK) return prefix(status, "ops[%lld]: ", static_cast<long long>(table.place().index));
  return graph->ops.push(use) ? PS_OK : no_memory();
}

// Replaces the symbol of a Dim by its role, which a step provides.
ps_status read_dim(const uint8_t* p, const Graph& graph, Dim* out) {
  int32_t symbol;
  memcpy(&symbol, p, 4);
  memcpy(&out->factor, p + 8, 8);
  memcpy(&out->offset, p + 16, 8);
  if (symbol < -1 || symbol >= graph.symbols.size())
    return fail(PS_INVALID_FILE, "expected a symbol, got index %d", symbol);
  out->symbol = symbol < 0 ? -1 : graph.symbols[symbol].role;
  if (symbol < 0) {
    if (out->offset < 0 || out->offset > kMaxDim) {
      return fail(PS_INVALID_FILE, "expected a size from 0 to 2^31, got %lld", static_cast<long long>(out->offset));
    }
  } else if (out->factor < 1 || out->factor > kMaxDim || out->offset < 0 || out->offset > kMaxDim) {
    return fail(PS_INVALID_FILE, "expected a factor from 1 and an offset from 0, got %lld and %lld",
                static_cast<long long>(out->factor), static_cast<long long>(out->offset));
  }
  return PS_OK;
}

ps_status read_value(const FlatTable& table, Graph* graph) {
  Value value{};
  FlatVector shape;
  PS_TRY(read_name(table, 0, "name", &value.name));
  PS_TRY(table.read_i32(1, "dtype", 0, &value.dtype));
  PS_TRY(table.read_vector(2, "shape", 24, 8, kMaxRank, &shape));
  PS_TRY(table.read_i32(3, "base", -1, &value.base));
  PS_TRY(table.read_i64(4, "offset", &value.offset));
  PS_TRY(table.read_string(5, "sizes", kMaxAttr, false, &value.sizes));
  PS_TRY(table.read_i32(6, "weight", -1, &value.weight));
  if (graph->kind == KIND_NETWORK && shape.count) {
    return fail(PS_INVALID_FILE, "values[%lld].shape: expected none in a general network, got %u dims",
                static_cast<long long>(table.place().index), shape.count);
  }
  value.rank = static_cast<int32_t>(shape.count);
  for (uint32_t i = 0; i < shape.count; ++i) {
    const ps_status status = read_dim(shape.data + 24 * i, *graph, &value.dims[i]);
    if (status != PS_OK)
      return prefix(status, "values[%lld].shape[%u]: ", static_cast<long long>(table.place().index), i);
  }
  return graph->values.push(value) ? PS_OK : no_memory();
}

ps_status read_weight(const FlatTable& table, Graph* graph) {
  Weight weight{};
  PS_TRY(read_name(table, 0, "name", &weight.name));
  PS_TRY(table.read_i64(1, "rows", &weight.rows));
  PS_TRY(table.read_i64(2, "cols", &weight.cols));
  PS_TRY(table.read_i32(3, "layout", 0, &weight.layout));
  PS_TRY(table.read_i32(4, "segment", 0, &weight.segment));
  PS_TRY(table.read_i64(5, "offset", &weight.offset));
  PS_TRY(table.read_i64(6, "bytes", &weight.bytes));
  weight.part_begin = graph->parts.size();
  PS_TRY(each(table, 7, "parts", kMaxParts, [&](const FlatTable& item) {
    Part part{};
    PS_TRY(read_name(item, 0, "name", &part.name));
    PS_TRY(item.read_i64(1, "row_start", &part.row_start));
    PS_TRY(item.read_i64(2, "num_rows", &part.num_rows));
    if (graph->parts.size() >= kMaxAllParts)
      return fail(PS_INVALID_FILE, "weights: expected at most %u parts in all", kMaxAllParts);
    return graph->parts.push(part) ? PS_OK : no_memory();
  }));
  weight.part_end = graph->parts.size();
  FlatVector shape;
  PS_TRY(table.read_vector(8, "shape", 8, 8, kMaxRank, &shape));
  weight.rank = static_cast<int32_t>(shape.count);
  if (shape.count) memcpy(weight.shape, shape.data, shape.count * 8);
  return graph->weights.push(weight) ? PS_OK : no_memory();
}

ps_status read_state(const FlatTable& table, Graph* graph) {
  State state{};
  PS_TRY(read_name(table, 0, "name", &state.name));
  PS_TRY(table.read_i32(1, "num_kv_heads", 0, &state.num_kv_heads));
  PS_TRY(table.read_i32(2, "head_dim", 0, &state.head_dim));
  PS_TRY(table.read_i32(3, "group", 0, &state.group));
  PS_TRY(table.read_i32(4, "recurrent", 0, &state.recurrent));
  PS_TRY(table.read_i32(5, "latent_dim", 0, &state.latent_dim));
  return graph->states.push(state) ? PS_OK : no_memory();
}

ps_status read_attrs(const FlatTable& table, uint32_t max_text, Node* node) {
  return each(table, 4, "attrs", kMaxAttrs, [&](const FlatTable& item) {
    Attr attr{};
    PS_TRY(read_name(item, 0, "name", &attr.name));
    PS_TRY(item.read_i32(1, "type", 0, &attr.type));
    PS_TRY(item.read_i64(2, "i", &attr.i));
    PS_TRY(item.read_f64(3, "f", &attr.f));
    PS_TRY(item.read_string(4, "s", max_text, false, &attr.s));
    node->attrs[node->num_attrs++] = attr;
    return PS_OK;
  });
}

ps_status read_node(const FlatTable& table, Graph* graph) {
  Node node{};
  FlatVector inputs, outputs;
  int32_t op;
  PS_TRY(table.read_i32(0, "op", 0, &op));
  PS_TRY(table.read_string(1, "name", kMaxName, false, &node.name));
  PS_TRY(table.read_vector(2, "inputs", 8, 4, kMaxOperands, &inputs));
  PS_TRY(table.read_vector(3, "outputs", 4, 4, kMaxOutputs, &outputs));
  if (op < 0 || op >= graph->ops.size()) {
    return fail(PS_INVALID_FILE, "nodes[%lld].op: expected less than %lld, got %d",
                static_cast<long long>(table.place().index), static_cast<long long>(graph->ops.size()), op);
  }
  node.op = find_op(graph->ops[op].name);
  node.num_inputs = static_cast<int32_t>(inputs.count);
  node.num_outputs = static_cast<int32_t>(outputs.count);
  if (inputs.count) memcpy(node.inputs, inputs.data, inputs.count * 8);
  if (outputs.count) memcpy(node.outputs, outputs.data, outputs.count * 4);
  PS_TRY(read_attrs(table, graph->kind == KIND_NETWORK ? kMaxAttr : kMaxName, &node));
  return graph->nodes.push(node) ? PS_OK : no_memory();
}

ps_status read_segment(const FlatTable& table, Graph* graph) {
  Segment segment{};
  PS_TRY(read_name(table, 0, "name", &segment.name));
  PS_TRY(table.read_i64(1, "offset", &segment.offset));
  PS_TRY(table.read_i64(2, "bytes", &segment.bytes));
  PS_TRY(table.read_u32(3, "crc32", &segment.crc32));
  return graph->segments.push(segment) ? PS_OK : no_memory();
}

ps_status read_property(const FlatTable& table) {  // for people and tools; the core does not use it
  Str key, value;
  PS_TRY(read_name(table, 0, "key", &key));
  return table.read_string(1, "value", kMaxText, true, &value);
}

ps_status read_group(const FlatTable& table, Graph* graph) {
  int32_t window;
  PS_TRY(table.read_i32(0, "window", 0, &window));
  return graph->page_groups.push(window) ? PS_OK : no_memory();
}

ps_status read_indices(const FlatTable& root, int field, const char* name, Vec<int32_t>* out) {
  FlatVector indices;
  PS_TRY(root.read_vector(field, name, 4, 4, kMaxNetworkInputs, &indices));
  if (!out->resize(indices.count)) return no_memory();
  if (indices.count) memcpy(out->data(), indices.data, indices.count * 4);
  return PS_OK;
}

ps_status read_kind(const FlatTable& root, Graph* graph) {
  PS_TRY(root.read_i32(15, "kind", KIND_LANGUAGE_MODEL, &graph->kind));
  if (graph->kind == KIND_NETWORK && !kBuildsNetworks) {
    return fail(PS_UNSUPPORTED, "metadata.kind: this build leaves out general networks: build it with this bundle in "
                                "PENSTOCK_OPS_FROM");
  }
  if (graph->kind == KIND_LANGUAGE_MODEL || graph->kind == KIND_NETWORK) return PS_OK;
  return fail(PS_UNSUPPORTED,
              "metadata.kind: this version knows 0 (language model) and 1 (general network), the file has %d",
              graph->kind);
}

ps_status read_inputs(const FlatTable& root, Graph* graph) {
  if (graph->kind == KIND_NETWORK) {
    PS_TRY(read_indices(root, 11, "inputs", &graph->network_inputs));
    return read_indices(root, 16, "outputs", &graph->network_outputs);
  }
  FlatVector inputs;
  PS_TRY(root.read_vector(11, "inputs", 4, 4, NUM_INPUTS, &inputs));
  if (inputs.count != NUM_INPUTS) {
    return fail(PS_INVALID_FILE, "metadata.inputs: expected %d values, got %u", NUM_INPUTS, inputs.count);
  }
  memcpy(graph->inputs, inputs.data, sizeof(graph->inputs));
  return PS_OK;
}

}  // namespace

ps_status read_metadata(FlatBuffer buffer, Graph* graph) {
  FlatTable root;
  PS_TRY(FlatTable::root(buffer, "PSMB", &root));
  PS_TRY(read_kind(root, graph));
  PS_TRY(root.read_string(0, "network", kMaxName, false, &graph->network));
  PS_TRY(root.read_string(1, "scheme", kMaxName, false, &graph->scheme));
  PS_TRY(root.read_i32(2, "vocab_size", 0, &graph->vocab_size));
  PS_TRY(root.read_i32(3, "context_len", 0, &graph->context_len));
  const uint32_t max_symbols = graph->kind == KIND_NETWORK ? uint32_t{kMaxSizes} : uint32_t{NUM_ROLES};
  PS_TRY(each(root, 4, "symbols", max_symbols, [&](const FlatTable& t) { return read_symbol(t, graph); }));
  PS_TRY(each(root, 5, "ops", kMaxOps, [&](const FlatTable& t) { return read_op(t, graph); }));
  PS_TRY(each(root, 6, "values", kMaxValues, [&](const FlatTable& t) { return read_value(t, graph); }));
  PS_TRY(each(root, 7, "weights", kMaxWeights, [&](const FlatTable& t) { return read_weight(t, graph); }));
  PS_TRY(each(root, 8, "states", kMaxStates, [&](const FlatTable& t) { return read_state(t, graph); }));
  PS_TRY(each(root, 9, "page_groups", kMaxGroups, [&](const FlatTable& t) { return read_group(t, graph); }));
  PS_TRY(each(root, 10, "nodes", kMaxNodes, [&](const FlatTable& t) { return read_node(t, graph); }));
  PS_TRY(read_inputs(root, graph));
  PS_TRY(root.read_i32(12, "output", 0, &graph->output));
  PS_TRY(each(root, 13, "segments", kMaxSegments, [&](const FlatTable& t) { return read_segment(t, graph); }));
  return each(root, 14, "properties", kMaxProperties, [&](const FlatTable& t) { return read_property(t); });
}

}  // namespace ps
