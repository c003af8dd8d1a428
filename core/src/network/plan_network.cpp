// The plan of a general network for one set of input shapes, and its calls with addresses.
#include "network/plan_network.h"

#include <algorithm>

#include "ops/layout.h"

namespace ps {
namespace {

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "network: out of memory"); }

// Approximate work of a thread per nanosecond.
constexpr int64_t kWeightBytes = 20, kProducts = 16, kMovedBytes = 4;

ps_status bytes_of(const Spec& spec, int64_t* bytes) {
  const int64_t count = num_elements(spec) * dtype_bytes(spec.dtype);  // at most 2^43
  *bytes = round_up(count, 64);
  return PS_OK;
}

void fill_tensor(const Spec& spec, Tensor* out) {
  out->dtype = spec.dtype;
  out->rank = spec.rank;
  out->layout = spec.layout;
  out->row_stride = 1;
  for (int32_t d = 0; d < spec.rank; ++d) {
    out->dims[d] = spec.dims[d].offset;
    if (d > 0) out->row_stride *= out->dims[d];
  }
}

class NetworkPlanner {
 public:
  NetworkPlanner(ps_program* program, NetworkPlan* out)
      : p_(program), graph_(program->model->graph), out_(out), plan_(&out->plan), bound_(&out->bound) {}

  ps_status make(const NetworkSizes& sizes) {
    const int64_t num_nodes = graph_.nodes.size();
    PS_TRY(infer_network(graph_, sizes, &specs_));
    if (!bound_->calls.resize(num_nodes) || !plan_->nodes.resize(num_nodes)) return no_memory();
    for (int32_t n = 0; n < num_nodes; ++n) {
      const ps_status status = make_call(sizes, n);
      if (status == PS_OK) continue;
      const Node& node = graph_.nodes[n];
      return prefix(status, "nodes[%d] (%s %.*s): ", n, op_name(node.op), PS_STR(node.name));
    }
    PS_TRY(point_to_lists());
    PS_TRY(place_values());
    return plan_arena();
  }

  // Sets the addresses of the calls.
  ps_status bind() {
    if (!bound_->failure.make(1)) return no_memory();
    const int64_t scratch = plan_->temporary_bytes;
    for (int32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      Call* call = &bound_->calls[n];
      call->scratch = at(scratch);
      call->thread_scratch = at(scratch + plan_->shared_scratch);
      call->thread_scratch_bytes = plan_->thread_scratch;
      call->loaded = as_loaded(node.op);
      call->failure = bound_->failure.get();
      for (int32_t i = 0; i < node.num_inputs; ++i) PS_TRY(bind_input(n, i, call));
      for (int32_t i = 0; i < node.num_outputs; ++i) {
        const int32_t root = graph_.values[node.outputs[i]].root;
        if (plan_->offsets[root] >= 0) call->out[i].data = at(plan_->offsets[root]);
      }
    }
    return PS_OK;
  }

 private:
  uint8_t* at(int64_t offset) const { return out_->shape.arena + offset; }

  ps_status make_call(const NetworkSizes& sizes, int32_t n) {
    const Node& node = graph_.nodes[n];
    Call* call = &bound_->calls[n];
    RunNode& run = plan_->nodes[n];
    run.node = node;
    run.skipped = node.op == OP_RESHAPE;  // its result shares its input's memory
    call->kernels = p_->context->kernels;
    int64_t lists[kMaxAttrs * kMaxListLen];
    PS_TRY(infer_network_node(graph_, node, sizes, &specs_, call->attrs, lists));
    PS_TRY(keep_lists(node, call->attrs));
    for (int32_t i = 0; i < node.num_inputs; ++i) {
      if (node.inputs[i].kind == OPERAND_NONE) continue;
      fill_tensor(network_operand(graph_, specs_, node.inputs[i]), &call->in[i]);
    }
    for (int32_t i = 0; i < node.num_outputs; ++i) fill_tensor(specs_[node.outputs[i]], &call->out[i]);
    if (run.skipped) return PS_OK;
    estimate(node, *call);
    Scratch scratch{0, 0};
    if (takes_scratch(node.op)) PS_TRY(scratch_of(node.op, *call, &scratch));
    int64_t shared, per_thread;
    if (!checked_align(scratch.shared, 64, &shared) || !checked_align(scratch.per_thread, 64, &per_thread))
      return too_large("scratch");
    plan_->shared_scratch = std::max(plan_->shared_scratch, shared);
    plan_->thread_scratch = std::max(plan_->thread_scratch, per_thread);
    return PS_OK;
  }

