/* Run a general network with one input: the whole way through the C API, in one file of C99.
 *
 *   cc predict.c $(pkg-config --cflags --libs penstock) -o predict
 *   ./predict net.psm image.raw 1 3 224 224     the file has the elements of the input, rows first; behind it its dims
 *   ./predict net.psm - 1 3 224 224             zeros
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, ps_error_message());
  return 1;
}

typedef struct Network {
  ps_context* context;
  ps_model* model;
  ps_program* program;
  ps_array input;
  void* bytes; /* of the input */
} Network;

static void release(Network* n) {
  ps_program_destroy(n->program);
  ps_model_close(n->model);
  ps_context_destroy(n->context);
  free(n->bytes);
}

static size_t element_bytes(int32_t dtype) {
  switch (dtype) {
    case PS_F32:
    case PS_I32: return 4;
    case PS_I64: return 8;
    case PS_F16:
    case PS_BF16: return 2;
    default: return 1;
  }
}

static int open_all(Network* n, const char* path) {
  ps_context_options context = {sizeof context, 0, NULL};
  ps_model_options model = {sizeof model, 0, 0};
  ps_program_options program = {sizeof program};
  ps_model_info info = {sizeof info};
  ps_value_info value = {sizeof value};
  if (ps_context_create(&context, &n->context)) return failed("context");
  if (ps_model_open(path, &model, &n->model)) return failed("open");
  if (ps_model_describe(n->model, &info)) return failed("describe");
  if (info.kind != 1 || info.num_inputs != 1) return fprintf(stderr, "expected a network with one input\n"), 1;
  if (ps_model_input(n->model, 0, &value)) return failed("input");
  if (ps_program_create(n->model, n->context, &program, &n->program)) return failed("program");
  n->input.dtype = value.dtype;
  fprintf(stderr, "%s: %s [%s], %.1f MB of weights\n", info.network, value.name, value.sizes,
          (double)info.weight_bytes / 1e6);
  return 0;
}

/* The array of the command line: dims behind the file, whose bytes are the elements; "-" is zeros. */
static int read_input(Network* n, const char* path, char** dims, int ndim) {
  size_t bytes = element_bytes(n->input.dtype);
  FILE* file;
  int i;
  if (ndim > 6) return fprintf(stderr, "expected at most 6 dims\n"), 1;
  n->input.ndim = ndim;
  for (i = 0; i < ndim; ++i) {
    const long long size = atoll(dims[i]);
    if (size < 1 || size > (1 << 28) || bytes > ((size_t)1 << 34) / (size_t)size) {
      fprintf(stderr, "dims: expected up to 2^34 bytes, got %s\n", dims[i]);
      return 1;
    }
    n->input.dims[i] = size;
    bytes *= (size_t)size;
  }
  n->input.data = n->bytes = calloc(bytes, 1);
  if (!n->bytes) return fprintf(stderr, "out of memory\n"), 1;
  if (path[0] == '-' && !path[1]) return 0;
  file = fopen(path, "rb");
  if (!file || fread(n->bytes, 1, bytes, file) != bytes) {
    fprintf(stderr, "%s: expected %lld bytes\n", path, (long long)bytes);
    if (file) fclose(file);
    return 1;
  }
  fclose(file);
  return 0;
}

static void print_element(const ps_array* array, int64_t i) {
  if (array->dtype == PS_F32) printf(" %g", (double)((const float*)array->data)[i]);
  if (array->dtype == PS_I32) printf(" %d", ((const int32_t*)array->data)[i]);
  if (array->dtype == PS_I64) printf(" %lld", (long long)((const int64_t*)array->data)[i]);
  if (array->dtype == PS_BOOL || array->dtype == PS_U8) printf(" %d", ((const uint8_t*)array->data)[i]);
}

static int print_outputs(const Network* n) {
  ps_model_info info = {sizeof info};
  int32_t i, d;
  if (ps_model_describe(n->model, &info)) return failed("describe");
  for (i = 0; i < info.num_outputs; ++i) {
    ps_value_info value = {sizeof value};
    ps_array array;
    int64_t count = 1, k;
    if (ps_model_output(n->model, i, &value) || ps_program_output(n->program, i, &array)) return failed("output");
    printf("%s [", value.name);
    for (d = 0; d < array.ndim; ++d) {
      printf("%s%lld", d ? ", " : "", (long long)array.dims[d]);
      count *= array.dims[d];
    }
    printf("]:");
    for (k = 0; k < count && k < 8; ++k) print_element(&array, k);
    printf(count > 8 ? " ...\n" : "\n");
  }
  return 0;
}

int main(int argc, char** argv) {
  Network n = {0};
  int status;
  if (argc < 3) {
    fprintf(stderr, "usage: %s BUNDLE FILE [DIM ...]\n", argv[0]);
    return 2;
  }
  status = open_all(&n, argv[1]);
  if (!status) status = read_input(&n, argv[2], argv + 3, argc - 3);
  if (!status) status = ps_program_predict(n.program, &n.input, 1) ? failed("predict") : print_outputs(&n);
  release(&n);
  return status;
}
