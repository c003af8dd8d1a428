// Binding of a plan: calls with addresses, and the barriers between them.
#include "bundle/validate.h"
#include "ops/layout.h"
#include "ops/loaded.h"
#include "program/program.h"
#include "sampling/sample.h"

namespace ps {
namespace {

constexpr int64_t kMaxGroup = 64;  // maximum accesses between two barriers, because all pairs are compared

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "program: out of memory"); }

// The parts of the scratch memory, sized by make_plan.
void bind_scratch(ps_program* p) {
  const Plan& plan = p->plan;
  const ps_program_options& o = p->options;
  const int64_t threads = p->context->pool.num_threads();
  uint8_t* at = p->scratch.data() + plan.shared_scratch;
  const auto take = [&](int64_t bytes) {
    uint8_t* part = at;
    at += round_up(bytes, 64);
    return part;
  };
  const auto take_i32 = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(count * 4)); };
  p->thread_scratch = take(plan.thread_scratch * threads);
  p->sample_scratch = take(plan.sample_scratch * threads);
  p->batch.token_ids = take_i32(o.max_tokens);
  p->batch.positions = take_i32(o.max_tokens);
  p->batch.token_request = take_i32(o.max_tokens);
  p->batch.request_starts = take_i32(int64_t{o.max_requests} + 1);
  p->batch.page_tables = take_i32(p->model->graph.page_groups.size() * o.max_requests * plan.symbols[ROLE_PAGES]);
  p->batch.output_rows = take_i32(o.max_rows);
  p->batch.failed_rows = take_i32(o.max_rows);
  p->batch.wanted_rows = take_i32(o.max_tokens);
  p->batch.wanted_positions = take_i32(o.max_tokens);
  p->batch.wanted_request = take_i32(o.max_tokens);
  p->batch.owners = reinterpret_cast<PageOwner*>(take(plan.owner_bytes));
  p->batch.slots = take_i32(o.num_slots);
  for (int32_t i = 0; i < o.num_slots; ++i) p->batch.slots[i] = kEmptySlot;
}

uint8_t* value_data(const ps_program& p, const Value& value) {
  const Graph& graph = p.model->graph;
  int32_t* const inputs[NUM_INPUTS] = {p.batch.token_ids, p.batch.positions, p.batch.request_starts,
                                       p.batch.page_tables, p.batch.output_rows};
  const int64_t bytes = value.root_offset * dtype_bytes(value.dtype);
  for (int32_t i = 0; i < NUM_INPUTS; ++i) {
    if (graph.inputs[i] == value.root) return reinterpret_cast<uint8_t*>(inputs[i]) + bytes;
  }
  if (value.root == graph.output) return p.logits.data() + bytes;
  return p.temporaries.data() + p.plan.offsets[value.root] + bytes;
}

// A size that depends on the step, or is constant.
ps_status bind_dim(ps_program* p, const Dim& dim, int64_t* out) {
  *out = evaluate(dim, p->plan.symbols);
  return is_constant(dim) || p->bound.patches.push(Patch{out, dim}) ? PS_OK : no_memory();
}

// `wanted_only`: the operand of a wanted-only node.
ps_status bind_operand(ps_program* p, const Operand& operand, bool wanted_only, Tensor* out) {
  const Graph& graph = p->model->graph;
  if (operand.kind == OPERAND_NONE) return PS_OK;
  const Spec spec = spec_of(graph, operand);
  out->rank = spec.rank;
  out->dtype = spec.dtype;
  out->layout = spec.layout;
  for (int32_t d = 0; d < spec.rank; ++d) {
    Dim dim = spec.dims[d];
    if (wanted_only && dim.symbol == ROLE_TOKENS) dim.symbol = kWantedTokens;
    PS_TRY(bind_dim(p, dim, &out->dims[d]));
  }
  if (operand.kind == OPERAND_VALUE) {
    const Value& value = graph.values[operand.index];
    out->data = value_data(*p, value);
    if (wanted_only && operand.index == graph.inputs[INPUT_POSITIONS])
      out->data = reinterpret_cast<uint8_t*>(p->batch.wanted_positions);
    out->row_stride = value.row_stride;
  } else if (operand.kind == OPERAND_WEIGHT) {
    const Weight& weight = graph.weights[operand.index];
    out->data = const_cast<uint8_t*>(weight_data(*p->model, weight));
    out->row_stride = weight.cols;
  } else {
    const State& state = graph.states[operand.index];
    out->dims[0] = p->plan.group_pages[state.group];
    out->layout = page_layout(state, p->options.kv_layout);
    out->data = p->kv.data() + p->plan.state_offsets[operand.index];
    return page_bytes_of(state, p->options.kv_layout, &out->row_stride);
  }
  return PS_OK;
}

