// The memory plan from limits: temporaries by lifetime, largest first; scratch for the node that needs most.
#include <algorithm>

#include "bundle/validate.h"
#include "ops/layout.h"
#include "program/program.h"
#include "sampling/sample.h"

namespace ps {
namespace {

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "plan: out of memory"); }
ps_status check_limit(const char* name, int32_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %lld to %lld, got %d", name, static_cast<long long>(least),
              static_cast<long long>(most), value);
}

ps_status check_options(const Graph& graph, const ps_program_options& o) {
  const auto most = [&](Role role) { return graph.symbols[graph.symbol_of[role]].max; };
  PS_TRY(check_limit("max_tokens", o.max_tokens, 1, std::min<int64_t>(most(ROLE_TOKENS), 1 << 24)));
  PS_TRY(check_limit("max_requests", o.max_requests, 1, std::min<int64_t>(most(ROLE_REQUESTS), 1 << 20)));
  PS_TRY(check_limit("max_rows", o.max_rows, 1, std::min<int64_t>(most(ROLE_ROWS), 1 << 24)));
  PS_TRY(check_limit("num_pages", o.num_pages, graph.states.size() ? 1 : 0, (1 << 30) / graph.context_world));
  PS_TRY(check_limit("num_slots", o.num_slots, 0, 1 << 24));
  return PS_OK;
}

// The lifetime of every root in the temporaries.
ps_status collect_blocks(const Graph& graph, const Plan& plan, Vec<Block>* blocks) {
  Vec<int32_t> first, last;
  if (!last.resize(graph.values.size())) return no_memory();
  if (!first.resize(graph.values.size())) return no_memory();
  for (int32_t& node : first) node = -1;
  for (int64_t n = 0; n < plan.order.size(); ++n) {
    const RunNode& run = plan.nodes[plan.order[n]];
    if (run.skipped) continue;
    const Node& node = run.node;
    for (int32_t i = 0; i < node.num_outputs; ++i) first[node.outputs[i]] = static_cast<int32_t>(n);
    for (int32_t i = 0; i < node.num_inputs; ++i) {
      if (node.inputs[i].kind == OPERAND_VALUE) last[graph.values[node.inputs[i].index].root] = static_cast<int32_t>(n);
    }
  }
  const int32_t after = static_cast<int32_t>(plan.nodes.size());  // read after the step
  if (graph.hidden >= 0) last[graph.hidden] = after;
  if (graph.tail >= 0) last[graph.nodes[graph.tail].outputs[0]] = after;
  for (int64_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    if (first[v] < 0 || v == graph.output) continue;
    const int64_t rows = evaluate(value.dims[0], plan.symbols);
    int64_t bytes;  // ops count rows in 32 bits
    if (rows > INT32_MAX || !checked_mul(rows, value.row_stride, &bytes) ||
        !checked_mul(bytes, dtype_bytes(value.dtype), &bytes) || !checked_align(bytes, 64, &bytes)) {
      return too_large("max_tokens");
    }
    const Block block{static_cast<int32_t>(v), first[v], std::max(last[v], first[v]), bytes, 0};
    if (!blocks->push(block)) return no_memory();
  }
  return PS_OK;
}

ps_status plan_temporaries(const Graph& graph, Plan* plan) {
  Vec<Block> blocks;
  if (!plan->offsets.resize(graph.values.size()) || !plan->sizes.resize(graph.values.size())) return no_memory();
  for (int64_t& offset : plan->offsets) offset = -1;
  PS_TRY(collect_blocks(graph, *plan, &blocks));
  PS_TRY(place_blocks(&blocks, "max_tokens", &plan->temporary_bytes));
  for (const Block& block : blocks) {
    plan->offsets[block.value] = block.offset;
    plan->sizes[block.value] = block.bytes;
  }
  return PS_OK;
}

// A call with sizes but no memory, to ask ops for their scratch.
ps_status sized_call(const Graph& graph, const Node& node, const Kernels* kernels, const int64_t* symbols,
                     int32_t kv_layout, Call* call) {
  memset(static_cast<void*>(call), 0, sizeof(*call));
  call->kernels = kernels;
  PS_TRY(bind_node_attrs(node, call->attrs));
  Spec in[kMaxOperands] = {}, out[kMaxOutputs] = {};
  for (int32_t i = 0; i < node.num_inputs; ++i) {
    in[i] = spec_of(graph, node.inputs[i]);
    call->in[i].rank = in[i].rank;
    call->in[i].dtype = in[i].dtype;
    const Operand& operand = node.inputs[i];
    const bool pages = operand.kind == OPERAND_STATE;
    call->in[i].layout = pages ? page_layout(graph.states[operand.index], kv_layout) : in[i].layout;
    for (int32_t d = 0; d < in[i].rank; ++d) call->in[i].dims[d] = evaluate(in[i].dims[d], symbols);
  }
  PS_TRY(infer_op(node.op, in, call->attrs, out));  // sets the index of string attributes
  for (int32_t i = 0; i < node.num_outputs; ++i) {
    call->out[i].rank = out[i].rank;
    call->out[i].dtype = out[i].dtype;
    for (int32_t d = 0; d < out[i].rank; ++d) call->out[i].dims[d] = evaluate(out[i].dims[d], symbols);
  }
  return PS_OK;
}

