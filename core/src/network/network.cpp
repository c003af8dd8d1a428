// Runs of a general network: the plan of the inputs' shapes, inputs and outputs, and the walk.
// Hot: runs in every step.
#include "network/network.h"

#include "base/clock.h"
#include "ops/layout.h"
#include "network/plan_network.h"

namespace ps {
namespace {

// Shorter runs are not shared with other threads; see execute.cpp.
constexpr int64_t kShortRunNanoseconds = 500000;
constexpr int64_t kMinPatience = 400000, kPatienceShare = 32;

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "network: out of memory"); }

long long ll(int64_t v) { return static_cast<long long>(v); }

ps_status check_input(const Graph& graph, const ps_array& input, int32_t index, InputDims* out) {
  const Value& value = graph.values[graph.network_inputs[index]];
  if (input.dtype != value.dtype) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected %s, got %s", PS_STR(value.name), dtype_name(value.dtype),
                dtype_name(input.dtype) ? dtype_name(input.dtype) : "an unknown type");
  }
  if (input.ndim < 0 || input.ndim > kMaxRank)
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected 0 to %d dims, got %d", PS_STR(value.name), kMaxRank, input.ndim);
  out->rank = input.ndim;
  for (int32_t d = 0; d < input.ndim; ++d) {
    out->dims[d] = input.dims[d];
    if (input.dims[d] >= 0 && input.dims[d] <= kMaxDim) continue;
    return fail(PS_INVALID_ARGUMENT, "%.*s: dims[%d]: expected 0 to 2^31, got %lld", PS_STR(value.name), d,
                ll(input.dims[d]));
  }
  return PS_OK;
}

ps_status check_inputs(const ps_program& p, const ps_array* inputs, int32_t count, InputDims* out) {
  const Graph& graph = p.model->graph;
  if (count != graph.network_inputs.size() || (count && !inputs)) {
    return fail(PS_INVALID_ARGUMENT, "num_inputs: expected %lld arrays, got %d", ll(graph.network_inputs.size()),
                inputs ? count : 0);
  }
  for (int32_t i = 0; i < count; ++i) PS_TRY(check_input(graph, inputs[i], i, &out[i]));
  return PS_OK;
}

bool has_dims(const NetworkPlan& plan, const InputDims* inputs, int32_t count) {
  int64_t at = 0;
  for (int32_t i = 0; i < count; ++i) {  // the file determines the ranks
    for (int32_t d = 0; d < inputs[i].rank; ++d, ++at) {
      if (at >= plan.shape.dims.size() || plan.shape.dims[at] != inputs[i].dims[d]) return false;
    }
  }
  return at == plan.shape.dims.size();
}

// Returns the current plan to the cache.
void put_back(ps_program* p) {
  NetworkMemory& network = p->network;
  if (network.current < 0) return;
  NetworkPlan& plan = network.plans[network.current];
  std::swap(plan.plan, p->plan);
  std::swap(plan.bound, p->bound);
  network.current = -1;
}

ps_status grow_arena(ps_program* p, int64_t bytes) {
  if (p->temporaries.bytes() >= bytes) return PS_OK;
  if (p->temporaries.allocate(bytes, true)) return PS_OK;
  return fail(PS_OUT_OF_MEMORY, "inputs: the system refused %lld bytes", ll(bytes));
}

// Makes a cached plan the current one, and builds its steps if it is new.
ps_status take_plan(ps_program* p, int32_t index, bool is_new) {
  NetworkMemory& network = p->network;
  NetworkPlan& plan = network.plans[index];
  PS_TRY(grow_arena(p, plan.shape.arena_bytes));
  if (is_new) {
    plan.shape.arena = p->temporaries.data();
    PS_TRY(bind_network_plan(p, &plan));
  } else if (plan.shape.arena != p->temporaries.data()) {
    move_network(&plan, p->temporaries.data());
  }
  std::swap(plan.plan, p->plan);
  std::swap(plan.bound, p->bound);
  network.current = index;
  if (is_new) PS_TRY(make_network_steps(p));
  plan.used = ++network.num_uses;
  return p->spans.on ? profile_program(p, true) : PS_OK;
}

