/* api_check BUNDLE: misuse of the C API.  Each mistake must give a status and a message that names the argument, and no
 * crash; the tests build it with sanitizers.  Prints the differences; the exit status is 1 if there are any. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "penstock.h"

static int failures;

static void expect(int line, ps_status found, ps_status wanted, const char* text) {
  if (found == wanted && (wanted == PS_OK || strstr(ps_error_message(), text))) return;
  printf("line %d: expected status %d with \"%s\", got %d: %s\n", line, wanted, text, found,
         found ? ps_error_message() : "");
  ++failures;
}
#define REFUSED(call, text) expect(__LINE__, call, PS_INVALID_ARGUMENT, text)
#define FINE(call) expect(__LINE__, call, PS_OK, "")

typedef struct Handles {
  ps_context* context;
  ps_model* model;
  ps_tokenizer* tokenizer;
  ps_program* program;
} Handles;

static const ps_context_options kContext = {sizeof(ps_context_options), 2, NULL};
static const ps_model_options kModel = {sizeof(ps_model_options), 0, 0};
static const ps_program_options kProgram = {sizeof(ps_program_options), 8, 2, 2, 4, 2, 0, 0, NULL};

static const int32_t kIds[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, kPositions[] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
static const int32_t kStarts[] = {0, 3, 5}, kPages[] = {0, 1}, kRows[] = {2, 1, 0};

static ps_batch good_batch(void) {
  ps_batch batch;
  memset(&batch, 0, sizeof batch);
  batch.struct_size = sizeof batch;
  batch.num_tokens = 3;
  batch.num_requests = batch.num_rows = batch.page_table_width = 1;
  batch.token_ids = kIds;
  batch.positions = kPositions;
  batch.request_starts = kStarts;
  batch.page_tables = kPages;
  batch.output_rows = kRows;
  return batch;
}

static int32_t token;
static ps_sampled good_sampled(void) {
  ps_sampled sampled;
  memset(&sampled, 0, sizeof sampled);
  sampled.struct_size = sizeof sampled;
  sampled.ids = &token;
  return sampled;
}

static ps_sampling good_sampling(void) {
  static const float temperature = 0, top_p = 1;
  static const int32_t top_k = 0;
  static const uint64_t seed = 1;
  static const int64_t counter[2] = {0, 3};
  ps_sampling sampling;
  memset(&sampling, 0, sizeof sampling);
  sampling.struct_size = sizeof sampling;
  sampling.num_rows = 1;
  sampling.temperature = &temperature;
  sampling.top_k = &top_k;
  sampling.top_p = &top_p;
  sampling.seed = &seed;
  sampling.counter = counter;
  return sampling;
}

static void open_all(const char* path, Handles* h) {
  memset(h, 0, sizeof *h);
  FINE(ps_context_create(&kContext, &h->context));
  FINE(ps_model_open(path, &kModel, &h->model));
  FINE(ps_tokenizer_open(h->model, &h->tokenizer));
  FINE(ps_program_create(h->model, h->context, &kProgram, &h->program));
}

static void close_all(Handles* h) {
  ps_program_destroy(h->program);
  ps_tokenizer_close(h->tokenizer);
  ps_model_close(h->model);
  ps_context_destroy(h->context);
}

/* Every function with these handles, none of which is valid. */
static void use_all(const Handles* h, const char* text) {
  ps_model_info info = {sizeof info};
  ps_tokenizer_info tokenizer = {sizeof tokenizer};
  ps_plan plan = {sizeof plan};
  ps_value_info value = {sizeof value};
  ps_size_info size = {sizeof size};
  ps_array array = {NULL, PS_F32, 0, {0}};
  ps_program* program = NULL;
  ps_tokenizer* opened = NULL;
  const ps_batch batch = good_batch();
  const ps_sampling sampling = good_sampling();
  const ps_sampled sampled = good_sampled();
  const void* data;
  const float* floats;
  const int32_t* ids;
  int32_t a, b;
  int64_t bytes;
  char letter;
  REFUSED(ps_model_describe(h->model, &info), text);
  REFUSED(ps_model_segment(h->model, "config.json", &data, &bytes), text);
  REFUSED(ps_model_load_huge(h->model, h->context), text);
  REFUSED(ps_tokenizer_open(h->model, &opened), text);
  REFUSED(ps_tokenizer_describe(h->tokenizer, &tokenizer), text);
  REFUSED(ps_tokenizer_encode(h->tokenizer, "a", 1, 0, &a, 1, &bytes), text);
  REFUSED(ps_tokenizer_decode(h->tokenizer, kIds, 1, 0, NULL, &letter, 1, &bytes), text);
  REFUSED(ps_program_plan(h->model, h->context, &kProgram, &plan), text);
  REFUSED(ps_program_create(h->model, h->context, &kProgram, &program), text);
  REFUSED(ps_program_resize(h->program, &kProgram), text);
  REFUSED(ps_program_run(h->program, &batch), text);
  REFUSED(ps_program_sample(h->program, &sampling, &sampled), text);
  REFUSED(ps_program_step(h->program, &batch, &sampling, &sampled), text);
  REFUSED(ps_program_logits(h->program, &floats, &a, &b), text);
  REFUSED(ps_program_hidden(h->program, &floats, &a, &b), text);
  REFUSED(ps_program_tail(h->program, &ids, &floats, &a, &b), text);
  REFUSED(ps_model_input(h->model, 0, &value), text);
  REFUSED(ps_model_output(h->model, 0, &value), text);
  REFUSED(ps_model_size(h->model, 0, &size), text);
  REFUSED(ps_program_predict(h->program, &array, 1), text);
  REFUSED(ps_program_prepare(h->program, &array, 1), text);
  REFUSED(ps_program_output(h->program, 0, &array), text);
  if (ps_context_num_threads(h->context) != 0 || ps_context_cpu_level(h->context))
    ++failures, puts("context of no handle");
}