ps_status plan_scratch(const ps_model& model, const ps_context& context, const ps_program_options& o, Plan* plan) {
  const Graph& graph = model.graph;
  const int64_t threads = context.pool.num_threads();
  for (const Node& node : graph.nodes) {
    if (!takes_scratch(node.op)) continue;
    Call call;
    Scratch scratch{0, 0};
    PS_TRY(sized_call(graph, node, context.kernels, plan->symbols, o.kv_layout, &call));
    PS_TRY(scratch_of(node.op, call, &scratch));
    plan->shared_scratch = std::max(plan->shared_scratch, round_up(scratch.shared, 64));
    plan->thread_scratch = std::max(plan->thread_scratch, round_up(scratch.per_thread, 64));
  }
  plan->sample_scratch = graph.tail < 0 ? sample_scratch_bytes(graph.vocab_size) : 0;
  const int64_t tables = graph.page_groups.size() * o.max_requests * max_table_width(graph);  // each factor is bounded
  const int64_t t = o.max_tokens;
  const int64_t counts[] = {t, t, t, int64_t{o.max_requests} + 1, tables, o.max_rows, o.max_rows, t, t, t};
  plan->batch_bytes = 0;
  for (int64_t count : counts) plan->batch_bytes += round_up(count * 4, 64);
  const int64_t num_pages = int64_t{o.num_pages} * graph.context_world;
  plan->owner_bytes = round_up(graph.page_groups.size() * num_pages * static_cast<int64_t>(sizeof(PageOwner)), 64);
  plan->slot_bytes = round_up(int64_t{o.num_slots} * 4, 64);
  int64_t per_thread;
  if (!checked_mul(plan->thread_scratch + plan->sample_scratch, threads, &per_thread) ||
      !checked_add(per_thread, plan->shared_scratch, &plan->scratch_bytes) ||
      !checked_add(plan->scratch_bytes, plan->batch_bytes + plan->owner_bytes + plan->slot_bytes,
                   &plan->scratch_bytes)) {
    return too_large("max_tokens");
  }
  return PS_OK;
}

ps_status plan_groups(const Graph& graph, const ps_program_options& o, Plan* plan) {
  for (int64_t g = 0; g < graph.page_groups.size(); ++g) {
    const int32_t count = o.group_pages ? o.group_pages[g] : 0;
    if (count < 0 || count > o.num_pages) {
      return fail(PS_INVALID_ARGUMENT, "group_pages[%lld]: expected 0 to num_pages (%d), got %d",
                  static_cast<long long>(g), o.num_pages, count);
    }
    const int32_t world = graph.whole_groups >> g & 1 ? graph.context_world : 1;
    if (!plan->group_pages.push((count ? count : o.num_pages) * world)) return no_memory();
  }
  return PS_OK;
}

ps_status plan_kv(const Graph& graph, const ps_program_options& o, Plan* plan) {
  PS_TRY(plan_groups(graph, o, plan));
  for (const State& state : graph.states) {
    int64_t bytes, all;
    PS_TRY(page_bytes_of(state, o.kv_layout, &bytes));
    if (!plan->state_offsets.push(plan->kv_bytes)) return no_memory();
    plan->used_groups |= uint64_t{1} << state.group;
    plan->kv_page_bytes += bytes;  // at most 4096 states of at most 2^31 bytes
    if (!checked_mul(bytes, plan->group_pages[state.group], &all) || !checked_add(plan->kv_bytes, all, &plan->kv_bytes))
      return too_large("num_pages");
  }
  return PS_OK;
}

}  // namespace

int64_t max_table_width(const Graph& graph) {
  const int64_t needed = (int64_t{graph.context_len} + PS_PAGE_TOKENS - 1) / PS_PAGE_TOKENS;
  return std::min(needed, graph.symbols[graph.symbol_of[ROLE_PAGES]].max);
}

ps_status make_plan(const ps_model& model, const ps_context& context, const ps_program_options& o, Plan* out) {
  const Graph& graph = model.graph;
  PS_TRY(check_options(graph, o));
  out->symbols[ROLE_TOKENS] = o.max_tokens;
  out->symbols[ROLE_REQUESTS] = o.max_requests;
  out->symbols[ROLE_PAGES] = max_table_width(graph);
  out->symbols[ROLE_ROWS] = o.max_rows;
  out->symbols[kWantedTokens] = o.max_tokens;
  out->shared_scratch = out->thread_scratch = out->kv_page_bytes = out->kv_bytes = 0;
  out->used_groups = 0;
  PS_TRY(fuse_nodes(graph, *context.kernels, &out->nodes));
  PS_TRY(order_nodes(graph, &out->order));
  out->sources = find_sources(graph);
  PS_TRY(plan_temporaries(graph, out));
  PS_TRY(plan_scratch(model, context, o, out));
  PS_TRY(plan_kv(graph, o, out));
  int64_t floats;
  const int64_t row = graph.output < 0 ? 0 : graph.tail < 0 ? graph.vocab_size : graph.tail_k;
  if (!checked_mul(o.max_rows, row, &floats) || !checked_mul(floats, 4, &out->logits_bytes))
    return too_large("max_rows");
  return PS_OK;
}

}  // namespace ps
