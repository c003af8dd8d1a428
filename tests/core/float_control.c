/* The calling thread's floating-point control register, for a test that changes it around calls of the core; and an op that
 * changes it and does not change it back. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "penstock_op.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
void set_control(uint64_t control) { _mm_setcsr((uint32_t)control); }
uint64_t get_control(void) { return _mm_getcsr(); }
enum { CONTROL = 0x1f80, FLAGS = 0x3f, FLUSH = 0x9fc0 };
#elif defined(__aarch64__)
void set_control(uint64_t control) { __asm__ volatile("msr fpcr, %0" : : "r"(control)); }
uint64_t get_control(void) {
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
enum { CONTROL = 0, FLAGS = 0, FLUSH = 1 << 24 };
#endif

static int32_t infer(const ps_op_shapes* shapes, ps_op_error* error) {
  (void)error;
  shapes->outputs[0] = shapes->inputs[0];
  return 0;
}

/* y = x, and subnormal numbers are zero on this thread from here on. */
static int32_t compute(const ps_op_call* call, int64_t begin, int64_t end, ps_op_error* error) {
  const ps_op_tensor *x = &call->inputs[0], *y = &call->outputs[0];
  const uint64_t found = get_control() & ~(uint64_t)FLAGS;
  int64_t row;
  if (found != CONTROL) {
    snprintf(error->text, sizeof error->text, "called with the control register 0x%llx", (unsigned long long)found);
    return 6; /* PS_INTERNAL */
  }
  for (row = begin; row < end; ++row) {
    memcpy((float*)y->data + row * y->row_stride, (const float*)x->data + row * x->row_stride, (size_t)x->dims[1] * 4);
  }
  set_control(FLUSH);
  return 0;
}

static const ps_op flush = {sizeof(ps_op), 1, "tests::flush", "(Tensor x) -> Tensor", 1, 0, infer, compute, 0, 0};
static const ps_op* const ops[] = {&flush};
static const ps_op_library op_library = {sizeof(ps_op_library), PS_OP_ABI_VERSION, 1, 0, ops};

const ps_op_library* penstock_ops(void) { return &op_library; }
