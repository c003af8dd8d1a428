/* Penstock: a custom op, as a C function in a shared library.  C99 and C++; it links with nothing.
 *
 * The library defines one function, penstock_ops(), that returns a table of its ops.  A program loads it by its path
 * with ps_ops_load (penstock-lite --ops, penstock.load_ops); a bundle cannot load one. examples/custom_op is a complete
 * example; docs/guides/custom-ops.md explains how to write the same op in Python.
 *
 * An op has a name with the owner in front ("acme::clipped_relu"), a version, a schema, a rule that infers the shapes
 * of its outputs, and a function that computes some of their rows.  A bundle that was exported with version 2 accepts
 * only version 2: a new version counts as another op, because its results may differ.
 *
 * The schema is a line like "(Tensor x, Weight? bias, *, float limit, str mode) -> Tensor": up to 8 arguments of type
 * Tensor (float32 or int32 values) or Weight (a matrix of float32; a vector is one row), with "?" if the argument is
 * optional; after "*" up to 8 attributes of type int, float, bool or str; one output, or "-> (Tensor, Tensor)".  One
 * space follows each comma and separates type and name.  The first argument is a Tensor and not optional.
 *
 * Callbacks are called from several threads and for several programs at once, as long as the process lives: the table,
 * its strings and `user` must not change.  They return 0, or a ps_status (penstock.h) with the reason in error->text.
 * Their results may depend only on their arguments: not on how rows are split between threads, nor on the rest of the
 * batch.  They are called with rounding to nearest, with subnormal numbers and with all floating-point exceptions
 * masked; the library restores this environment after each callback.
 */
#ifndef PENSTOCK_OP_H
#define PENSTOCK_OP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_OP_ABI_VERSION 1
#define PS_OP_MAX_RANK 4

/* A size: factor * symbol + offset, where a step sets the symbol (number of tokens, requests ...).  For a constant the
 * symbol is -1 and the size is the offset. */
typedef struct ps_op_dim {
  int32_t symbol, reserved;
  int64_t factor, offset;
} ps_op_dim;

typedef struct ps_op_type {
  int32_t dtype, rank;            /* ps_dtype: PS_F32 (1) or PS_I32 (5); 0: an optional argument that is absent */
  ps_op_dim dims[PS_OP_MAX_RANK]; /* all but the first are constant; a weight has [rows, columns] */
} ps_op_type;

typedef struct ps_op_tensor {
  void* data; /* null: absent.  Read-only for inputs */
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

/* The input and output of the shape rule. */
typedef struct ps_op_shapes {
  uint32_t struct_size;
  int32_t num_inputs, num_outputs, num_attrs;
  const ps_op_type* inputs; /* the schema's arguments in order */
  const ps_op_attr* attrs;
  ps_op_type* outputs; /* zero on entry; the rule fills them; all must have the same first dim */
  void* user;          /* the op's */
} ps_op_shapes;

/* The arguments of the compute function. */
typedef struct ps_op_call {
  uint32_t struct_size;
  int32_t num_inputs, num_outputs, num_attrs;
  const ps_op_tensor* inputs;
  const ps_op_attr* attrs;
  const ps_op_tensor* outputs;
  void* scratch; /* scratch_bytes of memory for this thread only, 64-byte aligned, uninitialized */
  int64_t scratch_bytes;
  void* user;
} ps_op_call;

typedef struct ps_op {
  uint32_t struct_size; /* sizeof(ps_op) */
  int32_t version;      /* 1 or more */
  const char* name;     /* "owner::op", each of a to z, 0 to 9 and _; up to 63 characters in all */
  const char* schema;
  /* Bit i: row r of the outputs needs only row r of argument i, which has as many rows. 0 is always valid.  If the bit
   * holds, the op shares a pass over memory with its neighbours, and rows that nothing reads are skipped. */
  uint32_t row_inputs;
  uint32_t flags; /* 0 */
  /* Checks types and attributes and fills in the outputs' types. */
  int32_t (*infer)(const ps_op_shapes* shapes, ps_op_error* error);
  /* Computes rows begin to end - 1 of all outputs.  Each row is computed once. */
  int32_t (*compute)(const ps_op_call* call, int64_t begin, int64_t end, ps_op_error* error);
  /* Returns the bytes of scratch of each thread for arguments of up to these sizes (data is null); larger sizes must
   * not need less.  Null: no scratch. */
  int32_t (*scratch)(const ps_op_call* call, int64_t* bytes, ps_op_error* error);
  void* user; /* passed to the callbacks */
} ps_op;

typedef struct ps_op_library {
  uint32_t struct_size;      /* sizeof(ps_op_library) */
  int32_t abi_version;       /* PS_OP_ABI_VERSION */
  int32_t num_ops, reserved; /* reserved: 0 */
  const ps_op* const* ops;
} ps_op_library;

/* The function that the shared library defines. */
#define PS_OP_EXPORT __attribute__((visibility("default")))
PS_OP_EXPORT const ps_op_library* penstock_ops(void);

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_OP_H */
