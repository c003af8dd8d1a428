// The functions of penstock_dev.h that run a single op, or sample without a program.
#include <stdio.h>

#include "api/api.h"
#include "exchange/exchange.h"
#include "ops/layout.h"
#include "ops/loaded.h"
#include "program/pages.h"
#include "sampling/sample.h"

namespace ps {
namespace {

// One op on the caller's tensors, and the memory that it needs.
struct OpRun {
  int32_t op;
  Call call;
  Region scratch;
  Vec<int32_t> token_request;
  Vec<PageOwner> owners;
  OpFailure failure;
  Exchange exchange;
  int64_t lists[kMaxAttrs * kMaxListLen];
};

ps_status read_dims(const ps_tensor& t, const char* name, bool general, Spec* spec) {
  if (t.ndim < (general ? 0 : 1) || t.ndim > (general ? kMaxRank : 4))
    return fail(PS_INVALID_ARGUMENT, "%s: expected %s dims, got %d", name, general ? "0 to 6" : "1 to 4", t.ndim);
  int64_t elements = 1;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.dims[i] < 0 || t.dims[i] > kMaxDim || !checked_mul(elements, t.dims[i], &elements)) {
      return fail(PS_INVALID_ARGUMENT, "%s: expected dims of 0 to 2^31, got %lld", name,
                  static_cast<long long>(t.dims[i]));
    }
    spec->dims[i] = constant(t.dims[i]);
  }
  spec->rank = t.ndim;
  spec->dtype = t.dtype;
  return PS_OK;
}

ps_status read_state(const ps_tensor& t, const char* name, Spec* spec, Tensor* tensor) {
  if (t.layout == kStatePages) {
    if (t.ndim != 3 || t.dims[0] < 1 || t.dims[0] > INT32_MAX || t.dims[1] < 1 || t.dims[1] > kMaxHeads ||
        t.dims[2] < 1 || t.dims[2] > kMaxStateElements / t.dims[1])
      return fail(PS_INVALID_ARGUMENT, "%s: expected a recurrent state [pages, heads up to %d, numbers of a head]",
                  name, kMaxHeads);
    spec->group = -1;
    return kv_page_bytes(t.layout, StateShape{static_cast<int32_t>(t.dims[1]), static_cast<int32_t>(t.dims[2]), 0},
                         &tensor->row_stride);
  }
  const bool of_latents = t.ndim == 4;
  if ((t.ndim != 3 && !of_latents) || t.dims[0] < 1 || t.dims[0] > INT32_MAX || t.dims[1] < 1 ||
      t.dims[1] > kMaxHeads || t.dims[2] < 1 || t.dims[2] > kMaxHeadDim) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected a state [pages, heads up to %d, head_dim up to %d]", name, kMaxHeads,
                kMaxHeadDim);
  }
  if (of_latents && (t.dims[1] != 1 || t.dims[3] < 1 || t.dims[3] >= t.dims[2])) {
    return fail(PS_INVALID_ARGUMENT, "%s: expected a state of latents [pages, 1, head_dim, less than head_dim]", name);
  }
  spec->group = -1;
  const StateShape shape{static_cast<int32_t>(t.dims[1]), static_cast<int32_t>(t.dims[2]),
                         of_latents ? static_cast<int32_t>(t.dims[3]) : 0};
  return kv_page_bytes(t.layout, shape, &tensor->row_stride);
}

// The largest value of an array of indices, plus one; 0 if one is negative.
int64_t bound_of(const ps_tensor& t) {
  const int32_t* p = static_cast<const int32_t*>(t.data);
  int32_t largest = 0;
  const int64_t count = t.dims[0] * (t.ndim == 2 ? t.dims[1] : 1);
  for (int64_t i = 0; i < count; ++i) {
    if (p[i] < 0) return 0;
    if (p[i] > largest) largest = p[i];
  }
  return static_cast<int64_t>(largest) + 1;
}

