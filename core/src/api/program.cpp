// The C API for programs.
#include <algorithm>
#include <initializer_list>

#include "api/api.h"
#include "base/build.h"
#include "ops/layout.h"
#include "program/program.h"
#include "sampling/sample.h"

using namespace ps;

namespace ps {
namespace {

ps_status read_fields(const ps_program_options* options, ps_program_options* out) {
  PS_TRY(read_struct(options, out, "options"));
  return out->flags ? fail(PS_UNSUPPORTED, "flags: expected 0, got 0x%x", out->flags) : PS_OK;
}

ps_status read_options(const ps_program_options* options, const ps_model& model, ps_program_options* out) {
  PS_TRY(read_fields(options, out));
  if (out->kv_layout == 0) out->kv_layout = auto_kv_layout(model.graph.scheme);
  if (kv_layout_name(out->kv_layout)) {
    if (builds_kv(out->kv_layout)) return PS_OK;
    return fail(PS_UNSUPPORTED, "kv_layout: this build leaves out %s: build it with PENSTOCK_KV_LAYOUTS=%s",
                kv_layout_name(out->kv_layout), kv_layout_name(out->kv_layout));
  }
  return fail(PS_INVALID_ARGUMENT, "kv_layout: expected 0 (automatic), 1 (f32), 2 (bf16), 3 (int8) or 4 (int4), got %d",
              out->kv_layout);
}

// Options for a general network: its memory is planned when the shapes of its inputs are known.
ps_status read_network_options(const ps_program_options* options, ps_program_options* out) {
  PS_TRY(read_struct(options, out, "options"));
  ps_program_options zero{};
  zero.struct_size = out->struct_size;
  if (memcmp(out, &zero, sizeof(zero)) == 0) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "options: expected zeros for a general network, which has no tokens and pages");
}

ps_status build(ps_program* program) {
  if (program->model->graph.kind == KIND_NETWORK) return PS_OK;
  PS_TRY(make_plan(*program->model, *program->context, program->options, &program->plan));
  program->options.group_pages = nullptr;  // the caller owns the array; the plan has a copy
  const Plan& plan = program->plan;
  const struct {
    Region* region;
    int64_t bytes;
    const char* name;
  } parts[] = {{&program->temporaries, plan.temporary_bytes, "max_tokens"},
               {&program->scratch, plan.scratch_bytes, "max_tokens"},
               {&program->kv, plan.kv_bytes, "num_pages"},
               {&program->logits, plan.logits_bytes, "max_rows"}};
  for (const auto& part : parts) {
    if (part.region->allocate(part.bytes, true)) continue;
    return fail(PS_OUT_OF_MEMORY, "%s: the system refused %lld bytes", part.name, static_cast<long long>(part.bytes));
  }
  PS_TRY(find_work(*program->model, &program->work));
  return bind_program(program);
}

// Builds a second program, copies the KV pages and slots of the first into it, and swaps the two.
ps_status resize(ps_program* program, const ps_program_options& options) {
  ps_program other;
  other.model = hold(program->model);
  other.context = hold(program->context);
  other.options = options;
  other.flags = program->flags;
  other.ranks.steps = program->ranks.steps;
  PS_TRY(build(&other));
  const Graph& graph = program->model->graph;
  for (int32_t i = 0; i < graph.states.size(); ++i) {
    const State& state = graph.states[i];
    int64_t page_bytes;
    PS_TRY(page_bytes_of(state, options.kv_layout, &page_bytes));
    const Plan &to = other.plan, &from = program->plan;
    const int64_t num_pages = std::min(to.group_pages[state.group], from.group_pages[state.group]);
    memcpy(other.kv.data() + to.state_offsets[i], program->kv.data() + from.state_offsets[i],
           static_cast<size_t>(page_bytes * num_pages));
  }
  for (int32_t i = 0; i < std::min(program->options.num_slots, options.num_slots); ++i)
    other.batch.slots[i] = program->batch.slots[i];
  if (program->spans.on) PS_TRY(profile_program(&other, true));
  std::swap(static_cast<ProgramMemory&>(*program), static_cast<ProgramMemory&>(other));
  return PS_OK;
}

SampleSource source_of(const ps_program& program, int32_t num_rows) {
  const Graph& graph = program.model->graph;
  const bool has_logits = graph.tail < 0;
  return SampleSource{has_logits ? reinterpret_cast<const float*>(program.logits.data()) : nullptr,
                      num_rows,
                      graph.vocab_size,
                      program.batch.slots,
                      program.options.num_slots,
                      has_logits ? nullptr : reinterpret_cast<const int32_t*>(program.logits.data()),
                      graph.tail_k};
}

ps_status check_sample(const SampleSource& source, const ps_sampling& sampling, const ps_sampled& out) {
  PS_TRY(check_sampling(sampling, source));
  if (source.ids) PS_TRY(check_tail(sampling));
  return check_sampled(sampling, out, source);
}

// Returns true if a step needs only the best token of each row of logits.
bool needs_best_only(const ps_program& program, const ps_batch& b, const ps_sampling& s, const ps_sampled& out) {
  if (!kBuildsRanks || !program.ranks.gathers_head || b.flags & (PS_BATCH_LOGITS | PS_BATCH_ALL_RANKS)) return false;
  if (s.mask || s.history_starts || s.bias_starts) return false;
  if (program.model->graph.vocab_size < kBestFloats * all_ranks(*program.context)->world) return false;
  for (int32_t r = 0; r < s.num_rows; ++r) {
    const bool reports = out.logprobs && (!s.num_logprobs || s.num_logprobs[r] >= 0);
    if (s.temperature[r] > 0 || (s.target && s.target[r] >= 0) || reports) return false;
  }
  return true;
}

// Samples from the best tokens of the ranks.  Among equals the lowest rank wins, which has the lowest id.
ps_status sample_best(ps_program* program, const SampleSource& source, const ps_sampling& s, const ps_sampled& out) {
  const int32_t world = best_parts(*program->context);
  const BestTokens best = best_tokens(program->logits.data(), source.num_rows, world);
  SampleSource among = source;
  among.logits = best.values;
  among.vocab = world;
  PS_TRY(sample_rows(program->context, among, s, program->sample_scratch, out));
  for (int32_t r = 0; r < source.num_rows; ++r) {
    if (out.ids[r] >= 0) out.ids[r] = best.ids[int64_t{r} * world + out.ids[r]];
  }
  return PS_OK;
}

ps_status sample(ps_program* program, const SampleSource& source, const ps_sampling& s, const ps_sampled& out) {
  if (source.ids) {
    take_tail(source, out);
  } else if (kBuildsRanks && program->ranks.best_only) {
    PS_TRY(sample_best(program, source, s, out));
  } else {
    PS_TRY(sample_rows(program->context, source, s, program->sample_scratch, out));
  }
  for (int32_t r = 0; s.slot && r < s.num_rows; ++r) {
    if (s.slot[r] >= 0) program->batch.slots[s.slot[r]] = out.ids[r] >= 0 ? out.ids[r] : kFailedSlot;
  }
  return PS_OK;
}

const char* tail_name(const ps_program& program) {
  const Graph& graph = program.model->graph;
  return op_name(graph.nodes[graph.tail].op);
}

ps_status has_run(const ps_program* program) {
  return program->last.num_rows >= 0
             ? PS_OK
             : fail(PS_INVALID_ARGUMENT, "program: expected a step before its logits are asked for");
}

ps_status has_logits(const ps_program* program) {
  if (program->model->graph.output < 0)
    return fail(PS_UNSUPPORTED, "logits: a stage of a pipeline before the last has none");
  PS_TRY(has_run(program));
  if (!kBuildsRanks || !program->ranks.best_only) return PS_OK;
  return fail(
      PS_INVALID_ARGUMENT,
      "logits: expected a step that was asked for them (PS_BATCH_LOGITS), as ranks bring them together only then");
}

}  // namespace
}  // namespace ps