void run_nothing(const Call&, int64_t, int64_t, int32_t) {}

Step make_step(const ps_program& p, const Call* call, const Phase* phase) {
  const bool empty = has_flag(p, PS_PROGRAM_EMPTY_KERNELS);
  return Step{call, empty ? run_nothing : phase->run, 0, phase->grain, phase->split, true, nullptr, 0, 0, nullptr};
}

// Sets where a custom op reports a failure.
ps_status bind_loaded(ps_program* p, int32_t op, Call* call) {
  call->loaded = as_loaded(op);
  if (!call->loaded) return PS_OK;
  if (!p->bound.failure.get() && !p->bound.failure.make(1)) return no_memory();
  call->failure = p->bound.failure.get();
  return PS_OK;
}

// Returns the value that holds the logits: the graph's output, or what the last stage of a pipeline sends.
int32_t head_of(const Graph& graph, int32_t op) {
  const int32_t producer = graph.output < 0 ? -1 : graph.values[graph.output].producer;
  if (op != OP_ALL_GATHER || producer < 0 || graph.nodes[producer].op != OP_SEND) return graph.output;
  return graph.values[graph.nodes[producer].inputs[0].index].root;
}

// An op of several ranks exchanges with the ranks of the context.
ps_status bind_exchange(ps_program* p, const Node& node, Call* call) {
  if (!kBuildsRanks) return PS_OK;
  const Membership member = membership_of(node.op, call->attrs);
  if (member.world < 2) return PS_OK;
  const bool is_link = node.op == OP_SEND || node.op == OP_RECV;
  if (is_link && !p->context->links) return no_links(member);
  const ps_comm* comm = is_link ? p->context->links : p->context->comm;
  if (!comm || !member.fits(*comm)) {
    return fail(PS_INVALID_ARGUMENT, "comm: expected that of rank %d of %d, as the bundle was cut, got rank %d of %d",
                member.rank, member.world, comm ? comm->rank : 0, comm ? comm->world : 1);
  }
  const int64_t bytes = part_bytes(node.op, *call);
  if (bytes > comm->part_bytes) {
    return fail(PS_INVALID_ARGUMENT, "part_bytes: expected a comm of at least %lld for %.*s, got %lld",
                static_cast<long long>(bytes), PS_STR(node.name), static_cast<long long>(comm->part_bytes));
  }
  call->exchange = p->ranks.exchange.get();
  const Graph& graph = p->model->graph;
  const bool ends_pipeline = p->context->links && node.op == (p->context->links->rank ? OP_SEND : OP_RECV);
  call->is_head = (node.op == OP_ALL_GATHER || ends_pipeline) && node.outputs[0] == head_of(graph, node.op);
  call->is_hidden =
      ends_pipeline && (node.op == OP_SEND ? graph.values[node.inputs[0].index].root : node.outputs[0]) == graph.hidden;
  p->ranks.gathers_head |= call->is_head;
  return PS_OK;
}