  // Appends the numbers in an op's lists to the plan's.
  ps_status keep_lists(const Node& node, const AttrValue* attrs) {
    const Signature& sig = signature(node.op);
    for (int32_t i = 0; i < sig.num_attrs; ++i) {
      if (sig.attrs[i].type != ATTR_INTS) continue;
      for (int64_t k = 0; k < attrs[i].i; ++k) {
        if (!out_->shape.lists.push(attrs[i].list[k])) return no_memory();
      }
    }
    return PS_OK;
  }

  ps_status point_to_lists() {
    const int64_t* at = out_->shape.lists.data();
    for (int32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Signature& sig = signature(graph_.nodes[n].op);
      for (int32_t i = 0; i < sig.num_attrs; ++i) {
        if (sig.attrs[i].type != ATTR_INTS) continue;
        bound_->calls[n].attrs[i].list = at;
        at += bound_->calls[n].attrs[i].i;
      }
    }
    return PS_OK;
  }

  // Approximate work: products of weights or matrices, and bytes that are moved.
  void estimate(const Node& node, const Call& call) {
    double work = 0;
    for (int32_t i = 0; i < node.num_outputs; ++i) work += static_cast<double>(elements(call.out[i])) * 4 / kMovedBytes;
    for (int32_t i = 0; i < node.num_inputs; ++i) {
      if (node.inputs[i].kind == OPERAND_VALUE) work += static_cast<double>(elements(call.in[i])) * 4 / kMovedBytes;
      if (node.inputs[i].kind != OPERAND_WEIGHT) continue;
      const Weight& weight = graph_.weights[node.inputs[i].index];
      work += static_cast<double>(weight.bytes) / kWeightBytes;
      const Tensor& y = call.out[0];
      const int64_t channels = y.rank ? std::max<int64_t>(y.dims[y.rank - 1], 1) : 1;
      const double depth =
          static_cast<double>(weight.rows) * static_cast<double>(weight.cols) / static_cast<double>(channels);
      if (weight.rows > 1) work += static_cast<double>(elements(y)) * depth / kProducts;
    }
    if (node.op == OP_MATMUL || node.op == OP_SDPA) {
      const Tensor& a = call.in[0];
      const int64_t depth = a.dims[a.rank - 1] + (node.op == OP_SDPA ? call.in[1].dims[call.in[1].rank - 2] : 0);
      work += static_cast<double>(elements(call.out[0])) * static_cast<double>(depth) / kProducts;
    }
    const double sum = static_cast<double>(out_->shape.nanoseconds) + work;
    out_->shape.nanoseconds = static_cast<int64_t>(sum < 1e15 ? sum : 1e15);
  }
  static int64_t elements(const Tensor& t) {
    int64_t count = 1;
    for (int32_t d = 0; d < t.rank; ++d) count *= t.dims[d];
    return count;
  }

  ps_status collect_lifetimes(Vec<int32_t>* first, Vec<int32_t>* last) {
    const int64_t count = graph_.values.size();
    if (!first->resize(count) || !last->resize(count)) return no_memory();
    for (int32_t& node : *first) node = -1;
    for (int32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      for (int32_t i = 0; i < node.num_outputs && !plan_->nodes[n].skipped; ++i) (*first)[node.outputs[i]] = n;
      for (int32_t i = 0; i < node.num_inputs; ++i) {
        if (node.inputs[i].kind == OPERAND_VALUE) (*last)[graph_.values[node.inputs[i].index].root] = n;
      }
    }
    for (int32_t v : graph_.network_outputs) (*last)[graph_.values[v].root] = static_cast<int32_t>(graph_.nodes.size());
    return PS_OK;
  }