ps_status ps_program_plan(const ps_model* model, const ps_context* context, const ps_program_options* options,
                          ps_plan* out) {
  const FloatEnvironment environment;
  PS_TRY(check_open(model));
  PS_TRY(check_open(context));
  PS_TRY(require(out, "out"));
  PS_TRY(check_kind(model->graph, KIND_LANGUAGE_MODEL));
  ps_program_options o;
  PS_TRY(read_options(options, *model, &o));
  Plan plan;
  PS_TRY(make_plan(*model, *context, o, &plan));
  ps_plan result{};
  for (const Weight& weight : model->graph.weights) result.weight_bytes += weight.bytes;
  result.temporary_bytes = plan.temporary_bytes;
  result.scratch_bytes = plan.scratch_bytes;
  result.kv_bytes = plan.kv_bytes;
  result.logits_bytes = plan.logits_bytes;
  result.kv_page_bytes = plan.kv_page_bytes;
  result.total_bytes = result.weight_bytes;
  for (int64_t part : {plan.temporary_bytes, plan.scratch_bytes, plan.kv_bytes, plan.logits_bytes}) {
    if (!checked_add(result.total_bytes, part, &result.total_bytes))
      return fail(PS_INVALID_ARGUMENT, "options: the plan does not fit in memory");
  }
  return write_struct(result, out, "out");
}

