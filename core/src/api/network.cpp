// The C API for general networks.
#include "network/network.h"

#include "api/api.h"

using namespace ps;

namespace ps {
namespace {

ps_status check_index(int64_t count, int32_t index) {
  if (index >= 0 && index < count) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "index: expected less than %lld, got %d", static_cast<long long>(count), index);
}

// The error of a build without general networks.  The compiler drops the code after a return of it.
ps_status no_networks() {
  return fail(PS_UNSUPPORTED,
              "program: this build leaves out general networks: build it with the bundle of one in PENSTOCK_OPS_FROM");
}

ps_status describe_value(const Graph& graph, const Vec<int32_t>& values, int32_t index, ps_value_info* out) {
  PS_TRY(check_index(values.size(), index));
  const Value& value = graph.values[values[index]];
  ps_value_info info{};
  info.dtype = value.dtype;
  info.name = value.name.data;  // null-terminated, like the other strings of the metadata
  info.sizes = value.sizes.size ? value.sizes.data : "";
  return write_struct(info, out, "out");
}

}  // namespace
}  // namespace ps

ps_status ps_model_input(const ps_model* model, int32_t index, ps_value_info* out) {
  PS_TRY(check_open(model));
  return describe_value(model->graph, model->graph.network_inputs, index, out);
}

ps_status ps_model_output(const ps_model* model, int32_t index, ps_value_info* out) {
  PS_TRY(check_open(model));
  return describe_value(model->graph, model->graph.network_outputs, index, out);
}

ps_status ps_model_size(const ps_model* model, int32_t index, ps_size_info* out) {
  PS_TRY(check_open(model));
  const Graph& graph = model->graph;
  PS_TRY(check_index(graph.kind == KIND_NETWORK ? graph.symbols.size() : 0, index));
  const Symbol& symbol = graph.symbols[index];
  ps_size_info info{};
  info.name = symbol.name.data;
  info.min = symbol.min;
  info.max = symbol.max;
  info.multiple = symbol.multiple;
  info.example = symbol.example;
  return write_struct(info, out, "out");
}

ps_status ps_program_predict(ps_program* program, const ps_array* inputs, int32_t num_inputs) {
  if (!kBuildsNetworks) return no_networks();
  const FloatEnvironment environment;
  const Use use(program, KIND_NETWORK);
  PS_TRY(use.status());
  return run_network(program, inputs, num_inputs);
}

ps_status ps_program_prepare(ps_program* program, const ps_array* inputs, int32_t num_inputs) {
  if (!kBuildsNetworks) return no_networks();
  const FloatEnvironment environment;
  const Use use(program, KIND_NETWORK);
  PS_TRY(use.status());
  return prepare_network(program, inputs, num_inputs);
}

ps_status ps_program_output(const ps_program* program, int32_t index, ps_array* out) {
  if (!kBuildsNetworks) return no_networks();
  const Use use(program, KIND_NETWORK);
  PS_TRY(use.status());
  PS_TRY(require(out, "out"));
  return network_output(*program, index, out);
}