ps_status read_tensor(const ps_tensor& t, const Argument& argument, bool general, Spec* spec, Tensor* tensor) {
  char name[32];
  snprintf(name, sizeof(name), "%.*s", PS_STR(argument.name));
  memset(spec, 0, sizeof(*spec));
  memset(tensor, 0, sizeof(*tensor));
  if (!t.data && argument.optional) return PS_OK;
  if (!t.data && (t.ndim < 1 || (!general && t.dims[0] != 0)))
    return fail(PS_INVALID_ARGUMENT, "%s: expected data, got null", name);
  PS_TRY(read_dims(t, name, general, spec));
  spec->kind = argument.kind;
  spec->layout = t.layout;
  tensor->row_stride = t.row_stride;
  if (argument.kind == OPERAND_STATE) PS_TRY(read_state(t, name, spec, tensor));
  if (argument.kind == OPERAND_WEIGHT) {
    int64_t bytes;
    if (t.ndim != 2) return fail(PS_INVALID_ARGUMENT, "%s: expected a weight [rows, cols], got %d dims", name, t.ndim);
    const ps_status status = checked_bytes(t.layout, t.dims[0], t.dims[1], &bytes);
    if (status != PS_OK) return prefix(status, "%s: ", name);
  }
  if (argument.kind == OPERAND_VALUE && general) {
    tensor->row_stride = 1;
    for (int32_t i = 1; i < t.ndim; ++i) tensor->row_stride *= t.dims[i];
  } else if (argument.kind == OPERAND_VALUE) {
    int64_t row = 1;
    for (int32_t i = 1; i < t.ndim; ++i) row *= t.dims[i];
    if (t.dims[0] > 1 && t.row_stride < row) {
      return fail(PS_INVALID_ARGUMENT, "%s: expected a row stride of at least %lld, got %lld", name,
                  static_cast<long long>(row), static_cast<long long>(t.row_stride));
    }
    if (t.dtype == PS_I32 && t.ndim == 1) {
      if (t.dims[0] > 1 && t.row_stride != 1) return fail(PS_INVALID_ARGUMENT, "%s: expected contiguous indices", name);
      spec->bound = constant(bound_of(t));
    }
    if (t.dtype == PS_I32 && t.ndim > 1 && t.dims[0] > 1 && t.row_stride != row)
      return fail(PS_INVALID_ARGUMENT, "%s: expected contiguous indices", name);
    if (t.dtype == PS_I32 && t.ndim == 2) spec->bound = constant(bound_of(t));
  }
  tensor->data = static_cast<uint8_t*>(t.data);
  tensor->dtype = t.dtype;
  tensor->rank = t.ndim;
  tensor->layout = t.layout;
  memcpy(tensor->dims, t.dims, sizeof(tensor->dims));
  return PS_OK;
}

ps_status read_attrs(int32_t op, const ps_attr* attrs, int32_t count, AttrValue* out) {
  if (count < 0 || count > kMaxAttrs || (count && !attrs))
    return fail(PS_INVALID_ARGUMENT, "num_attrs: expected 0 to %d, got %d", kMaxAttrs, count);
  Attr bound[kMaxAttrs] = {};
  for (int32_t i = 0; i < count; ++i) {
    if (!attrs[i].name) return fail(PS_INVALID_ARGUMENT, "attrs[%d].name: expected a string, got null", i);
    const char* s = attrs[i].s ? attrs[i].s : "";
    bound[i] = Attr{Str{attrs[i].name, static_cast<uint32_t>(strlen(attrs[i].name))}, attrs[i].type, attrs[i].i,
                    attrs[i].f, Str{s, static_cast<uint32_t>(strlen(s))}};
  }
  return bind_attrs(op, bound, count, out);
}

// The arguments `positions`, `request_starts`, `page_tables` from `at` on, and the state.
ps_status check_ragged(OpRun* run, int32_t at, int32_t state, int32_t group_attr, int32_t window) {
  const Call& c = run->call;
  const Tensor& tables = c.in[at + 2];
  if (c.in[at + 1].dims[0] != tables.dims[1] + 1) {
    return fail(PS_INVALID_ARGUMENT,
                "request_starts: expected %lld entries, one more than page_tables has requests, got %lld",
                static_cast<long long>(tables.dims[1] + 1), static_cast<long long>(c.in[at + 1].dims[0]));
  }
  if (c.in[at].dims[0] > INT32_MAX || tables.dims[1] > INT32_MAX || tables.dims[2] > kMaxContextLen / PS_PAGE_TOKENS) {
    return fail(PS_INVALID_ARGUMENT, "page_tables: expected at most %d entries a request, got %lld",
                kMaxContextLen / PS_PAGE_TOKENS, static_cast<long long>(tables.dims[2]));
  }
  const int32_t group = static_cast<int32_t>(c.attrs[group_attr].i);
  Ragged batch{reinterpret_cast<const int32_t*>(c.in[at].data),
               reinterpret_cast<const int32_t*>(c.in[at + 1].data),
               reinterpret_cast<const int32_t*>(tables.data) + group * tables.dims[1] * tables.dims[2],
               static_cast<int32_t>(c.in[at].dims[0]),
               static_cast<int32_t>(tables.dims[1]),
               static_cast<int32_t>(tables.dims[2])};
  PS_TRY(check_requests(batch, kMaxContextLen));
  if (run->op == OP_DISENTANGLED_ATTENTION) PS_TRY(check_whole_requests(batch));
  const int32_t num_pages = static_cast<int32_t>(c.in[state].dims[0]);
  if (!run->owners.resize(num_pages) || !run->token_request.resize(batch.num_tokens))
    return fail(PS_OUT_OF_MEMORY, "out of memory");
  PS_TRY(check_page_table(batch, group, window, num_pages, run->owners.data(), 1));
  if (keeps_state(run->op))
    PS_TRY(check_state_positions(batch, group, c.in[state].data, c.in[state].row_stride, c.in[state].dims[2],
                                 run->op == OP_PREFIX_LENGTHS));
  fill_token_request(batch, run->token_request.data());
  run->call.token_request = run->token_request.data();
  return PS_OK;
}

