// The rows of the op table, and their parsed schemas.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/build.h"
#include "ops/loaded.h"

namespace ps {

namespace {

// An op that is not built keeps its name and schema, for messages.
constexpr OpRow make_row(const char* name, int32_t version, const char* schema, decltype(OpRow::infer) infer,
                         decltype(OpRow::phases) phases, decltype(OpRow::scratch) scratch, bool row_wise) {
  return builds_op(name) ? OpRow{name, version, schema, infer, phases, scratch, row_wise}
                         : OpRow{name, version, schema, nullptr, nullptr, nullptr, row_wise};
}

}  // namespace

const OpRow kOps[NUM_OPS] = {
#ifdef PENSTOCK_OP_NAMES  // core/tools/generate/bundle_ops.cpp reads bundles but runs nothing
#define PS_OP(id, name, version, schema, ...) OpRow{#name, version, schema, nullptr, nullptr, nullptr, false},
#else
#define PS_OP(id, name, version, schema, infer, phases, scratch, row_wise) \
  make_row(#name, version, schema, infer, phases, scratch, row_wise),
#endif
#include "ops/op_list.inc"
};

const char* const kRoleNames[NUM_ROLES] = {"T", "B", "P", "R"};

namespace {

// Signatures in the order of first use: a graph uses few ops, and only pages that are written take memory.
Signature signatures[NUM_OPS];
int32_t num_parsed;
const Signature* signature_of[NUM_OPS];  // null until its schema is parsed
pthread_mutex_t parse_mutex = PTHREAD_MUTEX_INITIALIZER;

const Signature& parse_once(int32_t op) {
  pthread_mutex_lock(&parse_mutex);
  const Signature* parsed = signature_of[op];
  if (!parsed) {
    parse_schema(kOps[op].schema, false, &signatures[num_parsed]);
    parsed = &signatures[num_parsed++];
    __atomic_store_n(&signature_of[op], parsed, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&parse_mutex);
  return *parsed;
}

const char* type_name(int32_t type) {
  static const char* const names[] = {"nothing", "int", "float", "string", "bool", "int[]"};
  return type >= 0 && type <= ATTR_INTS ? names[type] : "unknown";
}

ps_status bind_one(const AttrRow& row, const Attr& attr, AttrValue* out) {
  const int32_t stored = row.type == ATTR_BOOL ? ATTR_INT : row.type == ATTR_INTS ? ATTR_STRING : row.type;
  if (attr.type != stored) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected an attribute of type %s, got type %s", PS_STR(row.name),
                type_name(row.type), type_name(attr.type >= ATTR_BOOL ? -1 : attr.type));
  }
  if (row.type == ATTR_BOOL && attr.i != 0 && attr.i != 1) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected 0 or 1, got %lld", PS_STR(row.name),
                static_cast<long long>(attr.i));
  }
  if (row.type == ATTR_FLOAT && !isfinite(static_cast<float>(attr.f))) {
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected a finite number, got %g", PS_STR(row.name), attr.f);
  }
  *out = AttrValue{attr.i, attr.f, attr.s, nullptr};
  return PS_OK;
}

}  // namespace

const Signature& signature(int32_t op) {
  if (op >= NUM_OPS) return loaded_op(op - NUM_OPS).signature;
  const Signature* parsed = __atomic_load_n(&signature_of[op], __ATOMIC_ACQUIRE);
  return parsed ? *parsed : parse_once(op);
}

const LoadedOp* as_loaded(int32_t op) { return op < NUM_OPS ? nullptr : &loaded_op(op - NUM_OPS); }
const OpRow& op_row(int32_t op) { return op < NUM_OPS ? kOps[op] : loaded_op(op - NUM_OPS).row; }
bool is_built(int32_t op) { return op >= NUM_OPS || kOps[op].infer; }

ps_status infer_op(int32_t op, const Spec* in, AttrValue* attrs, Spec* out) {
  return op < NUM_OPS ? kOps[op].infer(in, attrs, out) : infer_loaded(loaded_op(op - NUM_OPS), in, attrs, out);
}

Phases phases_of(int32_t op, const Call& call) {
  return op < NUM_OPS ? kOps[op].phases(call) : Phases{&loaded_op(op - NUM_OPS).phase, 1};
}

bool takes_scratch(int32_t op) {
  return op < NUM_OPS ? kOps[op].scratch != nullptr : loaded_op(op - NUM_OPS).op.scratch != nullptr;
}

ps_status scratch_of(int32_t op, const Call& call, Scratch* out) {
  if (op >= NUM_OPS) return loaded_scratch(loaded_op(op - NUM_OPS), call, out);
  return kOps[op].scratch ? kOps[op].scratch(call, out) : PS_OK;
}

int32_t find_op(Str name) {
  for (int32_t i = 0; i < NUM_OPS; ++i) {
    if (equal(name, kOps[i].name)) return i;
  }
  const int32_t loaded = find_loaded_op(name);
  return loaded < 0 ? -1 : NUM_OPS + loaded;
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

ps_status evaluate_lists(int32_t op, const SizeNames& names, AttrValue* attrs, int64_t* storage) {
  const Signature& sig = signature(op);
  for (int32_t i = 0; i < sig.num_attrs; ++i) {
    if (sig.attrs[i].type != ATTR_INTS) continue;
    int64_t* const list = storage + i * kMaxListLen;
    int32_t count = 0;
    const ps_status status = evaluate_sizes(attrs[i].s, names, list, &count);
    if (status != PS_OK) return prefix(status, "%.*s: ", PS_STR(sig.attrs[i].name));
    attrs[i].i = count;
    attrs[i].list = list;
  }
  return PS_OK;
}

ps_status check_operands(int32_t op, const Spec* in, int32_t count) {
  static const char* const kinds[] = {"nothing", "a value", "a weight", "a state"};
  const Signature& sig = signature(op);
  if (count != sig.num_arguments) {
    return fail(PS_INVALID_ARGUMENT, "inputs: expected %d for %s, got %d", sig.num_arguments, op_row(op).schema, count);
  }
  for (int32_t i = 0; i < count; ++i) {
    const Argument& argument = sig.arguments[i];
    if (in[i].kind == OPERAND_NONE && argument.optional) continue;
    if (in[i].kind != argument.kind) {
      return fail(PS_INVALID_ARGUMENT, "%.*s: expected %s, got %s", PS_STR(argument.name), kinds[argument.kind],
                  kinds[in[i].kind]);
    }
    if (in[i].kind == OPERAND_STATE && (in[i].layout == kStatePages) != keeps_state(op)) {
      return fail(
          PS_INVALID_ARGUMENT, "%.*s: expected %s", PS_STR(argument.name),
          keeps_state(op) ? "a recurrent state, got keys and values" : "keys and values, got a recurrent state");
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
