/* One network over two processes through the C API: each opens its part, gets the same input, and prints the same output.
 *
 *   cc main.c $(pkg-config --cflags --libs penstock) -o main
 *   penstock export demo/model ranks --tp 2
 *   penstock launch --nproc 2 -- ./main "ranks/rank_{rank}.psm"
 *   mpirun -n 2 ./main "ranks/rank_{rank}.psm"
 */
#include <penstock_ranks.h>
#include <stdio.h>
#include <string.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, ps_error_message());
  return 1;
}

/* The path with the rank instead of {rank}. */
static void path_of(const char* pattern, int rank, char* path, size_t bytes) {
  const char* mark = strstr(pattern, "{rank}");
  if (mark)
    snprintf(path, bytes, "%.*s%d%s", (int)(mark - pattern), pattern, rank, mark + strlen("{rank}"));
  else
    snprintf(path, bytes, "%s", pattern);
}

/* One step with the token 1, on every rank. */
static int predict(ps_program* program, const ps_model_info* info) {
  const int32_t token = 1, position = 0, starts[2] = {0, 1}, row = 0;
  int32_t pages[16] = {0}, num_rows, width, i;
  const float* logits;
  ps_batch batch = {sizeof batch};
  if (info->num_page_groups > 16) return fprintf(stderr, "expected at most 16 page groups\n"), 1;
  batch.num_tokens = batch.num_requests = batch.num_rows = batch.page_table_width = 1;
  batch.token_ids = &token;
  batch.positions = &position;
  batch.request_starts = starts;
  batch.page_tables = pages;
  batch.output_rows = &row;
  batch.flags = PS_BATCH_ALL_RANKS;
  if (ps_program_run(program, &batch)) return failed("run");
  if (ps_program_logits(program, &logits, &num_rows, &width)) return failed("logits");
  printf("tensor's name is:logits data size is:%zu tensor elements num is:%d\noutput data is:", sizeof(float) * (size_t)width, width);
  for (i = 0; i < 10 && i < width; ++i) printf(" %.9g", logits[i]);
  putchar('\n');
  return 0;
}

int main(int argc, char** argv) {
  char path[4096];
  ps_rank_place place = {sizeof place};
  ps_rank_info rank = {sizeof rank};
  ps_model_options model_options = {sizeof model_options};
  ps_model_info info = {sizeof info};
  ps_program_options options = {sizeof options};
  ps_join_options join = {sizeof join};
  ps_context_options context_options = {sizeof context_options};
  ps_model* model = NULL;
  ps_context* context = NULL;
  ps_program* program = NULL;
  ps_comm* comm = NULL;
  int status = 1;
  if (argc != 2) return fprintf(stderr, "usage: %s \"ranks/rank_{rank}.psm\"\n", argv[0]), 2;
  if (ps_rank_from_environment(&place)) return failed("launcher");
  path_of(argv[1], place.rank, path, sizeof path);
  options.max_tokens = options.max_requests = options.max_rows = options.num_pages = 1;
  if (ps_model_open(path, &model_options, &model) || ps_model_describe(model, &info) || ps_model_rank(model, &options, &rank)) {
    failed("open");
  } else {
    join.rank = place.rank;
    join.world = place.world;
    join.part_bytes = rank.part_bytes;
    join.yield = 1; /* the ranks may have fewer cores than threads */
    context_options.num_threads = 1;
    if (ps_shared_join(&join, &comm)) {
      failed("join");
    } else {
      context_options.comm = comm;
      status = ps_context_create(&context_options, &context) || ps_context_agree(context, info.network) ||
               ps_program_create(model, context, &options, &program);
      status = status ? failed("program") : predict(program, &info);
    }
  }
  ps_program_destroy(program);
  ps_model_close(model);
  ps_context_destroy(context);
  ps_shared_close(comm);
  return status;
}