static void check_handles(const char* path) {
  static const char words[64] = "no handle at all";
  Handles h, none = {NULL, NULL, NULL, NULL}, wrong;
  use_all(&none, "got null");
  open_all(path, &h);
  wrong.context = (ps_context*)h.model;
  wrong.model = (ps_model*)h.context;
  wrong.tokenizer = (ps_tokenizer*)(words + 1);
  wrong.program = (ps_program*)words;
  use_all(&wrong, "another pointer");
  close_all(&h);
  use_all(&h, "got a closed one");
  close_all(&h); /* has no effect */
  close_all(&none);
}

static void check_nulls(const char* path, const Handles* h) {
  const ps_batch batch = good_batch();
  const ps_sampling sampling = good_sampling();
  ps_sampled sampled = good_sampled();
  ps_context* context;
  ps_model* model;
  const void* data;
  REFUSED(ps_context_create(NULL, &context), "options");
  REFUSED(ps_context_create(&kContext, NULL), "out");
  REFUSED(ps_model_open(NULL, &kModel, &model), "path: expected the name of a file, got null");
  REFUSED(ps_model_open("", &kModel, &model), "path: expected the name of a file, got an empty text");
  REFUSED(ps_ops_load(""), "path: expected the name of a file, got an empty text");
  REFUSED(ps_model_open(path, NULL, &model), "options");
  REFUSED(ps_model_open(path, &kModel, NULL), "out");
  REFUSED(ps_model_describe(h->model, NULL), "out");
  REFUSED(ps_model_segment(h->model, "x", &data, NULL), "bytes");
  REFUSED(ps_tokenizer_open(h->model, NULL), "out");
  REFUSED(ps_tokenizer_encode(h->tokenizer, NULL, 1, 0, NULL, 0, NULL), "text");
  REFUSED(ps_program_plan(h->model, h->context, &kProgram, NULL), "out");
  REFUSED(ps_program_create(h->model, h->context, NULL, NULL), "out");
  REFUSED(ps_program_resize(h->program, NULL), "options");
  REFUSED(ps_program_run(h->program, NULL), "batch");
  REFUSED(ps_program_step(h->program, &batch, NULL, &sampled), "sampling");
  REFUSED(ps_program_step(h->program, &batch, &sampling, NULL), "out");
  REFUSED(ps_program_logits(h->program, NULL, NULL, NULL), "logits");
  sampled.ids = NULL;
  REFUSED(ps_program_step(h->program, &batch, &sampling, &sampled), "ids");
}