ps_status ps::create_program(ps_model* model, ps_context* context, const ps_program_options* options, uint32_t flags,
                             ps_program** out) {
  const FloatEnvironment environment;
  PS_TRY(check_open(model));
  PS_TRY(check_open(context));
  PS_TRY(require(out, "out"));
  *out = nullptr;
  ps_program_options o;
  PS_TRY(model->graph.kind == KIND_NETWORK ? read_network_options(options, &o) : read_options(options, *model, &o));
  ps_program* program = create_object<ps_program>();
  if (!program) return fail(PS_OUT_OF_MEMORY, "program: out of memory");
  program->model = hold(model);
  program->context = hold(context);
  program->options = o;
  program->flags = flags;
  const ps_status status = build(program);
  if (status != PS_OK) {
    destroy_object(program);
    return status;
  }
  return open_handle(program, HANDLE_PROGRAM, out);
}

ps_status ps_program_create(ps_model* model, ps_context* context, const ps_program_options* options, ps_program** out) {
  return create_program(model, context, options, 0, out);
}

ps_status ps_program_resize(ps_program* program, const ps_program_options* options) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  ps_program_options o;
  PS_TRY(read_fields(options, &o));
  if (!o.kv_layout) o.kv_layout = program->options.kv_layout;
  if (o.kv_layout != program->options.kv_layout)
    return fail(PS_INVALID_ARGUMENT, "kv_layout: expected 0 or the program's own %d, got %d",
                program->options.kv_layout, o.kv_layout);
  if (program->ranks.num_in_flight > 0)
    return fail(PS_INVALID_ARGUMENT, "program: expected no step in flight, got %d", program->ranks.num_in_flight);
  return resize(program, o);
}

void ps_program_destroy(ps_program* program) { close_handle(program, HANDLE_PROGRAM); }

ps_status ps_program_run(ps_program* program, const ps_batch* batch) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  ps_batch b;
  PS_TRY(read_struct(batch, &b, "batch"));
  return run_program(program, b);
}

ps_status ps_program_follow(ps_program* program) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  if (!kBuildsRanks) return no_ranks();
  const ps_comm* comm = all_ranks(*program->context);
  if (!comm || comm->rank == 0)
    return fail(PS_INVALID_ARGUMENT, "program: expected one of a rank other than 0, which follows rank 0");
  return follow_program(program);
}

// The rows of the last step.
static ps_status sample_rows(ps_program* program, const ps_sampling* sampling, const ps_sampled* out) {
  ps_sampling s;
  ps_sampled o;
  PS_TRY(read_struct(sampling, &s, "sampling"));
  PS_TRY(read_struct(out, &o, "out"));
  const SampleSource source = source_of(*program, program->last.num_rows);
  PS_TRY(check_sample(source, s, o));
  return sample(program, source, s, o);
}

ps_status ps_program_sample(ps_program* program, const ps_sampling* sampling, const ps_sampled* out) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  PS_TRY(has_logits(program));
  return sample_rows(program, sampling, out);
}