ps_status prepare(OpRun* run, ps_context* context, const ps_tensor* tensors, int32_t num_tensors) {
  const Signature& sig = signature(run->op);
  Call& c = run->call;
  if (num_tensors != sig.num_arguments + sig.num_outputs) {
    return fail(PS_INVALID_ARGUMENT, "num_tensors: expected %d for %s, got %d", sig.num_arguments + sig.num_outputs,
                op_row(run->op).schema, num_tensors);
  }
  Spec in[kMaxOperands], out[kMaxOutputs] = {};
  const bool general = is_general(run->op);
  for (int32_t i = 0; i < sig.num_arguments; ++i)
    PS_TRY(read_tensor(tensors[i], sig.arguments[i], general, &in[i], &c.in[i]));
  if (run->op == OP_GATHER_ROWS && in[kGatherRowsRows].bound.offset >= 1 &&
      in[kGatherRowsRows].bound.offset <= in[0].dims[0].offset) {
    in[kGatherRowsRows].bound = in[0].dims[0];  // the indices were checked: all are below the number of rows
  }
  PS_TRY(check_operands(run->op, in, sig.num_arguments));
  PS_TRY(evaluate_lists(run->op, SizeNames{}, c.attrs, run->lists));
  PS_TRY(infer_op(run->op, in, c.attrs, out));
  for (int32_t i = 0; i < sig.num_outputs; ++i) {
    const Argument argument{Str{"output", 6}, OPERAND_VALUE, false};
    Spec given;
    const ps_tensor& t = tensors[sig.num_arguments + i];
    PS_TRY(read_dims(t, "output", general, &given));
    if (!same_type(given, out[i])) {
      return fail(PS_INVALID_ARGUMENT, "output %d: expected %s, got %s", i, describe(out[i]).text,
                  describe(given).text);
    }
    ps_tensor unread = t;
    unread.dtype = PS_F32;  // its contents are not read
    PS_TRY(read_tensor(unread, argument, general, &given, &c.out[i]));
    c.out[i].dtype = t.dtype;
  }
  const Membership member = membership_of(run->op, c.attrs);
  if (member.world > 1) {
    if (!context->comm || !member.fits(*context->comm))
      return fail(PS_INVALID_ARGUMENT, "rank: expected a context with the comm of rank %d of %d", member.rank,
                  member.world);
    if (part_bytes(run->op, c) > context->comm->part_bytes)
      return fail(PS_INVALID_ARGUMENT, "part_bytes: expected a comm of at least %lld",
                  static_cast<long long>(part_bytes(run->op, c)));
    run->exchange.comm = run->exchange.links = context->comm;
    c.exchange = &run->exchange;
  }
  c.kernels = context->kernels;
  c.loaded = as_loaded(run->op);
  c.failure = &run->failure;
  return PS_OK;
}

struct PhaseRun {
  const Call* call;
  const Phase* phase;
  int64_t items;
  int32_t num_threads;
};

void run_phase(void* argument, int32_t thread) {
  const PhaseRun* run = static_cast<PhaseRun*>(argument);
  int64_t begin, end;
  split(run->items, thread, run->num_threads, &begin, &end);
  if (begin < end) run->phase->run(*run->call, begin, end, thread);
}

ps_status run_op(OpRun* run, ps_context* context) {
  Call& c = run->call;
  const int32_t num_threads = context->pool.num_threads();
  Scratch scratch{0, 0};
  if (takes_scratch(run->op)) PS_TRY(scratch_of(run->op, c, &scratch));
  int64_t bytes;
  if (!checked_mul(scratch.per_thread, num_threads, &bytes) ||
      !checked_add(bytes, round_up(scratch.shared, 64), &bytes) || !run->scratch.allocate(bytes)) {
    return fail(PS_OUT_OF_MEMORY, "out of memory");
  }
  c.scratch = run->scratch.data();
  c.thread_scratch = run->scratch.data() + round_up(scratch.shared, 64);
  c.thread_scratch_bytes = scratch.per_thread;
  const Phases phases = phases_of(run->op, c);
  for (int32_t i = 0; i < phases.count; ++i) {
    PhaseRun job{&c, &phases.first[i], phases.first[i].items(c), num_threads};
    if (job.items == 0) continue;
    if (job.items == 1) {  // waking other threads does not pay
      job.num_threads = 1;
      run_phase(&job, 0);
    } else {
      PS_TRY(context->pool.run(run_phase, &job));
    }
  }
  if (run->exchange.status != PS_OK) return fail(run->exchange.status, "%s", run->exchange.message);
  return take_failure(&run->failure);
}

}  // namespace
}  // namespace ps

