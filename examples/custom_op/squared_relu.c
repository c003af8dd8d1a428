/* example::squared_relu, version 1: min(max(x, 0)^2, limit) times a scale of each column, row by row.
 *
 *   cc -O2 -ffp-contract=off -shared -fPIC squared_relu.c -I path/to/penstock/include -o libsquared_relu.so
 *   penstock-lite --ops ./libsquared_relu.so bundle.psm "Once upon a time"
 *
 * network.py beside it is the same op in PyTorch and a network that calls it.  Each product is rounded once, in both: hence
 * -ffp-contract=off, and the same bits. */
#include <stdio.h>

#include "penstock_op.h"

enum { X, SCALE };

/* y has the type of x; the scale is one row of as many columns. */
static int32_t infer(const ps_op_shapes* shapes, ps_op_error* error) {
  const ps_op_type *x = &shapes->inputs[X], *scale = &shapes->inputs[SCALE];
  if (x->dtype != 1 || x->rank != 2) {
    snprintf(error->text, sizeof error->text, "x: expected f32 [rows, columns], got dtype %d with %d dims", x->dtype, x->rank);
    return 1; /* PS_INVALID_ARGUMENT */
  }
  if (scale->dtype && (scale->dims[0].offset != 1 || scale->dims[1].offset != x->dims[1].offset)) {
    snprintf(error->text, sizeof error->text, "scale: expected a vector of %lld, the columns of x, got [%lld, %lld]",
             (long long)x->dims[1].offset, (long long)scale->dims[0].offset, (long long)scale->dims[1].offset);
    return 1;
  }
  if (!(shapes->attrs[0].f > 0)) {
    snprintf(error->text, sizeof error->text, "limit: expected more than 0, got %g", shapes->attrs[0].f);
    return 1;
  }
  shapes->outputs[0] = *x;
  return 0;
}

static int32_t compute(const ps_op_call* call, int64_t begin, int64_t end, ps_op_error* error) {
  const ps_op_tensor *x = &call->inputs[X], *y = &call->outputs[0];
  const float* scale = call->inputs[SCALE].data; /* null: none */
  const float limit = (float)call->attrs[0].f;
  int64_t row, i;
  (void)error; /* nothing can fail */
  for (row = begin; row < end; ++row) {
    const float* in = (const float*)x->data + row * x->row_stride;
    float* out = (float*)y->data + row * y->row_stride;
    for (i = 0; i < x->dims[1]; ++i) {
      const float positive = in[i] < 0 ? 0 : in[i], /* a NaN stays one */
                  square = positive * positive;
      const float least = square > limit ? limit : square;
      out[i] = scale ? least * scale[i] : least;
    }
  }
  return 0;
}

static const ps_op squared_relu = {
    sizeof(ps_op), 1, "example::squared_relu", "(Tensor x, Weight? scale, *, float limit) -> Tensor",
    1u << X, /* row r of y needs row r of x alone */
    0, infer, compute, 0, 0};
static const ps_op* const ops[] = {&squared_relu};
static const ps_op_library library = {sizeof(ps_op_library), PS_OP_ABI_VERSION, 1, 0, ops};

const ps_op_library* penstock_ops(void) { return &library; }