/* The functions for general networks, with a language model. */
static void check_kind(const Handles* h) {
  ps_value_info value = {sizeof value};
  ps_size_info size = {sizeof size};
  ps_array array = {NULL, PS_F32, 0, {0}};
  REFUSED(ps_model_input(h->model, 0, &value), "index");
  REFUSED(ps_model_output(h->model, -1, &value), "index");
  REFUSED(ps_model_size(h->model, 0, &size), "index");
  expect(__LINE__, ps_program_predict(h->program, &array, 1), PS_UNSUPPORTED, "general network");
  expect(__LINE__, ps_program_prepare(h->program, &array, 1), PS_UNSUPPORTED, "general network");
  expect(__LINE__, ps_program_output(h->program, 0, &array), PS_UNSUPPORTED, "general network");
}

/* Invalid option values. */
static void check_options(const char* path, const Handles* h) {
  ps_plan plan = {sizeof plan};
  ps_program* program = NULL;
  ps_model* model = NULL;
  ps_model_options opening = kModel;
  uint32_t bit;
  for (bit = 1; bit; bit <<= 1) { /* including penstock_dev.h's bits */
    ps_program_options options = kProgram;
    char text[48];
    options.flags = bit;
    sprintf(text, "flags: expected 0, got 0x%x", (unsigned)bit);
    expect(__LINE__, ps_program_plan(h->model, h->context, &options, &plan), PS_UNSUPPORTED, text);
    expect(__LINE__, ps_program_create(h->model, h->context, &options, &program), PS_UNSUPPORTED, text);
    expect(__LINE__, ps_program_resize(h->program, &options), PS_UNSUPPORTED, text);
  }
  opening.verify = 7;
  REFUSED(ps_model_open(path, &opening, &model), "verify: expected 0 or 1, got 7");
  opening.verify = 1;
  opening.private_copy = -1;
  REFUSED(ps_model_open(path, &opening, &model), "private_copy: expected 0 or 1, got -1");
  if (program || model) ++failures, puts("a refused call made a handle");
}

static void check_struct_sizes(const Handles* h) {
  static const uint32_t sizes[] = {0, 3, 65537, UINT32_MAX};
  size_t i;
  for (i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
    ps_context_options context = kContext;
    ps_program_options program = kProgram;
    ps_model_info info;
    ps_batch batch = good_batch();
    ps_context* made;
    context.struct_size = program.struct_size = info.struct_size = batch.struct_size = sizes[i];
    REFUSED(ps_context_create(&context, &made), "options.struct_size");
    REFUSED(ps_program_resize(h->program, &program), "options.struct_size");
    REFUSED(ps_model_describe(h->model, &info), "out.struct_size");
    REFUSED(ps_program_run(h->program, &batch), "batch.struct_size");
  }
  { /* a caller whose struct has fewer fields gets only those */
    struct {
      uint32_t struct_size;
      int32_t vocab_size, guard;
    } small = {8, 0, 12345};
    FINE(ps_model_describe(h->model, (ps_model_info*)&small));
    if (small.vocab_size < 1 || small.guard != 12345) ++failures, puts("a small struct was written beyond its end");
  }
}