  // An elementwise op may overwrite an operand that nothing reads later. `into`: the value whose block a value reuses;
  // itself if it has its own.
  ps_status share_blocks(Vec<int32_t>* first, Vec<int32_t>* last, Vec<int32_t>* into) {
    if (!into->resize(graph_.values.size())) return no_memory();
    for (int32_t v = 0; v < graph_.values.size(); ++v) (*into)[v] = v;
    for (int32_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (node.op != OP_UNARY && node.op != OP_BINARY && node.op != OP_CHAIN) continue;
      const int32_t out = node.outputs[0];
      const auto block_of = [&](int32_t i) { return (*into)[graph_.values[node.inputs[i].index].root]; };
      for (int32_t i = 0; i < node.num_inputs; ++i) {
        if (node.inputs[i].kind != OPERAND_VALUE) continue;
        const int32_t in = block_of(i);
        if (node.op == OP_CHAIN) {  // a chain reads its other operands after its first step has written
          if (i > 0) break;
          bool read_later = false;
          for (int32_t j = 1; j < node.num_inputs; ++j)
            read_later |= node.inputs[j].kind == OPERAND_VALUE && block_of(j) == in;
          if (read_later) break;
        }
        const bool same_bytes = num_elements(specs_[in]) == num_elements(specs_[out]) &&
                                dtype_bytes(specs_[in].dtype) == dtype_bytes(specs_[out].dtype);
        if ((*first)[in] < 0 || (*last)[in] != n || !same_bytes) continue;
        (*into)[out] = in;
        (*last)[in] = std::max((*last)[in], (*last)[out]);
        (*first)[out] = -1;
        break;
      }
    }
    return PS_OK;
  }

  ps_status place_values() {
    const int64_t count = graph_.values.size();
    Vec<int32_t> first, last, into;
    Vec<Block> blocks;
    PS_TRY(collect_lifetimes(&first, &last));
    PS_TRY(share_blocks(&first, &last, &into));
    if (!plan_->offsets.resize(count) || !plan_->sizes.resize(count)) return no_memory();
    for (int32_t v = 0; v < count; ++v) {
      plan_->offsets[v] = -1;
      if (first[v] < 0) continue;
      Block block{v, first[v], std::max(first[v], last[v]), 0, 0};
      PS_TRY(bytes_of(specs_[v], &block.bytes));
      if (!blocks.push(block)) return no_memory();
    }
    const int32_t after = static_cast<int32_t>(graph_.nodes.size());
    for (int32_t i = 0; i < graph_.network_outputs.size(); ++i) {  // inputs and constants are copied to outputs
      const int32_t v = graph_.network_outputs[i];
      if (first[into[graph_.values[v].root]] >= 0) continue;
      Block block{static_cast<int32_t>(count) + i, after, after, 0, 0};
      PS_TRY(bytes_of(specs_[v], &block.bytes));
      if (!blocks.push(block)) return no_memory();
    }
    PS_TRY(place_blocks(&blocks, "inputs", &plan_->temporary_bytes));
    Vec<int64_t> copies;
    if (!copies.resize(graph_.network_outputs.size())) return no_memory();
    for (const Block& block : blocks) {
      if (block.value >= count) {
        copies[block.value - count] = block.offset;
        continue;
      }
      plan_->offsets[block.value] = block.offset;
      plan_->sizes[block.value] = block.bytes;
    }
    for (int32_t v = 0; v < count; ++v) {
      plan_->offsets[v] = plan_->offsets[into[v]];
      plan_->sizes[v] = plan_->sizes[into[v]];
    }
    return describe_outputs(copies);
  }

