// The op table of the core: one row per op of src/penstock/ops/table.py.  op_list.inc lists them.
//
// A row is a schema, a rule that infers the outputs from the inputs, and phases.  A phase is a range of
// independent items; threads share the range, and all of them finish a phase before one that needs it
// begins.  The same rows serve graphs and single ops.
#ifndef PENSTOCK_OPS_H
#define PENSTOCK_OPS_H

#include "base/kernels.h"
#include "base/size_list.h"
#include "ops/graph.h"
#include "ops/layout.h"
#include "ops/op_ids.h"

namespace ps {

// The int8 rows that a scheme rounds a row of activations to; 0: it keeps floats, or rounds groups.
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

// An operand as a shape rule sees it.  A weight has two constant dims, a state three: pages, heads, head_dim.  A state
// of latents has four: latent_dim last.
struct Spec {
  int32_t kind, dtype, rank;
  Dim dims[kMaxRank];
  int32_t layout;  // of a weight; of a state kStatePages when it is recurrent
  int32_t group;   // of a state
  Dim bound;       // int32 values are below it; the constant 0 when nothing is known
};

constexpr int32_t kResidual = 3;  // the input of a fused linear that is added to its result (passes/fuse.h)

struct AttrValue {  // in the order of the schema
  int64_t i;  // ints and bools; for strings the number of the choice, set by the shape rule; for lists their length
  double f;
  Str s;
  const int64_t* list;  // of ATTR_INTS, evaluated for the sizes of this call
};

// An operand as kernels see it.
struct Tensor {
  uint8_t* data;
  int32_t dtype, rank, layout;
  int64_t dims[kMaxRank];
  int64_t row_stride;  // elements
};

struct Exchange;  // of a program of several ranks: exchange/exchange.h
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
  uint8_t* scratch;         // shared by the threads
  uint8_t* thread_scratch;  // thread_scratch_bytes each
  int64_t thread_scratch_bytes;
  const int32_t* token_request;
  bool gated;          // of a linear: LinearArgs::gated
  bool is_head;        // of all_gather, send and recv: the rows are the logits, which only the first rank reads
  bool is_hidden;      // of send and recv: the rows are the hidden rows, which few steps ask for
  Exchange* exchange;  // null: one rank
  const DirectPart*
      next;  // of an op that exchanges: what the next exchange sends, if it is stored straight into the part
  const InputSums* input_sums;  // of a linear: where its inputs are added up; else null
  const LoadedOp* loaded;       // of a custom op
  OpFailure* failure;           // where it says what failed
};

enum Split {
  SPLIT_ROWS,    // item i is row i of the output: the same thread has row i in every phase of this kind
  SPLIT_ITEMS,   // equal contiguous shares
  SPLIT_SHARES,  // equal contiguous shares; a thread that finished its own helps with the others'
};

// A bit for each argument of a phase.
template <class... Index>
constexpr uint32_t operands(Index... index) {
  return (0u | ... | (1u << index));
}

// Which inputs (operands) a phase reads, and what else it touches.  place_barriers goes by these: what a phase
// leaves out here is a data race.
struct Phase {
  Split split;
  int64_t (*items)(const Call&);
  void (*run)(const Call&, int64_t begin, int64_t end, int32_t thread);
  uint32_t reads_rows = 0;  // item i reads only row i
  uint32_t reads_all = 0;
  bool writes_outputs = false, reads_scratch = false, writes_scratch = false, reads_state = false, writes_state = false;
  int64_t grain = 1;  // items that are best computed together
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
  ps_status (*scratch)(const Call&, Scratch* out);  // null: none.  Monotonic in every dim
  bool row_wise;
};

extern const OpRow kOps[NUM_OPS];
const OpRow& op_row(int32_t op);
inline const char* op_name(int32_t op) { return op_row(op).name; }
const Signature& signature(int32_t op);
int32_t find_op(Str name);  // -1: unknown
bool is_built(int32_t op);  // not left out of this build
// Null: an op of the table.
const LoadedOp* as_loaded(int32_t op);
ps_status infer_op(int32_t op, const Spec* in, AttrValue* attrs, Spec* out);
Phases phases_of(int32_t op, const Call& call);
// An op of general networks (ops/general_ops.inc): its tensors are dense, and its shape rule takes constant sizes only.
inline bool is_general(int32_t op) { return op >= OP_CONV && op < NUM_OPS; }
bool takes_scratch(int32_t op);
ps_status scratch_of(int32_t op, const Call& call, Scratch* out);
// Parses a schema; a malformed one is an error.  A `foreign` schema, of a custom op, must meet more rules.
ps_status parse_schema(const char* schema, bool foreign, Signature* out);

// Puts attributes into the schema's order; unknown, missing, mistyped and non-finite ones are refused by name.
ps_status bind_attrs(int32_t op, const Attr* attrs, int32_t count, AttrValue* out);
// Evaluates the lists among an op's attributes.  `storage` has room for kMaxAttrs * kMaxListLen numbers and lives as
// long as `attrs`.
ps_status evaluate_lists(int32_t op, const SizeNames& names, AttrValue* attrs, int64_t* storage);
// Kinds and number of the operands against the schema.
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

// The sizes of a state's pages.
inline StateShape state_shape(const Tensor& t) {
  return StateShape{static_cast<int32_t>(t.dims[1]), static_cast<int32_t>(t.dims[2]),
                    t.rank == 4 ? static_cast<int32_t>(t.dims[3]) : 0};
}
inline StateShape state_shape(const State& s) { return StateShape{s.num_kv_heads, s.head_dim, s.latent_dim}; }
// The format of a state's pages in a program with this format of keys and values, and the bytes of one.
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
