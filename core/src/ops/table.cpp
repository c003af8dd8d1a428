// The rows of the op table, and their parsed schemas.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/build.h"
#include "ops/loaded.h"

namespace ps {

namespace {

// An op that the build leaves out keeps its name and schema, for messages.
constexpr OpRow row(const char* name, int32_t version, const char* schema, decltype(OpRow::infer) infer,
                    decltype(OpRow::phases) phases, decltype(OpRow::scratch) scratch) {
  return builds_op(name) ? OpRow{name, version, schema, infer, phases, scratch}
                         : OpRow{name, version, schema, nullptr, nullptr, nullptr};
}
#ifdef PENSTOCK_OP_NAMES  // core/tools/generate/bundle_ops.cpp reads bundles and runs nothing
#define row(name, version, schema, infer, phases, scratch) \
  OpRow { name, version, schema, nullptr, nullptr, nullptr }
#endif

}  // namespace

#define PS_BATCH "Tensor positions, Tensor request_starts, Tensor page_tables"
const OpRow kOps[kNumOps] = {
    row("embedding", 1, "(Tensor ids, Weight weight, *, int dim) -> Tensor",
        infer_embedding, embedding_phases, nullptr),
    row("linear", 1, "(Tensor x, Weight weight, Weight? bias, *, int out_features, str scheme) -> Tensor",
        infer_linear, linear_phases, linear_scratch),
    row("rms_norm", 1, "(Tensor x, Weight weight, *, float eps) -> Tensor",
        infer_rms_norm, rms_norm_phases, nullptr),
    row("add_rms_norm", 1, "(Tensor x, Tensor residual, Weight weight, *, float eps) -> (Tensor, Tensor)",
        infer_add_rms_norm, add_rms_norm_phases, nullptr),
    row("layer_norm", 1, "(Tensor x, Weight weight, Weight? bias, *, float eps) -> Tensor",
        infer_layer_norm, layer_norm_phases, nullptr),
    row("rotary_embedding", 1, "(Tensor positions, Weight inv_freq, *, float scaling) -> Tensor",
        infer_rotary_embedding, rotary_embedding_phases, nullptr),
    row("rope", 1, "(Tensor x, Tensor cos_sin, *, bool interleaved) -> Tensor",
        infer_rope, rope_phases, nullptr),
    row("kv_append", 1, "(Tensor k, Tensor v, State(a!) state, " PS_BATCH ", *, int group) -> ()",
        infer_kv_append, kv_append_phases, nullptr),
    row("attention", 1, "(Tensor q, State state, " PS_BATCH
        ", Weight? alibi, *, float scale, int group, bool causal, int window, float softcap) -> Tensor",
        infer_attention, attention_phases, attention_scratch),
    row("silu_mul", 1, "(Tensor gate, Tensor up) -> Tensor",
        infer_binary, silu_mul_phases, nullptr),
    row("gelu", 1, "(Tensor x, *, str approximate) -> Tensor",
        infer_gelu, gelu_phases, nullptr),
    row("add", 1, "(Tensor a, Tensor b) -> Tensor",
        infer_binary, add_phases, nullptr),
    row("mul", 1, "(Tensor a, Tensor b) -> Tensor",
        infer_binary, mul_phases, nullptr),
    row("gather_rows", 1, "(Tensor x, Tensor rows) -> Tensor",
        infer_gather_rows, gather_rows_phases, nullptr),
    row("all_reduce", 1, "(Tensor x) -> Tensor",
        infer_all_reduce, all_reduce_phases, nullptr),
    row("argmax", 1, "(Tensor logits) -> Tensor",
        infer_argmax, argmax_phases, nullptr),
    row("topk", 1, "(Tensor logits, *, int k) -> (Tensor, Tensor)",
        infer_topk, topk_phases, topk_scratch),
};
#undef PS_BATCH
#undef row

const char* const kRoleNames[NUM_ROLES] = {"T", "B", "P", "R"};

namespace {

Signature signatures[kNumOps];
pthread_once_t parse_once = PTHREAD_ONCE_INIT;

void parse_all() {
  for (int32_t i = 0; i < kNumOps; ++i) parse_schema(kOps[i].schema, false, &signatures[i]);
}

const char* type_name(int32_t type) {
  static const char* const names[] = {"nothing", "int", "float", "string", "bool"};
  return type >= 0 && type <= ATTR_BOOL ? names[type] : "unknown";
}

ps_status bind_one(const AttrRow& row, const Attr& attr, AttrValue* out) {
  const int32_t stored = row.type == ATTR_BOOL ? ATTR_INT : row.type;
  if (attr.type != stored) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected an attribute of type %s, found type %s", PS_STR(row.name),
                type_name(row.type), type_name(attr.type == ATTR_BOOL ? -1 : attr.type));
  }
  if (row.type == ATTR_BOOL && attr.i != 0 && attr.i != 1) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected 0 or 1, found %lld", PS_STR(row.name),
                static_cast<long long>(attr.i));
  }
  if (row.type == ATTR_FLOAT && !isfinite(static_cast<float>(attr.f))) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected a finite number, found %g", PS_STR(row.name), attr.f);
  }
  *out = AttrValue{attr.i, attr.f, attr.s};
  return PS_OK;
}

}  // namespace