  ps_status describe_outputs(const Vec<int64_t>& copies) {
    for (int32_t i = 0; i < graph_.network_outputs.size(); ++i) {
      const int32_t v = graph_.network_outputs[i], root = graph_.values[v].root;
      const Spec& spec = specs_[v];
      NetworkOutput output{plan_->offsets[root], num_elements(spec) * dtype_bytes(spec.dtype), spec.rank, -1, {}};
      if (output.offset < 0) {
        output.offset = copies[i];
        output.copied = root;
      }
      for (int32_t d = 0; d < spec.rank; ++d) output.dims[d] = spec.dims[d].offset;
      if (!out_->shape.outputs.push(output)) return no_memory();
    }
    return PS_OK;
  }

  ps_status plan_arena() {
    int64_t threads, bytes;
    if (!checked_mul(plan_->thread_scratch, p_->context->pool.num_threads(), &threads) ||
        !checked_add(threads, plan_->shared_scratch, &bytes) || !checked_add(bytes, plan_->temporary_bytes, &bytes)) {
      return too_large("inputs");
    }
    out_->shape.arena_bytes = std::max<int64_t>(bytes, 64);
    return PS_OK;
  }

  ps_status bind_input(int32_t n, int32_t i, Call* call) {
    const Operand& operand = graph_.nodes[n].inputs[i];
    Tensor* tensor = &call->in[i];
    if (operand.kind == OPERAND_WEIGHT) {
      const Weight& weight = graph_.weights[operand.index];
      tensor->data = const_cast<uint8_t*>(weight_data(*p_->model, weight));
      tensor->row_stride = weight.cols;
    }
    if (operand.kind != OPERAND_VALUE) return PS_OK;
    const int32_t root = graph_.values[operand.index].root;
    const Value& value = graph_.values[root];
    if (value.weight >= 0) {
      tensor->data = const_cast<uint8_t*>(weight_data(*p_->model, graph_.weights[value.weight]));
    } else if (plan_->offsets[root] >= 0) {
      tensor->data = at(plan_->offsets[root]);
    } else {
      int32_t input = 0;
      while (graph_.network_inputs[input] != root) ++input;
      if (!out_->shape.uses.push(InputUse{n, i, input})) return no_memory();
    }
    return PS_OK;
  }

  ps_program* const p_;
  const Graph& graph_;
  NetworkPlan* const out_;
  Plan* const plan_;
  BoundSteps* const bound_;
  Vec<Spec> specs_;
};

}  // namespace

ps_status make_network_plan(ps_program* program, const NetworkSizes& sizes, NetworkPlan* out) {
  return NetworkPlanner(program, out).make(sizes);
}

ps_status bind_network_plan(ps_program* program, NetworkPlan* out) { return NetworkPlanner(program, out).bind(); }

ps_status make_network_steps(ps_program* program) {
  const Graph& graph = program->model->graph;
  for (int32_t n = 0; n < graph.nodes.size(); ++n) {
    if (program->plan.nodes[n].skipped) continue;
    Call* const call = &program->bound.calls[n];
    const int64_t first = program->bound.steps.size();
    PS_TRY(push_steps(program, graph.nodes[n], false, call));
    for (int64_t s = first; s < program->bound.steps.size(); ++s)
      program->bound.steps[s].items = program->bound.phases[s]->items(*call);
  }
  return link_steps(program);
}

void move_network(NetworkPlan* plan, uint8_t* arena) {
  NetworkShape& shape = plan->shape;
  // A caller's array may begin at the end of the arena; empty scratch may too, and belongs to the arena.
  const auto move = [&](uint8_t** data, int64_t end) {
    if (*data >= shape.arena && *data < shape.arena + end) *data = arena + (*data - shape.arena);
  };
  for (Call& call : plan->bound.calls) {
    for (Tensor& t : call.in) move(&t.data, shape.arena_bytes);
    for (Tensor& t : call.out) move(&t.data, shape.arena_bytes);
    move(&call.scratch, shape.arena_bytes + 1);
    move(&call.thread_scratch, shape.arena_bytes + 1);
  }
  shape.arena = arena;
}

}  // namespace ps