using namespace ps;

ps_status ps_op_run(ps_context* context, const char* op, const ps_tensor* tensors, int32_t num_tensors,
                    const ps_attr* attrs, int32_t num_attrs) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(op && tensors, "op, tensors"));
  OpRun run{};
  run.op = find_op(Str{op, static_cast<uint32_t>(strlen(op))});
  if (run.op < 0) return fail(PS_UNSUPPORTED, "op: \"%s\" is not in the op table", op);
  if (!is_built(run.op)) return fail(PS_UNSUPPORTED, "op: this build leaves out \"%s\"", op);
  ps_status status = read_attrs(run.op, attrs, num_attrs, run.call.attrs);
  if (status == PS_OK) status = prepare(&run, context, tensors, num_tensors);
  if (status == PS_OK && appends_to_pages(run.op))  // older pages it does not read
    status = check_ragged(&run, kKvAppendPositions, kKvAppendState, kKvAppendGroup, 1);
  if (status == PS_OK && run.op == OP_CONTEXT_ATTENTION && run.call.attrs[world_at(OP_CONTEXT_ATTENTION)].i > 1)
    status = fail(PS_UNSUPPORTED, "world: expected 1 outside a program, which deals pages out to ranks");
  if (status == PS_OK && run.op == OP_SHORT_CONV) {
    const int32_t window = static_cast<int32_t>(run.call.attrs[kShortConvWindow].i);
    status = check_ragged(&run, kAttentionPositions, kAttentionState, kShortConvGroup, window);
  }
  if (status == PS_OK && is_gated_delta(run.op))
    status = check_ragged(&run, kGatedDeltaPositions, kGatedDeltaState, kGatedDeltaGroup, kStateWindow);
  if (status == PS_OK && run.op == OP_SSM_SCAN)
    status = check_ragged(&run, kSsmScanPositions, kSsmScanState, kSsmScanGroup, kStateWindow);
  if (status == PS_OK && run.op == OP_PREFIX_LENGTHS)
    status = check_ragged(&run, kPrefixPositions, kPrefixState, kPrefixGroup, kStateWindow);
  if (status == PS_OK && is_attention(run.op)) {
    const int32_t window = static_cast<int32_t>(run.call.attrs[kAttentionWindow].i);
    status = check_ragged(&run, kAttentionPositions, kAttentionState, kAttentionGroup, window);
  }
  if (status == PS_OK) status = run_op(&run, context);
  return status == PS_OK ? PS_OK : prefix(status, "%s: ", op);
}

const char* ps_op_schema(int32_t index) {
  static char texts[NUM_OPS][384];
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] {
    for (int32_t i = 0; i < NUM_OPS; ++i) {
      snprintf(texts[i], sizeof(texts[i]), "%s.%d %s", kOps[i].name, kOps[i].version, kOps[i].schema);
    }
  });
  if (index < 0 || index >= NUM_OPS + num_loaded_ops()) return nullptr;
  return index < NUM_OPS ? texts[index] : loaded_op(index - NUM_OPS).text;
}

ps_status ps_sample(ps_context* context, const float* logits, int32_t vocab, const ps_sampling* sampling,
                    const ps_sampled* out) {
  const FloatEnvironment environment;
  ps_sampling s;
  ps_sampled o;
  PS_TRY(read_struct(sampling, &s, "sampling"));
  PS_TRY(read_struct(out, &o, "out"));
  if (s.num_rows < 0) return fail(PS_INVALID_ARGUMENT, "num_rows: expected 0 or more, got %d", s.num_rows);
  PS_TRY(check_open(context));
  PS_TRY(require((logits || s.num_rows == 0), "logits"));
  if (vocab < 1) return fail(PS_INVALID_ARGUMENT, "vocab: expected 1 or more, got %d", vocab);
  const SampleSource source{logits, s.num_rows, vocab, nullptr, 0, nullptr, 0};
  PS_TRY(check_sampling(s, source));
  PS_TRY(check_sampled(s, o, source));
  Region scratch;
  if (!scratch.allocate(sample_scratch_bytes(vocab) * context->pool.num_threads()))
    return fail(PS_OUT_OF_MEMORY, "out of memory");
  return sample_rows(context, source, s, scratch.data(), o);
}