ps_status bind_node(ps_program* p, const Node& node, const RunNode& run, Call* call) {
  Spec in[kMaxOperands] = {}, out[kMaxOutputs] = {};
  call->kernels = p->context->kernels;
  PS_TRY(bind_node_attrs(node, call->attrs));
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    in[i] = spec_of(p->model->graph, node.inputs[i]);
  }
  PS_TRY(infer_op(node.op, in, call->attrs, out));
  for (int32_t i = 0; i < run.node.num_inputs; ++i)
    PS_TRY(bind_operand(p, run.node.inputs[i], node.wanted_only, &call->in[i]));
  for (int32_t i = 0; i < run.node.num_outputs; ++i) {
    PS_TRY(bind_operand(p, Operand{OPERAND_VALUE, run.node.outputs[i]}, node.wanted_only, &call->out[i]));
  }
  call->gated = run.gated;
  call->scratch = p->scratch.data();
  call->thread_scratch = p->thread_scratch;
  call->thread_scratch_bytes = p->plan.thread_scratch;
  call->token_request = node.wanted_only ? p->batch.wanted_request : p->batch.token_request;
  PS_TRY(bind_loaded(p, node.op, call));
  PS_TRY(bind_exchange(p, node, call));
  if (has_flag(*p, PS_PROGRAM_INPUT_SUMS) && (node.op == OP_LINEAR || node.op == OP_EXPERT_LINEAR)) {
    call->input_sums = &p->input_sums[call - p->bound.calls.data()];
    const Phase* const sums = node.op == OP_LINEAR ? &kInputSums : &kExpertInputSums;
    if (!p->bound.steps.push(make_step(*p, call, sums)) || !p->bound.phases.push(sums)) return no_memory();
  }
  return push_steps(p, node, run.gated, call);
}

// Moves the wanted rows to the front; runs before the first wanted-only node.
ps_status bind_move(ps_program* p, Call* call) {
  const Graph& graph = p->model->graph;
  const WantedSources& sources = p->plan.sources;
  for (int32_t i = 0; i < sources.count; ++i) {
    const WantedSource& source = sources.items[i];
    const Value& root = graph.values[source.root];
    Tensor& t = call->in[i];
    t = Tensor{value_data(*p, root) + source.begin * 4, PS_F32, 2, 0, {0, source.end - source.begin}, root.row_stride};
    PS_TRY(bind_dim(p, Dim{kWantedTokens, 1, 0}, &t.dims[0]));
  }
  PS_TRY(bind_dim(p, Dim{ROLE_TOKENS, 1, 0}, &call->out[0].dims[0]));
  call->token_request = p->batch.wanted_rows;
  return p->bound.steps.push(make_step(*p, call, &kMoveWanted)) && p->bound.phases.push(&kMoveWanted) ? PS_OK
                                                                                                      : no_memory();
}

// Returns the output that is the operand of the all_gather at `end` of the order, if a node from `begin` on writes
// exactly its rows and nothing else reads them; else null.
Tensor* written_for(ps_program* p, const Vec<int32_t>& readers, int64_t begin, int64_t end) {
  const Graph& graph = p->model->graph;
  const Node& gather = p->plan.nodes[p->plan.order[end]].node;
  if (gather.inputs[0].kind != OPERAND_VALUE) return nullptr;
  const Value& sent = graph.values[gather.inputs[0].index];
  const int32_t root = sent.root;
  const bool is_whole = sent.root_offset == 0 && sent.row_elements == sent.row_stride &&
                        sent.row_elements == graph.values[root].row_elements;
  if (!is_whole || readers[root] != 1 || root == graph.hidden || root == graph.output) return nullptr;
  for (int64_t n = begin; n < end; ++n) {
    const RunNode& run = p->plan.nodes[p->plan.order[n]];
    for (int32_t i = 0; i < run.node.num_outputs && !run.skipped; ++i) {
      if (run.node.outputs[i] != root) continue;
      const bool fits = run.node.wanted_only == gather.wanted_only && p->plan.order[n] != graph.tail;
      return fits ? &p->bound.calls[p->plan.order[n]].out[i] : nullptr;
    }
  }
  return nullptr;
}