const Signature& signature(int32_t op) {
  if (op >= kNumOps) return loaded_op(op - kNumOps).signature;
  pthread_once(&parse_once, parse_all);
  return signatures[op];
}

const LoadedOp* as_loaded(int32_t op) { return op < kNumOps ? nullptr : &loaded_op(op - kNumOps); }
const OpRow& op_row(int32_t op) { return op < kNumOps ? kOps[op] : loaded_op(op - kNumOps).row; }
bool is_built(int32_t op) { return op >= kNumOps || kOps[op].infer; }

ps_status infer_op(int32_t op, const Spec* in, AttrValue* attrs, Spec* out) {
  return op < kNumOps ? kOps[op].infer(in, attrs, out) : infer_loaded(loaded_op(op - kNumOps), in, attrs, out);
}

Phases phases_of(int32_t op, const Call& call) {
  return op < kNumOps ? kOps[op].phases(call) : Phases{&loaded_op(op - kNumOps).phase, 1};
}

bool takes_scratch(int32_t op) {
  return op < kNumOps ? kOps[op].scratch != nullptr : loaded_op(op - kNumOps).op.scratch != nullptr;
}

ps_status scratch_of(int32_t op, const Call& call, Scratch* out) {
  if (op >= kNumOps) return loaded_scratch(loaded_op(op - kNumOps), call, out);
  return kOps[op].scratch ? kOps[op].scratch(call, out) : PS_OK;
}

int32_t find_op(Str name) {
  for (int32_t i = 0; i < kNumOps; ++i) {
    if (equal(name, kOps[i].name)) return i;
  }
  const int32_t loaded = find_loaded_op(name);
  return loaded < 0 ? -1 : kNumOps + loaded;
}

ps_status bind_attrs(int32_t op, const Attr* attrs, int32_t count, AttrValue* out) {
  const Signature& sig = signature(op);
  bool given[kMaxAttrs] = {};
  for (int32_t i = 0; i < count; ++i) {
    int32_t slot = 0;
    while (slot < sig.num_attrs && !equal(sig.attrs[slot].name, attrs[i].name)) ++slot;
    if (slot == sig.num_attrs) {
      return fail(PS_INVALID_ARGUMENT, "%.*s: not an attribute of %s %s", PS_STR(attrs[i].name), op_name(op),
                  op_row(op).schema);
    }
    if (given[slot]) return fail(PS_INVALID_ARGUMENT, "%.*s: the attribute is given twice", PS_STR(attrs[i].name));
    given[slot] = true;
    PS_TRY(bind_one(sig.attrs[slot], attrs[i], &out[slot]));
  }
  for (int32_t slot = 0; slot < sig.num_attrs; ++slot) {
    if (!given[slot]) return fail(PS_INVALID_ARGUMENT, "%.*s: the attribute is missing", PS_STR(sig.attrs[slot].name));
  }
  return PS_OK;
}

ps_status check_operands(int32_t op, const Spec* in, int32_t count) {
  static const char* const kinds[] = {"nothing", "a value", "a weight", "a state"};
  const Signature& sig = signature(op);
  if (count != sig.num_arguments) {
    return fail(PS_INVALID_ARGUMENT, "inputs: expected %d for %s, found %d", sig.num_arguments, op_row(op).schema, count);
  }
  for (int32_t i = 0; i < count; ++i) {
    const Argument& argument = sig.arguments[i];
    if (in[i].kind == OPERAND_NONE && argument.optional) continue;
    if (in[i].kind != argument.kind) {
      return fail(PS_INVALID_ARGUMENT, "%.*s: expected %s, found %s", PS_STR(argument.name), kinds[argument.kind],
                  kinds[in[i].kind]);
    }
  }
  return PS_OK;
}

bool same_type(const Spec& a, const Spec& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int32_t i = 0; i < a.rank; ++i) {
    if (!equal(a.dims[i], b.dims[i])) return false;
  }
  return true;
}

TypeText describe(const Spec& spec) {
  TypeText out;
  const char* dtype = dtype_name(spec.dtype);
  size_t used = static_cast<size_t>(snprintf(out.text, sizeof(out.text), "%s [", dtype ? dtype : "?"));
  for (int32_t i = 0; i < spec.rank && used < sizeof(out.text); ++i) {
    const Dim& d = spec.dims[i];
    char text[64];
    if (is_constant(d)) {
      snprintf(text, sizeof(text), "%lld", static_cast<long long>(d.offset));
    } else {
      const char* name = kRoleNames[d.symbol];
      int n = d.factor == 1 ? snprintf(text, sizeof(text), "%s", name)
                            : snprintf(text, sizeof(text), "%lld*%s", static_cast<long long>(d.factor), name);
      if (d.offset)
        snprintf(text + n, sizeof(text) - static_cast<size_t>(n), "%+lld", static_cast<long long>(d.offset));
    }
    used += static_cast<size_t>(snprintf(out.text + used, sizeof(out.text) - used, "%s%s", i ? ", " : "", text));
  }
  if (used < sizeof(out.text)) snprintf(out.text + used, sizeof(out.text) - used, "]");
  return out;
}

}  // namespace ps
