// Registration of custom ops, calls of their functions, and op failures.
#include "ops/loaded.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <atomic>

#include "base/float_environment.h"
#include "ops/failure.h"

namespace ps {
namespace {

constexpr int32_t kMaxLoaded = 256;
// Rows are added under the lock and never change, so a thread that has read the count may read them without the lock.
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
LoadedOp* rows[kMaxLoaded];
std::atomic<int32_t> num_rows;

bool is_word(const char* begin, const char* end) {
  if (begin == end || (*begin >= '0' && *begin <= '9')) return false;
  for (const char* p = begin; p < end; ++p) {
    if (!((*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9') || *p == '_')) return false;
  }
  return true;
}

// The view of a call for an op's callbacks.
struct View {
  ps_op_tensor inputs[kMaxOperands], outputs[kMaxOutputs];
  ps_op_attr attrs[kMaxAttrs];
  ps_op_call call;
};

void copy_attrs(const Signature& signature, const AttrValue* from, ps_op_attr* to) {
  for (int32_t i = 0; i < signature.num_attrs; ++i)
    to[i] = ps_op_attr{from[i].i, from[i].f, from[i].s.data ? from[i].s.data : ""};  // null-terminated by metadata.cpp
}

ps_op_tensor view_of(const Tensor& t, int32_t kind) {
  ps_op_tensor out{t.data, kind == OPERAND_WEIGHT ? PS_F32 : t.dtype, t.rank, {}, t.row_stride};
  for (int32_t d = 0; d < t.rank; ++d) out.dims[d] = t.dims[d];
  return out;
}

void fill_view(const LoadedOp& op, const Call& c, View* out) {
  const Signature& s = op.signature;
  for (int32_t i = 0; i < s.num_arguments; ++i) out->inputs[i] = view_of(c.in[i], s.arguments[i].kind);
  for (int32_t i = 0; i < s.num_outputs; ++i) out->outputs[i] = view_of(c.out[i], OPERAND_VALUE);
  copy_attrs(s, c.attrs, out->attrs);
  out->call = ps_op_call{sizeof(ps_op_call), s.num_arguments, s.num_outputs, s.num_attrs, out->inputs,
                         out->attrs,         out->outputs,    nullptr,       0,           op.op.user};
}

// Terminates a callback's message and removes control characters.
void clean(ps_op_error* error) {
  error->text[sizeof(error->text) - 1] = 0;
  for (char* p = error->text; *p; ++p) {
    if (static_cast<unsigned char>(*p) < 32 || *p == 127) *p = ' ';
  }
  if (!error->text[0]) snprintf(error->text, sizeof(error->text), "it gave no reason");
}

ps_status status_of(int32_t code) {
  return code >= PS_INVALID_ARGUMENT && code <= PS_INTERNAL ? static_cast<ps_status>(code) : PS_INTERNAL;
}

ps_status refused(int32_t code, ps_op_error* error) {
  clean(error);
  return fail(status_of(code), "%s", error->text);
}

int64_t output_rows(const Call& c) { return c.out[0].dims[0]; }

void run_loaded(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const LoadedOp& op = *c.loaded;
  View view;
  fill_view(op, c, &view);
  view.call.scratch = c.thread_scratch + thread * c.thread_scratch_bytes;
  view.call.scratch_bytes = c.thread_scratch_bytes;
  ps_op_error error{};
  const int32_t code = op.op.compute(&view.call, begin, end, &error);
  set_default_float_environment();  // the callback may have changed it, and other ops follow on this thread
  if (code == 0 || c.failure->claimed.exchange(1, std::memory_order_acq_rel)) return;
  clean(&error);
  c.failure->status = code;
  c.failure->call = &c;
  c.failure->error = error;
}

// Checks a type that a rule has filled in.
ps_status check_output(const ps_op_type& type, int32_t index, Spec* out) {
  if (type.dtype != PS_F32 && type.dtype != PS_I32)
    return fail(PS_INVALID_ARGUMENT, "output %d: expected the dtype 1 (f32) or 5 (i32), got %d", index, type.dtype);
  if (type.rank < 1 || type.rank > PS_OP_MAX_RANK)
    return fail(PS_INVALID_ARGUMENT, "output %d: expected 1 to %d dims, got %d", index, PS_OP_MAX_RANK, type.rank);
  *out = Spec{OPERAND_VALUE, type.dtype, type.rank, {}, 0, -1, constant(0)};
  for (int32_t d = 0; d < type.rank; ++d) {
    const ps_op_dim& dim = type.dims[d];
    const bool is_size =
        dim.symbol == -1 || (dim.symbol >= 0 && dim.symbol < NUM_ROLES && dim.factor >= 1 && dim.factor <= kMaxDim);
    if (!is_size || dim.offset < 0 || dim.offset > kMaxDim || (d > 0 && dim.symbol != -1))
      return fail(PS_INVALID_ARGUMENT, "output %d: dim %d is no size", index, d);
    out->dims[d] = dim.symbol == -1 ? constant(dim.offset) : Dim{dim.symbol, dim.factor, dim.offset};
  }
  return PS_OK;
}

ps_status read_type(const Spec& spec, const Argument& argument, ps_op_type* out) {
  if (spec.kind == OPERAND_NONE) return PS_OK;
  if (spec.kind == OPERAND_WEIGHT && spec.layout != PS_ROWS_F32) {
    return fail(PS_UNSUPPORTED, "%.*s: expected a weight of layout rows_f32, got %s", PS_STR(argument.name),
                layout_name(spec.layout) ? layout_name(spec.layout) : "another");
  }
  if (spec.rank < 1 || spec.rank > PS_OP_MAX_RANK) {
    return fail(PS_UNSUPPORTED, "%.*s: expected 1 to %d dims, got %d", PS_STR(argument.name), PS_OP_MAX_RANK,
                spec.rank);
  }
  out->dtype = spec.kind == OPERAND_WEIGHT ? PS_F32 : spec.dtype;
  if (out->dtype != PS_F32 && out->dtype != PS_I32) {
    return fail(PS_UNSUPPORTED, "%.*s: expected f32 or i32, got %s", PS_STR(argument.name),
                dtype_name(spec.dtype) ? dtype_name(spec.dtype) : "an unknown type");
  }
  out->rank = spec.rank;
  for (int32_t d = 0; d < spec.rank; ++d)
    out->dims[d] = ps_op_dim{spec.dims[d].symbol, 0, spec.dims[d].factor, spec.dims[d].offset};
  return PS_OK;
}

// Converts one op of a library to a row.
ps_status read_op(const ps_op* given, const char* source, LoadedOp* out) {
  if (!given) return fail(PS_INVALID_ARGUMENT, "expected an op, got null");
  if (given->struct_size < sizeof(ps_op))
    return fail(PS_INVALID_ARGUMENT, "struct_size: expected at least %zu, got %u", sizeof(ps_op), given->struct_size);
  out->op = *given;
  if (!given->name || strnlen(given->name, sizeof(out->name)) == sizeof(out->name) ||
      !is_foreign_name(Str{given->name, static_cast<uint32_t>(strlen(given->name))})) {
    return fail(PS_INVALID_ARGUMENT,
                "name: expected \"owner::op\" of up to 63 small letters, digits and _, got %s%.64s%s",
                given->name ? "\"" : "", given->name ? given->name : "null", given->name ? "\"" : "");
  }
  snprintf(out->name, sizeof(out->name), "%s", given->name);
  if (given->version < 1) return fail(PS_INVALID_ARGUMENT, "version: expected 1 or more, got %d", given->version);
  if (!given->schema || strnlen(given->schema, sizeof(out->schema)) == sizeof(out->schema))
    return fail(PS_INVALID_ARGUMENT, "schema: expected up to %zu bytes, got %s", sizeof(out->schema) - 1,
                given->schema ? "more" : "null");
  snprintf(out->schema, sizeof(out->schema), "%s", given->schema);
  PS_TRY(parse_schema(out->schema, true, &out->signature));
  if (given->flags) return fail(PS_UNSUPPORTED, "flags: expected 0, got 0x%x", given->flags);
  if (!given->infer || !given->compute)
    return fail(PS_INVALID_ARGUMENT, "%s: expected a function, got null", given->infer ? "compute" : "infer");
  uint32_t values = 0;
  for (int32_t i = 0; i < out->signature.num_arguments; ++i)
    values |= uint32_t{out->signature.arguments[i].kind == OPERAND_VALUE} << i;
  if (given->row_inputs & ~values)
    return fail(PS_INVALID_ARGUMENT, "row_inputs: expected bits of Tensor arguments, 0x%x, got 0x%x", values,
                given->row_inputs);
  out->row = OpRow{out->name, given->version, out->schema, nullptr, nullptr, nullptr, false};
  const uint32_t others = values & ~given->row_inputs;
  out->phase = Phase{.split = SPLIT_ROWS,
                     .items = output_rows,
                     .run = run_loaded,
                     .reads_rows = given->row_inputs,
                     .reads_all = others,
                     .writes_outputs = true};
  snprintf(out->source, sizeof(out->source), "%s", source);
  snprintf(out->text, sizeof(out->text), "%s.%d %s", out->name, given->version, out->schema);
  return PS_OK;
}

// Finds whether the op is already loaded.  The same table is accepted again; an op of this name from another table is
// refused.
// refused.
ps_status find_same(const LoadedOp& row, const LoadedOp* const* fresh, int32_t num_fresh, bool* is_same) {
  *is_same = false;
  for (int32_t i = 0; i < num_fresh; ++i) {
    if (strcmp(fresh[i]->name, row.name) == 0) return fail(PS_INVALID_ARGUMENT, "%s: the op is there twice", row.name);
  }
  const int32_t same = find_loaded_op(Str{row.name, static_cast<uint32_t>(strlen(row.name))});
  if (same < 0) return PS_OK;
  const LoadedOp& existing = loaded_op(same);
  *is_same =
      existing.op.compute == row.op.compute && existing.op.version == row.op.version && existing.op.user == row.op.user;
  if (*is_same) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: version %d is loaded already, from %s", row.name, existing.op.version,
              existing.source);
}

ps_status add_ops(const ps_op_library& library, const char* source, LoadedOp** fresh, int32_t* num_fresh) {
  for (int32_t i = 0; i < library.num_ops; ++i) {
    LoadedOp* row = static_cast<LoadedOp*>(calloc(1, sizeof(LoadedOp)));
    if (!row) return fail(PS_OUT_OF_MEMORY, "ops: out of memory");
    bool is_loaded = false;
    ps_status status = read_op(library.ops[i], source, row);
    if (status != PS_OK) status = prefix(status, "ops[%d]: ", i);
    if (status == PS_OK) status = find_same(*row, fresh, *num_fresh, &is_loaded);
    if (status == PS_OK && !is_loaded && *num_fresh + num_loaded_ops() == kMaxLoaded)
      status = fail(PS_UNSUPPORTED, "ops: expected at most %d in all", kMaxLoaded);
    if (status != PS_OK || is_loaded) free(row);
    PS_TRY(status);
    if (!is_loaded) fresh[(*num_fresh)++] = row;
  }
  return PS_OK;
}

}  // namespace

int32_t num_loaded_ops() { return num_rows.load(std::memory_order_acquire); }
const LoadedOp& loaded_op(int32_t index) { return *rows[index]; }

bool is_foreign_name(Str name) {
  const char* colons = static_cast<const char*>(memchr(name.data, ':', name.size));
  const char* end = name.data + name.size;
  return colons && colons + 2 < end && colons[1] == ':' && is_word(name.data, colons) && is_word(colons + 2, end);
}

int32_t find_loaded_op(Str name) {
  for (int32_t i = 0; i < num_loaded_ops(); ++i) {
    if (equal(name, rows[i]->name)) return i;
  }
  return -1;
}

ps_status register_ops(const ps_op_library* library, const char* source) {
  if (!library) return fail(PS_INVALID_ARGUMENT, "library: expected a table of ops, got null");
  if (library->abi_version != PS_OP_ABI_VERSION || library->struct_size < sizeof(ps_op_library)) {
    return fail(PS_UNSUPPORTED,
                "library: expected version %d of penstock_op.h and %zu bytes, got version %d and %u bytes",
                PS_OP_ABI_VERSION, sizeof(ps_op_library), library->abi_version, library->struct_size);
  }
  if (library->num_ops < 1 || library->num_ops > kMaxLoaded || !library->ops)
    return fail(PS_INVALID_ARGUMENT, "num_ops: expected 1 to %d, got %d", kMaxLoaded,
                library->ops ? library->num_ops : 0);
  if (library->reserved) return fail(PS_UNSUPPORTED, "reserved: expected 0, got %d", library->reserved);
  LoadedOp* fresh[kMaxLoaded];
  int32_t num_fresh = 0;
  pthread_mutex_lock(&lock);
  const ps_status status = add_ops(*library, source, fresh, &num_fresh);
  const int32_t count = num_loaded_ops();
  for (int32_t i = 0; i < num_fresh; ++i) {
    if (status == PS_OK) {
      rows[count + i] = fresh[i];
    } else {
      free(fresh[i]);
    }
  }
  if (status == PS_OK) num_rows.store(count + num_fresh, std::memory_order_release);
  pthread_mutex_unlock(&lock);
  return status;
}

ps_status infer_loaded(const LoadedOp& op, const Spec* in, const AttrValue* attrs, Spec* out) {
  const Signature& s = op.signature;
  ps_op_type inputs[kMaxOperands] = {}, outputs[kMaxOutputs] = {};
  ps_op_attr values[kMaxAttrs] = {};
  for (int32_t i = 0; i < s.num_arguments; ++i) PS_TRY(read_type(in[i], s.arguments[i], &inputs[i]));
  copy_attrs(s, attrs, values);
  const ps_op_shapes shapes{
      sizeof(ps_op_shapes), s.num_arguments, s.num_outputs, s.num_attrs, inputs, values, outputs, op.op.user};
  ps_op_error error{};
  const int32_t code = op.op.infer(&shapes, &error);
  set_default_float_environment();
  if (code) return refused(code, &error);
  for (int32_t i = 0; i < s.num_outputs; ++i) {
    PS_TRY(check_output(outputs[i], i, &out[i]));
    if (!equal(out[i].dims[0], out[0].dims[0]))
      return fail(PS_INVALID_ARGUMENT, "output %d: expected the rows of output 0", i);
  }
  for (int32_t i = 0; i < s.num_arguments; ++i) {
    if (!(op.op.row_inputs >> i & 1) || in[i].kind == OPERAND_NONE || equal(in[i].dims[0], out[0].dims[0])) continue;
    return fail(PS_INVALID_ARGUMENT, "%.*s: expected as many rows as the outputs have (row_inputs)",
                PS_STR(s.arguments[i].name));
  }
  return PS_OK;
}

ps_status loaded_scratch(const LoadedOp& op, const Call& call, Scratch* out) {
  if (!op.op.scratch) return PS_OK;
  View view;
  fill_view(op, call, &view);
  for (ps_op_tensor& t : view.inputs) t.data = nullptr;
  for (ps_op_tensor& t : view.outputs) t.data = nullptr;
  ps_op_error error{};
  const int32_t code = op.op.scratch(&view.call, &out->per_thread, &error);
  set_default_float_environment();
  if (code) return refused(code, &error);
  if (out->per_thread < 0 || out->per_thread > int64_t{1} << 40)
    return fail(PS_INVALID_ARGUMENT, "scratch: expected 0 to 2^40 bytes, got %lld",
                static_cast<long long>(out->per_thread));
  out->per_thread = round_up(out->per_thread, 64);  // keeps every thread's scratch aligned
  return PS_OK;
}

void report_failure(const Call& call, const char* format, ...) {
  OpFailure* const failure = call.failure;
  if (!failure || failure->claimed.exchange(1, std::memory_order_acq_rel)) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure->error.text, sizeof(failure->error.text), format, arguments);
  va_end(arguments);
  failure->status = PS_INVALID_ARGUMENT;
  failure->call = &call;
}

ps_status take_failure(OpFailure* failure) {
  if (!failure->claimed.load(std::memory_order_acquire)) return PS_OK;
  failure->claimed.store(0, std::memory_order_relaxed);
  const LoadedOp* const loaded = failure->call->loaded;
  return fail(status_of(failure->status), "%s%s%s", loaded ? loaded->name : "", loaded ? ": " : "",
              failure->error.text);
}

}  // namespace ps
