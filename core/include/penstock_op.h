/* Penstock: a user's own op, as a C function in a shared library.  C99 and C++; nothing to link with.
 *
 * The library defines one function, penstock_ops(), that returns a table of its ops.  A program loads it by its path
 * with ps_ops_load (penstock-lite --ops, penstock.load_ops); nothing in a bundle can cause that.  examples/custom_op is
 * a whole one, docs/guides/custom-ops.md tells how the same op is written in Python.
 *
 * An op is a name with the owner's in front ("acme::clipped_relu"), a version, a schema, a rule for the shapes of its
 * outputs and a function that computes some rows of them.  A bundle that was exported with version 2 takes only version
 * 2: a new version is a new op, whose results may differ.
 *
 * The schema is a line like "(Tensor x, Weight? bias, *, float limit, str mode) -> Tensor": up to 8 arguments of type
 * Tensor (float32 or int32 values) or Weight (a matrix of float32; a vector is one row), "?" where one may be absent;
 * behind "*" up to 8 attributes of type int, float, bool or str; one output, or "-> (Tensor, Tensor)".  One space
 * behind each comma and between type and name.  The first argument is a Tensor that is there.
 *
 * Callbacks are called from several threads at once, for several programs at once, and for as long as the process
 * lives: the table, its strings and `user` stay as they are.  They return 0, or a ps_status (penstock.h), and then say
 * why in error->text.  What they compute must depend on nothing but their arguments: neither on how rows are shared
 * between threads, nor on what else is in the batch.  They are called with rounding to nearest, with subnormal numbers
 * and with all floating-point exceptions masked, and so is what follows, whatever a callback sets.
 */
#ifndef PENSTOCK_OP_H
#define PENSTOCK_OP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_OP_ABI_VERSION 1
#define PS_OP_MAX_RANK 4

/* A size: factor * symbol + offset, where the symbol is what a step decides (how many tokens, requests ...); of a
 * constant the symbol is -1 and the size is the offset. */
typedef struct ps_op_dim {
  int32_t symbol, reserved;
  int64_t factor, offset;
} ps_op_dim;

typedef struct ps_op_type {
  int32_t dtype, rank;            /* ps_dtype: PS_F32 (1) or PS_I32 (5); 0: an argument that is absent */
  ps_op_dim dims[PS_OP_MAX_RANK]; /* all but the first are constants; a weight has [rows, columns] */
} ps_op_type;

typedef struct ps_op_tensor {
  void* data; /* null: absent.  Of an input not to be written to */
  int32_t dtype, rank;
  int64_t dims[PS_OP_MAX_RANK];
  int64_t row_stride; /* elements from row dims[0] = i to i + 1; a row itself is contiguous */
} ps_op_tensor;

typedef struct ps_op_attr { /* in the schema's order; the field of its type is set */
  int64_t i;                /* int; bool as 0 or 1 */
  double f;                 /* float, finite */
  const char* s;            /* str, never null */
} ps_op_attr;

typedef struct ps_op_error { char text[256]; } ps_op_error;

/* What the rule sees and fills. */
typedef struct ps_op_shapes {
  uint32_t struct_size;
  int32_t num_inputs, num_outputs, num_attrs;
  const ps_op_type* inputs; /* the schema's arguments in order */
  const ps_op_attr* attrs;
  ps_op_type* outputs; /* zero, to be filled; all have the same first dim */
  void* user;          /* the op's */
} ps_op_shapes;

/* What computing sees. */
typedef struct ps_op_call {
  uint32_t struct_size;
  int32_t num_inputs, num_outputs, num_attrs;
  const ps_op_tensor* inputs;
  const ps_op_attr* attrs;
  const ps_op_tensor* outputs;
  void* scratch; /* scratch_bytes that no other thread has, 64-byte aligned, of no known contents */
  int64_t scratch_bytes;
  void* user;
} ps_op_call;

typedef struct ps_op {
  uint32_t struct_size; /* sizeof(ps_op) */
  int32_t version;      /* 1 or more */
  const char* name;     /* "owner::op", each of a to z, 0 to 9 and _, in all up to 63 */
  const char* schema;
  /* Bit i: row r of the outputs needs only row r of argument i; the argument has as many rows.  Sound as 0; where it is
   * right, the op shares a pass over memory with its neighbours, and rows that nobody wants are left out. */
  uint32_t row_inputs;
  uint32_t flags; /* 0 */
  /* Checks types and attributes and fills the outputs' types. */
  int32_t (*infer)(const ps_op_shapes* shapes, ps_op_error* error);
  /* Rows begin to end - 1 of all outputs.  Each row is asked for once. */
  int32_t (*compute)(const ps_op_call* call, int64_t begin, int64_t end, ps_op_error* error);
  /* Or null: no scratch.  Bytes for each thread, for arguments of up to these sizes (data is null).  Larger sizes
   * never need less. */
  int32_t (*scratch)(const ps_op_call* call, int64_t* bytes, ps_op_error* error);
  void* user; /* handed to the callbacks */
} ps_op;

typedef struct ps_op_library {
  uint32_t struct_size;      /* sizeof(ps_op_library) */
  int32_t abi_version;       /* PS_OP_ABI_VERSION */
  int32_t num_ops, reserved; /* reserved: 0 */
  const ps_op* const* ops;
} ps_op_library;

/* What the shared library defines. */
#define PS_OP_EXPORT __attribute__((visibility("default")))
PS_OP_EXPORT const ps_op_library* penstock_ops(void);

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_OP_H */