ps_status add_plan(ps_program* p, const InputDims* inputs, int32_t count) {
  NetworkMemory& network = p->network;
  int32_t oldest = 0;
  for (int32_t i = 1; i < kKeptPlans; ++i) {
    if (network.plans[i].used < network.plans[oldest].used) oldest = i;
  }
  NetworkSizes sizes;
  PS_TRY(solve_sizes(p->model->graph, inputs, &sizes));
  NetworkPlan fresh{};
  PS_TRY(make_network_plan(p, sizes, &fresh));
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t d = 0; d < inputs[i].rank; ++d) {
      if (!fresh.shape.dims.push(inputs[i].dims[d])) return no_memory();
    }
  }
  put_back(p);
  std::swap(network.plans[oldest], fresh);
  const ps_status status = take_plan(p, oldest, true);
  if (status == PS_OK) return PS_OK;
  put_back(p);
  network.plans[oldest] = NetworkPlan{};
  return status;
}

ps_status select_plan(ps_program* p, const InputDims* inputs, int32_t count) {
  NetworkMemory& network = p->network;
  network.has_outputs = false;
  if (network.current >= 0 && has_dims(network.plans[network.current], inputs, count)) return PS_OK;
  for (int32_t i = 0; i < kKeptPlans; ++i) {
    if (!network.plans[i].used || !has_dims(network.plans[i], inputs, count)) continue;
    put_back(p);
    return take_plan(p, i, false);
  }
  return add_plan(p, inputs, count);
}

// Finds the bytes of each input.  Inputs that are not aligned, or lie in the program's own memory, are copied: a run
// overwrites that memory, and planning may free it.
ps_status stage_inputs(ps_program* p, const ps_array* inputs, const InputDims* dims, int32_t count) {
  NetworkMemory& network = p->network;
  const Graph& graph = p->model->graph;
  Vec<int64_t> bytes;
  if (!bytes.resize(count) || !network.inputs.resize(count)) return no_memory();
  const uint8_t *const begin = p->temporaries.data(), *const end = begin + p->temporaries.bytes();
  const uint8_t *const old_begin = network.staging.data(), *const old_end = old_begin + network.staging.bytes();
  int64_t staged = 0;
  for (int32_t i = 0; i < count; ++i) {
    const Value& value = graph.values[graph.network_inputs[i]];
    const uint8_t* data = static_cast<const uint8_t*>(inputs[i].data);
    bytes[i] = dtype_bytes(value.dtype);
    for (int32_t d = 0; d < dims[i].rank; ++d) {
      if (!checked_mul(bytes[i], dims[i].dims[d], &bytes[i]) || bytes[i] > int64_t{1} << 43)
        return fail(PS_INVALID_ARGUMENT, "%.*s: expected at most 2^40 elements", PS_STR(value.name));
    }
    if (!data && bytes[i]) return fail(PS_INVALID_ARGUMENT, "%.*s: expected data, got null", PS_STR(value.name));
    const bool is_aligned = reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype_bytes(value.dtype)) == 0;
    const bool is_own = (data < end && data + bytes[i] > begin) || (data < old_end && data + bytes[i] > old_begin);
    network.inputs[i] = is_aligned && !is_own ? data : nullptr;
    if (!network.inputs[i]) staged += round_up(bytes[i], 64);
  }
  if (!staged) return PS_OK;
  Region fresh;
  if (!fresh.allocate(staged)) return fail(PS_OUT_OF_MEMORY, "inputs: the system refused %lld bytes", ll(staged));
  uint8_t* at = fresh.data();
  for (int32_t i = 0; i < count; ++i) {
    if (network.inputs[i]) continue;
    if (bytes[i]) memcpy(at, inputs[i].data, static_cast<size_t>(bytes[i]));
    network.inputs[i] = at;
    at += round_up(bytes[i], 64);
  }
  network.staging = static_cast<Region&&>(fresh);
  return PS_OK;
}