/* Each case changes one field of a valid batch. */
static void check_steps(const Handles* h) {
  static const int32_t foreign[] = {1, 1 << 30, 3}, gap[] = {0, 2, 3}, page[] = {4}, beyond[] = {3},
                       far[] = {1 << 23, (1 << 23) + 1, (1 << 23) + 2};
  static const int32_t slot[] = {-1, -1, -1}, no_slot[] = {-3, 1, 1}, down[] = {0, 0};
  const ps_sampling sampling = good_sampling();
  const ps_sampled sampled = good_sampled();
  const float* logits;
  int32_t rows, vocab;
  ps_batch b;
  REFUSED(ps_program_logits(h->program, &logits, &rows, &vocab), "expected a step");
  REFUSED(ps_program_sample(h->program, &sampling, &sampled), "expected a step");
#define CHANGED(field, value, text) (b = good_batch(), b.field = value, REFUSED(ps_program_run(h->program, &b), text))
  CHANGED(num_tokens, 9, "num_tokens: expected 1 to 8, got 9");
  CHANGED(num_tokens, 0, "num_tokens");
  CHANGED(num_tokens, -1, "num_tokens");
  CHANGED(num_requests, 3, "num_requests: expected 1 to 2");
  CHANGED(num_rows, 3, "num_rows: expected 0 to 2");
  CHANGED(num_rows, -1, "num_rows");
  CHANGED(page_table_width, 0, "page_table_width");
  CHANGED(token_ids, NULL, "token_ids");
  CHANGED(positions, NULL, "positions");
  CHANGED(request_starts, NULL, "request_starts");
  CHANGED(page_tables, NULL, "page_tables");
  CHANGED(output_rows, NULL, "output_rows");
  CHANGED(token_ids, foreign, "token_ids[1]: expected less than");
  CHANGED(token_ids, slot, "nothing was sampled in slot 0");
  CHANGED(token_ids, no_slot, "one of 2 slots, got slot 2");
  CHANGED(positions, gap, "positions");
  CHANGED(positions, far, "positions");
  CHANGED(request_starts, down, "request_starts");
  CHANGED(page_tables, page, "page");
  CHANGED(output_rows, beyond, "output_rows[0]: expected a token of the step, 0 to 2, got 3");
  b = good_batch();
  b.reserved = 1;
  expect(__LINE__, ps_program_run(h->program, &b), PS_UNSUPPORTED, "reserved");
  b = good_batch();
  b.flags = 1u << 31;
  expect(__LINE__, ps_program_run(h->program, &b), PS_UNSUPPORTED, "flags");
  b = good_batch();
  FINE(ps_program_step(h->program, &b, &sampling, &sampled));
}