// Lets nodes store directly into the rank's part what an all_gather sends, if there is no other exchange between them.
ps_status bind_direct_parts(ps_program* p) {
  if (!has_ranks(*p)) return PS_OK;
  const Graph& graph = p->model->graph;
  const int64_t count = p->plan.order.size();
  Vec<int32_t> readers;  // of a root or a view of it
  if (!readers.resize(graph.values.size()) || !p->ranks.direct_parts.resize(count)) return no_memory();
  for (const RunNode& run : p->plan.nodes) {
    for (int32_t i = 0; i < run.node.num_inputs && !run.skipped; ++i) {
      if (run.node.inputs[i].kind == OPERAND_VALUE) ++readers[graph.values[run.node.inputs[i].index].root];
    }
  }
  const DirectPart** next = &p->ranks.exchange.get()->first;
  int64_t num_parts = 0, begin = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int32_t op = graph.nodes[p->plan.order[n]].op;
    Call* call = &p->bound.calls[p->plan.order[n]];
    if (!call->exchange || op == OP_SEND || op == OP_RECV) continue;
    Tensor* written = op == OP_ALL_GATHER && !call->is_head ? written_for(p, readers, begin, n) : nullptr;
    if (written) {
      DirectPart* part = &p->ranks.direct_parts[num_parts++];
      *part = DirectPart{written, &call->in[0], written->data};
      *next = part;
    }
    next = &call->next;
    begin = n + 1;
  }
  return p->ranks.direct_parts.resize(num_parts) ? PS_OK : no_memory();
}

// A phase's access to memory. `rows`: row by row, so a thread has the same row in every access with the same `root`.
struct Access {
  int64_t space;  // 0 temporaries, 1 scratch, 2 logits, 3 + i: state i
  int64_t begin, end;
  int32_t root;
  bool write, rows;
  int64_t items;  // for general networks: accesses with another number of rows conflict
};

bool conflict(const Access& a, const Access& b) {
  if (a.space != b.space || a.end <= b.begin || b.end <= a.begin || (!a.write && !b.write)) return false;
  return !(a.rows && b.rows && a.root == b.root && a.items == b.items);
}

struct Accesses {
  Access items[kMaxOperands + kMaxOutputs + 2];
  int32_t count = 0;
  int64_t num_items = 0;
  void add(int64_t space, int64_t begin, int64_t end, int32_t root, bool write, bool rows) {
    items[count++] = Access{space, begin, end, root, write, rows, num_items};
  }
};

void add_value(const ps_program& p, int32_t index, bool write, bool rows, Accesses* out) {
  const Graph& graph = p.model->graph;
  const int32_t root = graph.values[index].root;
  if (root == graph.output) return out->add(2, 0, 1, root, write, rows);
  if (p.plan.offsets[root] < 0) return;  // an input of the step, which nothing writes
  out->add(0, p.plan.offsets[root], p.plan.offsets[root] + p.plan.sizes[root], root, write, rows);
}

Accesses accesses_of(const ps_program& p, const Node& node, int32_t node_index, const Phase& phase, int64_t num_items) {
  Accesses out;
  out.num_items = num_items;
  const bool by_rows = phase.split == SPLIT_ROWS;
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    const Operand& operand = node.inputs[i];
    const bool rows = phase.reads_rows >> i & 1, all = phase.reads_all >> i & 1;
    if (operand.kind == OPERAND_VALUE && (rows || all))
      add_value(p, operand.index, false, rows && !all && by_rows, &out);
    if (operand.kind == OPERAND_STATE && (phase.reads_state || phase.writes_state)) {
      out.add(3 + operand.index, 0, 1, operand.index, phase.writes_state, by_rows && !phase.reads_state);
    }
  }
  for (int32_t i = 0; phase.writes_outputs && i < node.num_outputs; ++i)
    add_value(p, node.outputs[i], true, by_rows, &out);
  if (phase.reads_scratch) out.add(1, 0, 1, node_index, false, by_rows);
  if (phase.writes_scratch) out.add(1, 0, 1, node_index, true, by_rows);
  return out;
}

