/* ops_check BUNDLE: misuse of custom ops; the bundle's graph has the op example::squared_relu, version 1.  Each mistake
 * must give a status and a message that names op and field; the tests build it with sanitizers.  Prints the
 * differences; the exit status is 1 if there are any. */
#include <stdio.h>
#include <string.h>

#include "penstock.h"
#include "penstock_op.h"

static int failures;

static void expect(int line, ps_status found, ps_status wanted, const char* text) {
  if (found == wanted && (wanted == PS_OK || strstr(ps_error_message(), text))) return;
  printf("line %d: expected status %d with \"%s\", got %d: %s\n", line, wanted, text, found,
         found ? ps_error_message() : "");
  ++failures;
}
#define REFUSED(call, text) expect(__LINE__, call, PS_INVALID_ARGUMENT, text)
#define FINE(call) expect(__LINE__, call, PS_OK, "")

static int fail_infer, fail_compute, wrong_type;

static int32_t infer(const ps_op_shapes* shapes, ps_op_error* error) {
  if (fail_infer) {
    memset(error->text, 'x', sizeof error->text); /* not terminated */
    return fail_infer;
  }
  shapes->outputs[0] = shapes->inputs[0];
  if (wrong_type == 1) shapes->outputs[0].rank = 1 << 20;
  if (wrong_type == 2) shapes->outputs[0].dtype = 99;
  if (wrong_type == 3) shapes->outputs[0].dims[0].symbol = 7;
  if (wrong_type == 4) shapes->outputs[0].dims[1].offset = INT64_MAX;
  if (wrong_type == 5) shapes->outputs[0].dims[0].offset += 1;
  return 0;
}

static int32_t scratch(const ps_op_call* call, int64_t* bytes, ps_op_error* error) {
  (void)error;
  *bytes = call->inputs[0].dims[1] * 4;
  return 0;
}

static int32_t compute(const ps_op_call* call, int64_t begin, int64_t end, ps_op_error* error) {
  const ps_op_tensor *x = &call->inputs[0], *y = &call->outputs[0];
  int64_t row, i;
  if (fail_compute) return snprintf(error->text, sizeof error->text, "not today"), fail_compute;
  for (row = begin; row < end; ++row) {
    float* own = call->scratch;
    for (i = 0; i < x->dims[1]; ++i) own[i] = ((const float*)x->data)[row * x->row_stride + i];
    memcpy((float*)y->data + row * y->row_stride, own, (size_t)x->dims[1] * 4);
  }
  return 0;
}

static const ps_op kOp = {sizeof(ps_op),
                          1,
                          "example::squared_relu",
                          "(Tensor x, Weight? scale, *, float limit) -> Tensor",
                          1,
                          0,
                          infer,
                          compute,
                          scratch,
                          NULL};

static ps_status register_op(const ps_op* op, int32_t count) {
  const ps_op* ops[2] = {op, op};
  const ps_op_library library = {sizeof library, PS_OP_ABI_VERSION, count, 0, ops};
  return ps_ops_register(&library);
}