const uint8_t* root_data(const ps_program& p, int32_t root) {
  const Graph& graph = p.model->graph;
  if (graph.values[root].weight >= 0) return weight_data(*p.model, graph.weights[graph.values[root].weight]);
  int32_t input = 0;
  while (graph.network_inputs[input] != root) ++input;
  return p.network.inputs[input];
}

ps_status walk_network(ps_program* p) {
  const NetworkShape& shape = p->network.plans[p->network.current].shape;
  const int64_t start_ns = p->spans.on ? now_ns() : 0;
  p->spans.count = 0;
  if (has_flag(*p, PS_PROGRAM_POISON)) memset(p->temporaries.data(), 0xFF, static_cast<size_t>(shape.arena_bytes));
  if (p->spans.on) clear_spans(p);
  const Pool::Walk work = p->spans.on ? walk_steps_timed : walk_steps;
  if (has_flag(*p, PS_PROGRAM_ALL_THREADS)) {
    PS_TRY(p->context->pool.walk(work, p, 0, false));
  } else {
    const int64_t share = shape.nanoseconds / kPatienceShare;
    PS_TRY(p->context->pool.walk(work, p, share > kMinPatience ? share : kMinPatience,
                                 shape.nanoseconds < kShortRunNanoseconds));
  }
  p->last.stamp += static_cast<uint64_t>(p->bound.steps.size());
  if (p->spans.on) gather_spans(p, start_ns);
  return check_failure(*p);
}

}  // namespace

ps_status prepare_network(ps_program* p, const ps_array* inputs, int32_t num_inputs) {
  InputDims dims[kMaxNetworkInputs];
  PS_TRY(check_inputs(*p, inputs, num_inputs, dims));
  return select_plan(p, dims, num_inputs);
}

ps_status run_network(ps_program* p, const ps_array* inputs, int32_t num_inputs) {
  InputDims dims[kMaxNetworkInputs];
  PS_TRY(check_inputs(*p, inputs, num_inputs, dims));
  PS_TRY(stage_inputs(p, inputs, dims, num_inputs));
  PS_TRY(select_plan(p, dims, num_inputs));
  const NetworkShape& shape = p->network.plans[p->network.current].shape;
  for (const InputUse& use : shape.uses)
    p->bound.calls[use.node].in[use.operand].data = const_cast<uint8_t*>(p->network.inputs[use.input]);
  PS_TRY(walk_network(p));
  for (const NetworkOutput& output : shape.outputs) {
    if (output.copied >= 0 && output.bytes)
      memcpy(p->temporaries.data() + output.offset, root_data(*p, output.copied), static_cast<size_t>(output.bytes));
  }
  p->network.has_outputs = true;
  return PS_OK;
}

ps_status network_output(const ps_program& p, int32_t index, ps_array* out) {
  const Graph& graph = p.model->graph;
  if (index < 0 || index >= graph.network_outputs.size())
    return fail(PS_INVALID_ARGUMENT, "index: expected less than %lld, got %d", ll(graph.network_outputs.size()), index);
  if (p.network.current < 0)
    return fail(PS_INVALID_ARGUMENT, "program: expected a run before its outputs are asked for");
  const NetworkOutput& output = p.network.plans[p.network.current].shape.outputs[index];
  *out = ps_array{p.network.has_outputs ? p.temporaries.data() + output.offset : nullptr,
                  graph.values[graph.network_outputs[index]].dtype,
                  output.rank,
                  {}};
  memcpy(out->dims, output.dims, sizeof(out->dims));
  return PS_OK;
}

}  // namespace ps