Accesses accesses_of_move(const ps_program& p) {
  Accesses out;
  for (int32_t i = 0; i < p.plan.sources.count; ++i) add_value(p, p.plan.sources.items[i].root, true, false, &out);
  return out;
}

// Backwards, so that each step knows the next step with weights.
void link_weights(BoundSteps* bound) {
  const Step* next_weights = nullptr;
  for (int64_t s = bound->steps.size() - 1; s >= 0; --s) {
    if (bound->steps[s].weights) next_weights = &bound->steps[s];
    bound->steps[s].next_weights = next_weights;
  }
}

}  // namespace

ps_status push_steps(ps_program* p, const Node& node, bool gated, const Call* call) {
  const Phases phases = phases_of(node.op, *call);
  for (int32_t i = 0; i < phases.count; ++i) {
    const Phase* phase = &phases.first[i];
    Step step = make_step(*p, call, phase);
    const bool streams = phase->split == SPLIT_SHARES && node.num_inputs > kTiledWeight &&
                         node.inputs[kTiledWeight].kind == OPERAND_WEIGHT;
    if (streams) {
      step.weights = call->in[kTiledWeight].data;
      step.weight_bytes = p->model->graph.weights[node.inputs[kTiledWeight].index].bytes / (gated ? 2 : 1);
      step.second_half = gated ? step.weight_bytes : 0;
    }
    if (!p->bound.steps.push(step) || !p->bound.phases.push(phase)) return no_memory();
  }
  return PS_OK;
}

ps_status link_steps(ps_program* p) {
  if (!p->bound.shares.make(p->context->pool.num_threads())) return no_memory();
  link_weights(&p->bound);
  return place_barriers(p);
}

ps_status bind_program(ps_program* p) {
  const Graph& graph = p->model->graph;
  bind_scratch(p);
  if (const ps_comm* links = kBuildsRanks ? all_ranks(*p->context) : nullptr) {
    if (!p->ranks.exchange.make(1)) return no_memory();
    Exchange* const exchange = p->ranks.exchange.get();
    exchange->comm = p->context->comm;
    exchange->links = links;
  }
  const int64_t count = graph.nodes.size();
  if (!p->bound.calls.resize(count + 1))
    return no_memory();  // allocated once, because steps point into it.  The last call moves the wanted rows
  if (has_flag(*p, PS_PROGRAM_INPUT_SUMS) && !p->input_sums.resize(count)) return no_memory();
  bool moved = p->plan.sources.count == 0;
  for (int32_t i : p->plan.order) {
    if (graph.nodes[i].wanted_only && !moved) PS_TRY(bind_move(p, &p->bound.calls[count]));
    moved |= graph.nodes[i].wanted_only;
    if (!p->plan.nodes[i].skipped) PS_TRY(bind_node(p, graph.nodes[i], p->plan.nodes[i], &p->bound.calls[i]));
  }
  PS_TRY(bind_direct_parts(p));
  return link_steps(p);
}

// A step needs a barrier if it accesses what a step since the last barrier accessed, and one of them writes, unless
// both access the same value row by row: then each thread uses only its own rows.
ps_status place_barriers(ps_program* p) {
  Vec<Access> group;
  for (int64_t s = 0; s < p->bound.steps.size(); ++s) {
    Step& step = p->bound.steps[s];
    const int64_t node = step.call - p->bound.calls.data();
    const Accesses now =
        node == p->plan.nodes.size()
            ? accesses_of_move(*p)
            : accesses_of(*p, p->plan.nodes[node].node, static_cast<int32_t>(node), *p->bound.phases[s], step.items);
    bool barrier = group.size() > kMaxGroup;
    for (int32_t i = 0; i < now.count && !barrier; ++i) {
      for (const Access& before : group) barrier |= conflict(now.items[i], before);
    }
    if (barrier) group.clear();
    step.barrier = barrier;
    for (int32_t i = 0; i < now.count; ++i) {
      if (!group.push(now.items[i])) return no_memory();
    }
  }
  return PS_OK;
}

}  // namespace ps