static void check_registering(const char* path) {
  static const char* const schemas[] = {
      "",
      "(",
      "()",
      "() -> Tensor",
      "(Tensor x)",
      "(Tensor x) -> ",
      "(Tensor x) -> ()",
      "(Tensor x) -> (Tensor",
      "(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)",
      "(Tensor x) -> Tensor ",
      "(Tensor  x) -> Tensor",
      "(Tensor x,Tensor y) -> Tensor",
      "(Tensor x, Tensor x) -> Tensor",
      "(Weight w) -> Tensor",
      "(Tensor? x) -> Tensor",
      "(Tensor x, *) -> Tensor",
      "(Tensor x, *, list a) -> Tensor",
      "(State s) -> Tensor",
      "(Tensor x, *, int a, int a) -> Tensor",
      "(Tensor a, Tensor b, Tensor c, Tensor d, Tensor e, Tensor f, Tensor g, Tensor h, Tensor i, Tensor j,"
      " Tensor k, Tensor l) -> Tensor"};
  static const char* const names[] = {"",        "linear", "::x",    "a::",   "a:b",
                                      "a::b::c", "A::b",   "a::b c", "9a::b", "a::b\n"};
  static char long_text[4096];
  ps_op op;
  size_t i;
  REFUSED(ps_ops_register(NULL), "expected a table of ops, got null");
  REFUSED(ps_ops_load(NULL), "path");
  expect(__LINE__, ps_ops_load("/no/such/library.so"), PS_IO_ERROR, "/no/such/library.so: No such file");
  expect(__LINE__, ps_ops_load(path), PS_IO_ERROR, path); /* not a shared library */
  expect(__LINE__, ps_ops_load("/"), PS_IO_ERROR, "/");
  {
    ps_op_library library = {sizeof library, PS_OP_ABI_VERSION + 1, 1, 0, NULL};
    expect(__LINE__, ps_ops_register(&library), PS_UNSUPPORTED, "version 1 of penstock_op.h");
    library.abi_version = PS_OP_ABI_VERSION;
    REFUSED(ps_ops_register(&library), "num_ops");
    library.struct_size = 8;
    expect(__LINE__, ps_ops_register(&library), PS_UNSUPPORTED, "and 8 bytes");
  }
  REFUSED(register_op(NULL, 1), "ops[0]: expected an op, got null");
  REFUSED(register_op(&kOp, 0), "num_ops: expected 1 to 256, got 0");
  REFUSED(register_op(&kOp, -1), "num_ops");
  REFUSED(register_op(&kOp, 2), "example::squared_relu: the op is there twice");
#define OP(field, value, text) (op = kOp, op.field = value, REFUSED(register_op(&op, 1), text))
  OP(struct_size, 8, "struct_size");
  OP(version, 0, "version: expected 1 or more");
  OP(name, NULL, "name: expected \"owner::op\"");
  OP(schema, NULL, "schema: expected up to 511 bytes, got null");
  OP(infer, NULL, "infer: expected a function, got null");
  OP(compute, NULL, "compute: expected a function, got null");
  OP(row_inputs, 2, "row_inputs: expected bits of Tensor arguments, 0x1, got 0x2");
  memset(long_text, 'a', sizeof long_text - 1);
  OP(name, long_text, "name: expected");
  OP(schema, long_text, "schema: expected up to 511 bytes, got more");
  for (i = 0; i < sizeof schemas / sizeof *schemas; ++i) OP(schema, schemas[i], "schema: ");
  for (i = 0; i < sizeof names / sizeof *names; ++i) OP(name, names[i], "name: ");
  op = kOp;
  op.flags = 1;
  expect(__LINE__, register_op(&op, 1), PS_UNSUPPORTED, "flags");
}

static void check_ops(const char* path) {
  static const int32_t ids[] = {1, 2, 3}, positions[] = {0, 1, 2}, starts[] = {0, 3}, pages[] = {0}, rows[] = {2};
  const ps_context_options context_options = {sizeof context_options, 2, NULL};
  const ps_model_options options = {sizeof options, 0, 0};
  const ps_program_options limits = {sizeof limits, 8, 2, 2, 4, 2, 0, 0, NULL};
  const ps_batch batch = {sizeof batch, 3, 1, 1, 1, ids, positions, starts, pages, rows, 0, 0};
  ps_op other = kOp;
  ps_context* context;
  ps_model* model;
  ps_program* program;
  FINE(ps_context_create(&context_options, &context));
  expect(__LINE__, ps_model_open(path, &options, &model), PS_UNSUPPORTED,
         "the file needs the op example::squared_relu, version 1");
  check_registering(path);
  FINE(register_op(&kOp, 1));
  FINE(register_op(&kOp, 1)); /* the same again */
  other.version = 2;
  REFUSED(register_op(&other, 1), "example::squared_relu: version 1 is loaded already, from the program");
  fail_infer = 99; /* not a ps_status */
  expect(__LINE__, ps_model_open(path, &options, &model), PS_INTERNAL, "xxx");
  fail_infer = 0;
  for (wrong_type = 1; wrong_type <= 5; ++wrong_type)
    expect(__LINE__, ps_model_open(path, &options, &model), PS_INVALID_FILE, "output");
  wrong_type = 0;
  FINE(ps_model_open(path, &options, &model));
  FINE(ps_program_create(model, context, &limits, &program));
  FINE(ps_program_run(program, &batch));
  fail_compute = PS_OUT_OF_MEMORY;
  expect(__LINE__, ps_program_run(program, &batch), PS_OUT_OF_MEMORY, "example::squared_relu: not today");
  fail_compute = -5;
  expect(__LINE__, ps_program_run(program, &batch), PS_INTERNAL, "example::squared_relu: not today");
  fail_compute = 0;
  FINE(ps_program_run(program, &batch)); /* still works */
  ps_program_destroy(program);
  ps_model_close(model);
  ps_context_destroy(context);
}

int main(int argc, char** argv) {
  if (argc != 2) return fprintf(stderr, "usage: ops_check BUNDLE\n"), 2;
  check_ops(argv[1]);
  printf("%d failures\n", failures);
  return failures != 0;
}
