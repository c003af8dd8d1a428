// The C API for models.
#include "api/api.h"
#include "ops/ops.h"

using namespace ps;

static ps_status check_switch(const char* name, int32_t value) {
  return value == 0 || value == 1 ? PS_OK : fail(PS_INVALID_ARGUMENT, "%s: expected 0 or 1, got %d", name, value);
}

ps_status ps_model_open(const char* path, const ps_model_options* options, ps_model** out) {
  const FloatEnvironment environment;
  PS_TRY(require(out, "out"));
  *out = nullptr;
  PS_TRY(require_path(path));
  ps_model_options o;
  PS_TRY(read_struct(options, &o, "options"));
  PS_TRY(check_switch("verify", o.verify));
  PS_TRY(check_switch("private_copy", o.private_copy));
  ps_model* model = create_object<ps_model>();
  if (!model) return fail(PS_OUT_OF_MEMORY, "model: out of memory");
  const ps_status status = open_model(model, path, !o.private_copy, o.verify != 0);
  if (status != PS_OK) {
    destroy_object(model);
    return status;
  }
  return open_handle(model, HANDLE_MODEL, out);
}

ps_status ps_model_load_huge(ps_model* model, ps_context* context) {
  PS_TRY(check_open(model));
  PS_TRY(check_open(context));
  const ps_status status = populate_model(model, &context->pool);
  return status == PS_OK ? PS_OK : prefix(status, "weights huge: ");
}

void ps_model_close(ps_model* model) { close_handle(model, HANDLE_MODEL); }

ps_status ps_model_describe(const ps_model* model, ps_model_info* out) {
  PS_TRY(check_open(model));
  PS_TRY(require(out, "out"));
  const Graph& graph = model->graph;
  ps_model_info info{};
  info.vocab_size = graph.vocab_size;
  info.context_len = graph.context_len;
  info.num_states = static_cast<int32_t>(graph.states.size());
  info.num_page_groups = static_cast<int32_t>(graph.page_groups.size());
  info.num_weights = static_cast<int32_t>(graph.weights.size());
  info.num_nodes = static_cast<int32_t>(graph.nodes.size());
  for (const Weight& weight : graph.weights) info.weight_bytes += weight.bytes;
  info.file_bytes = model->file.bytes();
  info.weight_bytes_per_token = bytes_per_token(*model);
  info.network = graph.network.data;  // null-terminated: the metadata reader checked that
  info.scheme = graph.scheme.data;
  info.page_windows = graph.page_groups.data();
  info.tail = graph.tail >= 0 ? op_name(graph.nodes[graph.tail].op) : "";
  info.tail_k = graph.tail_k;
  if (graph.hidden >= 0) info.hidden_size = static_cast<int32_t>(graph.values[graph.hidden].row_elements);
  info.format_minor = model->format_minor;
  info.known_format_minor = kFormatMinor;
  info.bidirectional = graph.bidirectional;
  info.context_ranks = graph.context_world;
  info.prefix_token = graph.prefix_token;
  info.kind = graph.kind;
  info.num_inputs = static_cast<int32_t>(graph.network_inputs.size());
  info.num_outputs = static_cast<int32_t>(graph.network_outputs.size());
  info.num_sizes = graph.kind == KIND_NETWORK ? static_cast<int32_t>(graph.symbols.size()) : 0;
  return write_struct(info, out, "out");
}

ps_status ps_model_segment(const ps_model* model, const char* name, const void** data, int64_t* bytes) {
  PS_TRY(check_open(model));
  PS_TRY(require(name && data && bytes, "name, data, bytes"));
  *data = nullptr;
  *bytes = -1;
  const Segment* segment = find_segment(*model, name);
  if (!segment) return PS_OK;  // data null, bytes -1
  *data = model->file.data() + segment->offset;
  *bytes = segment->bytes;
  return PS_OK;
}
