// The op table of the core: one row per op of src/penstock/ops/table.py.  op_list.inc lists them.
//
// A row has a schema, a rule that infers the outputs from the inputs, and phases.  A phase is a range of independent
// items.  Threads split the range, and all finish a phase before a phase that depends on it begins.  Graphs and single
// ops use the same rows.
#ifndef PENSTOCK_OPS_H
#define PENSTOCK_OPS_H

#include "base/kernels.h"
#include "base/size_list.h"
#include "ops/graph.h"
#include "ops/layout.h"
#include "ops/op_ids.h"

namespace ps {

// The number of int8 rows to which a scheme rounds a row of activations; 0: it keeps floats, or rounds groups.
constexpr int32_t activation_planes(int64_t scheme) {
  return scheme < LINEAR_W8A16 || scheme >= LINEAR_Q8_0 ? 0 : scheme == LINEAR_W8A16 || scheme == LINEAR_W4A16 ? 2 : 1;
}
constexpr bool is_rotated(int64_t scheme) { return scheme == LINEAR_W8A8_H32 || scheme == LINEAR_W4A8_H32; }

// A parsed schema.
// ATTR_INTS: a list of sizes, stored as a string (base/size_list.h).
enum AttrType { ATTR_INT = 1, ATTR_FLOAT = 2, ATTR_STRING = 3, ATTR_BOOL = 4, ATTR_INTS = 5 };
struct Argument {
  Str name;
  int32_t kind;  // OperandKind
  bool optional;
};
struct AttrRow {
  Str name;
  int32_t type;
};
struct Signature {
  int32_t num_arguments, num_attrs, num_outputs;
  Argument arguments[kMaxOperands];
  AttrRow attrs[kMaxAttrs];
};

// An operand for shape rules.  A weight has two constant dims.  A state has three: pages, heads, head_dim; a state of
// latents has latent_dim as a fourth.
struct Spec {
  int32_t kind, dtype, rank;
  Dim dims[kMaxRank];
  int32_t layout;  // for weights; for states kStatePages if recurrent
  int32_t group;   // for states
  Dim bound;       // int32 values are below it; the constant 0 if unknown
};

constexpr int32_t kResidual = 3;  // the input of a fused linear that is added to its result (passes/fuse.h)

struct AttrValue {  // in the schema's order
  int64_t i;  // ints and bools; the index of a string among its choices, set by the shape rule; the length of a list
  double f;
  Str s;
  const int64_t* list;  // ATTR_INTS: evaluated for the sizes of this call
};

// An operand for kernels.
struct Tensor {
  uint8_t* data;
  int32_t dtype, rank, layout;
  int64_t dims[kMaxRank];
  int64_t row_stride;  // elements
};

struct Exchange;  // for a program of several ranks: exchange/exchange.h
struct DirectPart;
struct InputSums;  // ops/input_sums.h
struct LoadedOp;   // a custom op: ops/loaded.h
struct OpFailure;

// One execution of one op.
struct Call {
  const Kernels* kernels;
  AttrValue attrs[kMaxAttrs];
  Tensor in[kMaxOperands];  // data null: absent
  Tensor out[kMaxOutputs];
  uint8_t* scratch;         // shared by all threads
  uint8_t* thread_scratch;  // thread_scratch_bytes for each thread
  int64_t thread_scratch_bytes;
  const int32_t* token_request;
  bool gated;          // for linear: LinearArgs::gated
  bool is_head;        // all_gather, send and recv: the rows are the logits, which only the first rank reads
  bool is_hidden;      // send and recv: the rows are the hidden rows, which few steps need
  Exchange* exchange;  // null: a single rank
  const DirectPart*
      next;  // for ops that exchange: the operand of the next exchange, if it is stored directly into the part
  const InputSums* input_sums;  // for linear: where its inputs are accumulated; else null
  const LoadedOp* loaded;       // for custom ops
  OpFailure* failure;           // receives a failure of the op
};

enum Split {
  SPLIT_ROWS,    // item i is row i of the output: a row is always the same thread's in phases of this kind
  SPLIT_ITEMS,   // equal contiguous shares
  SPLIT_SHARES,  // equal contiguous shares; a thread that finishes early helps the others
};

// A bit for each argument of a phase.
template <class... Index>
constexpr uint32_t operands(Index... index) {
  return (0u | ... | (1u << index));
}

// The inputs (operands) that a phase reads, and what else it accesses. place_barriers relies on these: an omission is a
// data race.
struct Phase {
  Split split;
  int64_t (*items)(const Call&);
  void (*run)(const Call&, int64_t begin, int64_t end, int32_t thread);
  uint32_t reads_rows = 0;  // item i reads only row i
  uint32_t reads_all = 0;
  bool writes_outputs = false, reads_scratch = false, writes_scratch = false, reads_state = false, writes_state = false;
  int64_t grain = 1;  // number of items that are best computed together
};

struct Phases {
  const Phase* first;
  int32_t count;
};

struct Scratch { int64_t shared, per_thread; };

struct OpRow {
  const char* name;
  int32_t version;
  const char* schema;
  // Checks inputs and attributes and fills the outputs' specs; sets AttrValue::i of strings.
  ps_status (*infer)(const Spec* in, AttrValue* attrs, Spec* out);
  Phases (*phases)(const Call&);
  ps_status (*scratch)(const Call&, Scratch* out);  // null: no scratch.  Monotonic in every dim
  bool row_wise;
};

extern const OpRow kOps[NUM_OPS];
const OpRow& op_row(int32_t op);
inline const char* op_name(int32_t op) { return op_row(op).name; }
const Signature& signature(int32_t op);
int32_t find_op(Str name);  // -1: unknown
bool is_built(int32_t op);  // part of this build
// Null: a built-in op.
const LoadedOp* as_loaded(int32_t op);
ps_status infer_op(int32_t op, const Spec* in, AttrValue* attrs, Spec* out);
Phases phases_of(int32_t op, const Call& call);
// An op of general networks (ops/general_ops.inc): its tensors are dense, and its shape rule accepts only constant
// sizes.
inline bool is_general(int32_t op) { return op >= OP_CONV && op < NUM_OPS; }
bool takes_scratch(int32_t op);
ps_status scratch_of(int32_t op, const Call& call, Scratch* out);
// Parses a schema and fails if it is malformed.  A `foreign` schema, of a custom op, must satisfy more rules.
ps_status parse_schema(const char* schema, bool foreign, Signature* out);

// Sorts attributes into the schema's order; refuses unknown, missing, mistyped and non-finite ones by name.
ps_status bind_attrs(int32_t op, const Attr* attrs, int32_t count, AttrValue* out);
// Evaluates the lists among an op's attributes. `storage` has room for kMaxAttrs * kMaxListLen numbers and must outlive
// `attrs`.
ps_status evaluate_lists(int32_t op, const SizeNames& names, AttrValue* attrs, int64_t* storage);
// Checks number and kinds of the operands against the schema.
ps_status check_operands(int32_t op, const Spec* in, int32_t count);
bool same_type(const Spec& a, const Spec& b);
// "f32 [T, 64]" into a buffer, for messages.
struct TypeText { char text[96]; };
TypeText describe(const Spec& spec);
extern const char* const kRoleNames[NUM_ROLES];

// The functions of each row.
#define PS_OP(id, name, version, schema, infer, phases, scratch, row_wise) \
  ps_status infer(const Spec*, AttrValue*, Spec*);                         \
  Phases phases(const Call&);
#include "ops/op_list.inc"
#define PS_OP(id, name, ...) ps_status name##_scratch(const Call&, Scratch*);
#include "ops/general_ops.inc"
#undef PS_OP
ps_status linear_scratch(const Call&, Scratch*);
ps_status attention_scratch(const Call&, Scratch*);
ps_status context_attention_scratch(const Call&, Scratch*);
ps_status all_gather_rounded_scratch(const Call&, Scratch*);
ps_status topk_scratch(const Call&, Scratch*);
ps_status route_scratch(const Call&, Scratch*);
ps_status expert_linear_scratch(const Call&, Scratch*);

// The dims of a state's pages.
inline StateShape state_shape(const Tensor& t) {
  return StateShape{static_cast<int32_t>(t.dims[1]), static_cast<int32_t>(t.dims[2]),
                    t.rank == 4 ? static_cast<int32_t>(t.dims[3]) : 0};
}
inline StateShape state_shape(const State& s) { return StateShape{s.num_kv_heads, s.head_dim, s.latent_dim}; }
// The layout of a state's pages in a program with this KV layout, and the bytes of one page.
inline int32_t page_layout(const State& state, int32_t kv_layout) { return state.recurrent ? kStatePages : kv_layout; }
inline ps_status page_bytes_of(const State& state, int32_t kv_layout, int64_t* bytes) {
  return kv_page_bytes(page_layout(state, kv_layout), state_shape(state), bytes);
}

// Elements of one row: the product of the dims after the first.
inline int64_t row_elements(const Tensor& t) {
  int64_t n = 1;
  for (int32_t i = 1; i < t.rank; ++i) n *= t.dims[i];
  return n;
}

}  // namespace ps

#endif