ps_status ps_program_step(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                          const ps_sampled* out) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  ps_batch b;
  ps_sampling s;
  ps_sampled o;
  PS_TRY(read_struct(batch, &b, "batch"));
  PS_TRY(read_struct(sampling, &s, "sampling"));
  PS_TRY(read_struct(out, &o, "out"));
  if (b.num_rows < 0) return fail(PS_INVALID_ARGUMENT, "num_rows: expected 0 or more, got %d", b.num_rows);
  const SampleSource source = source_of(*program, b.num_rows);
  PS_TRY(check_sample(source, s, o));  // before the step, so that an error costs nothing
  PS_TRY(run_program(program, b, needs_best_only(*program, b, s, o)));
  return sample(program, source, s, o);
}

ps_status ps_program_launch(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                            const ps_sampled* out) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  ps_batch b;
  PS_TRY(read_struct(batch, &b, "batch"));
  if (!sampling) return launch_program(program, b, false);
  ps_sampling s;
  ps_sampled o;
  PS_TRY(read_struct(sampling, &s, "sampling"));
  PS_TRY(read_struct(out, &o, "out"));
  if (b.num_rows < 0) return fail(PS_INVALID_ARGUMENT, "num_rows: expected 0 or more, got %d", b.num_rows);
  PS_TRY(check_sample(source_of(*program, b.num_rows), s, o));
  return launch_program(program, b, needs_best_only(*program, b, s, o));
}

ps_status ps_program_collect(ps_program* program, const ps_sampling* sampling, const ps_sampled* out) {
  const FloatEnvironment environment;
  const Use use(program);
  PS_TRY(use.status());
  PS_TRY(collect_program(program));
  if (!sampling) return PS_OK;
  return sample_rows(program, sampling, out);
}

ps_status ps_program_logits(const ps_program* program, const float** logits, int32_t* num_rows, int32_t* vocab) {
  const Use use(program);
  PS_TRY(use.status());
  PS_TRY(require(logits && num_rows && vocab, "logits, num_rows, vocab"));
  if (program->model->graph.tail >= 0)
    return fail(PS_UNSUPPORTED, "logits: the graph ends in %s, which keeps none", tail_name(*program));
  PS_TRY(has_logits(program));
  *logits = reinterpret_cast<const float*>(program->logits.data());
  *num_rows = program->last.num_rows;
  *vocab = program->model->graph.vocab_size;
  return PS_OK;
}

ps_status ps_program_tail(const ps_program* program, const int32_t** ids, const float** values, int32_t* num_rows,
                          int32_t* k) {
  const Use use(program);
  PS_TRY(use.status());
  PS_TRY(require(ids && values && num_rows && k, "ids, values, num_rows, k"));
  const Graph& graph = program->model->graph;
  if (graph.tail < 0) return fail(PS_UNSUPPORTED, "tail: the graph ends in logits, not in argmax or topk");
  PS_TRY(has_run(program));
  const Node& node = graph.nodes[graph.tail];
  *ids = reinterpret_cast<const int32_t*>(program->logits.data());
  *values = node.num_outputs == 1
                ? nullptr
                : reinterpret_cast<const float*>(program->temporaries.data() + program->plan.offsets[node.outputs[0]]);
  *num_rows = program->last.num_rows;
  *k = graph.tail_k;
  return PS_OK;
}

ps_status ps_program_hidden(const ps_program* program, const float** hidden, int32_t* num_tokens, int32_t* width) {
  const Use use(program);
  PS_TRY(use.status());
  PS_TRY(require(hidden && num_tokens && width, "hidden, num_tokens, width"));
  const int32_t value = program->model->graph.hidden;
  if (value < 0) {
    return fail(PS_UNSUPPORTED,
                "hidden: expected a graph that picks its output rows by one gather_rows of f32 [T, n], got another");
  }
  PS_TRY(has_run(program));
  if (!program->batch.has_hidden)
    return fail(PS_INVALID_ARGUMENT, "hidden: expected a step that was asked for them (PS_BATCH_HIDDEN)");
  *hidden = reinterpret_cast<const float*>(program->temporaries.data() + program->plan.offsets[value]);
  *num_tokens = static_cast<int32_t>(program->last.symbols[ROLE_TOKENS]);
  *width = static_cast<int32_t>(program->model->graph.values[value].row_elements);
  return PS_OK;
}