/* A newer caller's fields are accepted if they are zero. */
static void check_newer(const Handles* h) {
  struct {
    ps_batch known;
    uint64_t newer;
  } batch = {good_batch(), 0};
  struct {
    ps_context_options known;
    uint8_t newer[8];
  } context = {kContext, {0}};
  struct {
    ps_model_options known;
    uint32_t newer;
  } model = {kModel, 1};
  struct {
    ps_program_options known;
    float newer;
  } program = {kProgram, 1.f};
  struct {
    ps_sampling known;
    const float* newer;
  } sampling = {good_sampling(), (const float*)&failures};
  struct {
    ps_sampled known;
    float* newer;
  } sampled = {good_sampled(), NULL};
  struct {
    ps_model_info known;
    uint64_t newer;
  } info;
  ps_plan plan = {sizeof plan};
  ps_context* made = NULL;
  ps_model* opened = NULL;
  context.known.struct_size = sizeof context;
  FINE(ps_context_create(&context.known, &made));
  ps_context_destroy(made);
  context.newer[2] = 1;
  batch.known.struct_size = sizeof batch;
  FINE(ps_program_run(h->program, &batch.known));
  batch.newer = 1ull << 63;
  model.known.struct_size = sizeof model;
  program.known.struct_size = sizeof program;
  sampling.known.struct_size = sizeof sampling;
  sampled.known.struct_size = sizeof sampled;
  info.known.struct_size = sizeof info;
  info.newer = ~0ull;
#define NEWER(call, text) expect(__LINE__, call, PS_UNSUPPORTED, text)
  NEWER(ps_context_create(&context.known, &made), "options: byte 42 of 48 is set");
  NEWER(ps_model_open("x", &model.known, &opened), "options: byte 12 of 16 is set");
  NEWER(ps_program_plan(h->model, h->context, &program.known, &plan), "options: byte");
  NEWER(ps_program_resize(h->program, &program.known), "options: byte");
  NEWER(ps_program_run(h->program, &batch.known), "batch: byte 79 of 80 is set");
  NEWER(ps_program_sample(h->program, &sampling.known, &sampled.known), "sampling: byte");
  sampling.newer = NULL;
  FINE(ps_program_sample(h->program, &sampling.known, &sampled.known));
  sampled.newer = (float*)&failures;
  NEWER(ps_program_sample(h->program, &sampling.known, &sampled.known), "out: byte");
  FINE(ps_model_describe(h->model, &info.known));
  if (info.newer != 0) ++failures, puts("a field that the library does not know was left as it was");
}

static int stopping;

static void* step_until_told(void* argument) {
  const Handles* h = argument;
  const ps_batch batch = good_batch();
  long refused = 0;
  while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) {
    const ps_status status = ps_program_run(h->program, &batch);
    if (status != PS_OK && !strstr(ps_error_message(), "one call at a time")) return "another error";
    refused += status != PS_OK;
  }
  return refused ? NULL : "never refused";
}

/* One program in two threads: the second call is refused, and the step is not disturbed. */
static void check_threads(const Handles* h) {
  pthread_t threads[2];
  void* failed[2];
  int i;
  stopping = 0;
  for (i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, step_until_told, (void*)h);
  usleep(300000);
  __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
  for (i = 0; i < 2; ++i) pthread_join(threads[i], &failed[i]);
  if (failed[0] && failed[1]) ++failures, printf("two threads: %s, %s\n", (char*)failed[0], (char*)failed[1]);
}

/* A context's threads do not exist in a forked child; closing its handles is harmless. */
static void check_fork(Handles* h) {
  const ps_batch batch = good_batch();
  int status = 0;
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    REFUSED(ps_program_run(h->program, &batch), "forked child");
    REFUSED(ps_model_load_huge(h->model, h->context), "forked child");
    close_all(h);
    fflush(stdout);
    _exit(failures != 0);
  }
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) ++failures, printf("forked child: status 0x%x\n", status);
  FINE(ps_program_run(h->program, &batch)); /* the parent is not affected */
}

/* Closed in the wrong order: objects made from a handle keep what they need. */
static void check_order(const char* path) {
  const ps_batch batch = good_batch();
  ps_tokenizer_info info = {sizeof info};
  Handles h;
  open_all(path, &h);
  ps_context_destroy(h.context);
  ps_model_close(h.model);
  FINE(ps_program_run(h.program, &batch));
  FINE(ps_tokenizer_describe(h.tokenizer, &info));
  ps_program_destroy(h.program);
  ps_tokenizer_close(h.tokenizer);
}

int main(int argc, char** argv) {
  Handles h;
  if (argc != 2) return fprintf(stderr, "usage: api_check BUNDLE\n"), 2;
  check_handles(argv[1]);
  open_all(argv[1], &h);
  check_nulls(argv[1], &h);
  check_kind(&h);
  check_options(argv[1], &h);
  check_struct_sizes(&h);
  check_steps(&h);
  check_newer(&h);
  check_threads(&h);
  check_fork(&h);
  close_all(&h);
  check_order(argv[1]);
  printf("%d failures\n", failures);
  return failures != 0;
}
