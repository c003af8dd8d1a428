/* Continue a prompt with a bundle: the whole way through the C API, in one file of C99.
 *
 *   cc generate.c $(pkg-config --cflags --libs penstock) -o generate
 *   ./generate demo.psm "def add(a, b):" 32          greedily
 *   ./generate demo.psm "def add(a, b):" 32 0.8 7    at the temperature 0.8; the seed 7 gives the same text again
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, ps_error_message());
  return 1;
}

typedef struct Answer {
  ps_context* context;
  ps_model* model;
  ps_tokenizer* tokenizer;
  ps_program* program;
  int32_t *tokens, *positions, *pages; /* prompt and answer; 0, 1, 2 ...; the pages that the program has */
  int32_t num_prompt, num_tokens, num_pages, context_len, num_groups;
  float temperature; /* 0: greedy */
  uint64_t seed;
  char* text; /* room for what print_text writes */
  int64_t text_bytes;
} Answer;

static void release(Answer* a) {
  ps_program_destroy(a->program);
  ps_tokenizer_close(a->tokenizer);
  ps_model_close(a->model);
  ps_context_destroy(a->context);
  free(a->tokens);
  free(a->positions);
  free(a->pages);
  free(a->text);
}

static int open_all(Answer* a, const char* path) {
  ps_context_options context = {sizeof context, 0, NULL};
  ps_model_options model = {sizeof model, 0, 0};
  ps_model_info info = {sizeof info};
  if (ps_context_create(&context, &a->context)) return failed("context");
  if (ps_model_open(path, &model, &a->model)) return failed("open");
  if (ps_tokenizer_open(a->model, &a->tokenizer)) return failed("tokenizer");
  if (ps_model_describe(a->model, &info)) return failed("describe");
  a->context_len = info.context_len;
  a->num_groups = info.num_page_groups;
  fprintf(stderr, "%s, %s: %d tokens of context, %.1f MB of weights\n", info.network, info.scheme, info.context_len,
          (double)info.weight_bytes / 1e6);
  return 0;
}

static int encode(Answer* a, const char* text, int32_t max_new) {
  int64_t count = 0;
  int32_t i;
  a->tokens = malloc(sizeof(int32_t) * (size_t)a->context_len);
  a->positions = malloc(sizeof(int32_t) * (size_t)a->context_len);
  if (!a->tokens || !a->positions) return fprintf(stderr, "out of memory\n"), 1;
  if (ps_tokenizer_encode(a->tokenizer, text, (int64_t)strlen(text), PS_ENCODE_ADD_SPECIAL, a->tokens, a->context_len, &count))
    return failed("encode");
  if (count < 1 || count + max_new > a->context_len) {
    fprintf(stderr, "expected a prompt of 1 to %d tokens, got %lld\n", a->context_len - max_new, (long long)count);
    return 1;
  }
  a->num_prompt = a->num_tokens = (int32_t)count;
  for (i = 0; i < a->context_len; ++i) a->positions[i] = i;
  return 0;
}

/* Memory for the prompt in one step and for as many KV pages as prompt and answer fill. */
static int plan(Answer* a, int32_t max_new) {
  ps_program_options options = {sizeof options};
  int32_t i;
  a->num_pages = (a->num_prompt + max_new + PS_PAGE_TOKENS - 1) / PS_PAGE_TOKENS;
  options.max_tokens = a->num_prompt;
  options.max_requests = 1;
  options.max_rows = 1;
  options.num_pages = a->num_pages;
  if (ps_program_create(a->model, a->context, &options, &a->program)) return failed("program");
  a->pages = malloc(sizeof(int32_t) * (size_t)(a->num_pages * a->num_groups));
  if (!a->pages) return fprintf(stderr, "out of memory\n"), 1;
  for (i = 0; i < a->num_pages * a->num_groups; ++i) a->pages[i] = i % a->num_pages;
  return 0;
}

/* Runs the last `count` tokens and draws the next one. */
static int step(Answer* a, int32_t count, int32_t* token) {
  const int32_t begin = a->num_tokens - count, starts[2] = {0, count}, last = count - 1, top_k = 0;
  const float top_p = 1;
  const int64_t counter[2] = {0, a->num_tokens};
  ps_batch batch = {sizeof batch};
  ps_sampling sampling = {sizeof sampling};
  ps_sampled sampled = {sizeof sampled};
  batch.num_tokens = count;
  batch.num_requests = batch.num_rows = 1;
  batch.page_table_width = a->num_pages;
  batch.token_ids = a->tokens + begin;
  batch.positions = a->positions + begin;
  batch.request_starts = starts;
  batch.page_tables = a->pages;
  batch.output_rows = &last;
  sampling.num_rows = 1;
  sampling.temperature = &a->temperature;
  sampling.top_k = &top_k;
  sampling.top_p = &top_p;
  sampling.seed = &a->seed;
  sampling.counter = counter;
  sampled.ids = token;
  return ps_program_step(a->program, &batch, &sampling, &sampled) ? failed("step") : 0;
}

static int is_end(const Answer* a, int32_t token) {
  ps_tokenizer_info info = {sizeof info};
  int32_t i;
  if (ps_tokenizer_describe(a->tokenizer, &info)) return 1;
  for (i = 0; i < info.num_eos_ids; ++i)
    if (info.eos_ids[i] == token) return 1;
  return 0;
}

/* What the tokens so far add to the text; `begin` remembers where it stands, and does not move where the room was too small. */
static int print_text(Answer* a, int64_t* begin, int last) {
  int64_t bytes = 256;
  const uint32_t flags = PS_DECODE_SKIP_SPECIAL | (last ? 0 : PS_DECODE_PARTIAL);
  do {
    if (bytes > a->text_bytes) {
      char* text = realloc(a->text, (size_t)bytes);
      if (!text) return fprintf(stderr, "out of memory\n"), 1;
      a->text = text;
      a->text_bytes = bytes;
    }
    if (ps_tokenizer_decode(a->tokenizer, a->tokens + a->num_prompt, a->num_tokens - a->num_prompt, flags, begin, a->text,
                            a->text_bytes, &bytes))
      return failed("decode");
  } while (bytes > a->text_bytes);
  fwrite(a->text, 1, (size_t)bytes, stdout);
  fflush(stdout);
  return 0;
}

static int generate(Answer* a, int32_t max_new) {
  int64_t begin = 0;
  int32_t token = 0, i;
  if (step(a, a->num_prompt, &token)) return 1;
  for (i = 1;; ++i) {
    const int last = i == max_new || is_end(a, token);
    a->tokens[a->num_tokens++] = token;
    if (print_text(a, &begin, last)) return 1;
    if (last) return putchar('\n') == EOF;
    if (step(a, 1, &token)) return 1;
  }
}

int main(int argc, char** argv) {
  Answer a = {0};
  const int32_t max_new = argc > 3 ? atoi(argv[3]) : 64;
  int status;
  if (argc < 3 || max_new < 1) {
    fprintf(stderr, "usage: %s BUNDLE PROMPT [MAX_TOKENS [TEMPERATURE [SEED]]]\n", argv[0]);
    return 2;
  }
  if (argc > 4) a.temperature = strtof(argv[4], NULL);
  if (argc > 5) a.seed = strtoull(argv[5], NULL, 10);
  status = open_all(&a, argv[1]) || encode(&a, argv[2], max_new) || plan(&a, max_new) || generate(&a, max_new);
  release(&a);
  return status;
}
