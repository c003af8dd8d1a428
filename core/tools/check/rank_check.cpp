// Ranks as threads, over the C API: random batches whose logits must be equal to those of the whole bundle bit for bit,
// and groups that are ended in the middle of a step.  Built with sanitizers by the tests.
//
//   rank_check STEPS WHOLE [--stages] RANK_0 RANK_1 ...
//
// The arguments are bundles; with --stages they are those of a pipeline whose stages have one rank each.  Prints what
// differs; the exit status is 1 if anything does.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "penstock_ranks.h"

namespace {

constexpr int32_t kMaxTokens = 160, kTableWidth = 10, kNumPages = 2 * kTableWidth, kThreads = 2, kPartitionPages = 8;
constexpr int64_t kPartBytes = 1 << 22;

int32_t num_failures = 0;
bool in_stages = false;

void expect(bool good, const char* what) {
  if (good) return;
  printf("%s: %s\n", what, ps_error_message());
  if (++num_failures > 20) exit(1);
}

struct Open {
  ps_context* context = nullptr;
  ps_model* model = nullptr;
  ps_program* program = nullptr;
  ps_model_info info{};

  bool open(const char* path, const ps_comm* comm, int32_t kv_layout, int32_t num_pages = kNumPages) {
    ps_context_options context_options{sizeof(ps_context_options), kThreads, nullptr, comm, nullptr, 0, 0};
    if (in_stages && comm) context_options = {sizeof(ps_context_options), kThreads, nullptr, nullptr, comm, 1, 0};
    const ps_model_options model_options{sizeof(ps_model_options), 0, 0};
    const ps_program_options options{
        sizeof(ps_program_options), kMaxTokens, 2, kMaxTokens, num_pages, 2, kv_layout, 0, nullptr};
    info.struct_size = sizeof(info);
    return ps_context_create(&context_options, &context) == PS_OK &&
           (!comm || ps_context_agree(context, "") == PS_OK) && ps_model_open(path, &model_options, &model) == PS_OK &&
           ps_model_describe(model, &info) == PS_OK && ps_program_create(model, context, &options, &program) == PS_OK;
  }
  void close() {
    ps_program_destroy(program);
    ps_model_close(model);
    ps_context_destroy(context);
  }
};

// Two requests, each with its own pages; they grow by some tokens per step and start again when full.
struct Batch {
  std::vector<int32_t> ids, positions, starts, tables, rows;
  ps_batch batch{};

  // `context_ranks`: the number of ranks over which pages are split.
  void make(int32_t* lens, const ps_model_info& info, int32_t context_ranks) {
    const int32_t most =
        kTableWidth * PS_PAGE_TOKENS < info.context_len ? kTableWidth * PS_PAGE_TOKENS : info.context_len;
    ids.clear(), positions.clear(), rows.clear();
    starts.assign(1, 0);
    tables.assign(static_cast<size_t>(info.num_page_groups) * 2 * kTableWidth, 0);
    for (int32_t request = 0; request < 2; ++request) {
      const int32_t count = rand() % 3 ? 1 : 1 + rand() % (kMaxTokens / 2);
      if (lens[request] + count > most) lens[request] = 0;
      for (int32_t i = 0; i < count; ++i) {
        ids.push_back(rand() % info.vocab_size);
        positions.push_back(lens[request]++);
        if (rand() % 4) rows.push_back(static_cast<int32_t>(ids.size()) - 1);
      }
      starts.push_back(static_cast<int32_t>(ids.size()));
      for (int32_t group = 0; group < info.num_page_groups; ++group) {
        for (int32_t page = 0; page < kTableWidth; ++page) {
          const int32_t rank = (request + page / kPartitionPages) % context_ranks;
          tables[static_cast<size_t>((group * 2 + request) * kTableWidth + page)] =
              (request * kTableWidth + page) * context_ranks + rank;
        }
      }
    }
    batch = ps_batch{sizeof(ps_batch),
                     starts[2],
                     2,
                     static_cast<int32_t>(rows.size()),
                     kTableWidth,
                     ids.data(),
                     positions.data(),
                     starts.data(),
                     tables.data(),
                     rows.data(),
                     0,
                     0};
  }
};

struct Follower {
  ps_comm* comm;
  const char* path;
  int32_t kv_layout;
};

void* follow(void* argument) {
  const Follower* f = static_cast<Follower*>(argument);
  Open rank;
  if (rank.open(f->path, f->comm, f->kv_layout)) {
    ps_status status;
    while ((status = ps_program_follow(rank.program)) == PS_OK) {
    }
    expect(status == PS_ABORTED, "follow");
  } else {
    expect(strstr(ps_error_message(), "the group was ended") != nullptr, "open");
    f->comm->abort(f->comm->self, ps_error_message());
  }
  rank.close();
  return nullptr;
}

struct Ender {
  ps_comm* comm;
  useconds_t microseconds;
};

void* end_later(void* argument) {
  const Ender* ender = static_cast<Ender*>(argument);
  usleep(ender->microseconds);
  ender->comm->abort(ender->comm->self, "ended");
  return nullptr;
}

// `microseconds` not 0: the group is aborted after this time.
void run_group(int64_t num_steps, const char* whole_path, char** paths, int32_t world, int32_t kv_layout,
               useconds_t microseconds) {
  int64_t bytes = 0;
  expect(ps_shared_bytes(world, kPartBytes, &bytes) == PS_OK, "bytes");
  void* memory = aligned_alloc(4096, static_cast<size_t>(bytes));
  memset(memory, 0, static_cast<size_t>(bytes));
  std::vector<Follower> followers(static_cast<size_t>(world));
  std::vector<pthread_t> threads(static_cast<size_t>(world));
  for (int32_t r = 0; r < world; ++r) {
    Follower& f = followers[static_cast<size_t>(r)];
    f = Follower{nullptr, paths[r], kv_layout};
    const ps_shared_options options{sizeof(ps_shared_options), r, world, -1, memory, kPartBytes, 600000, 1, 1, 0};
    expect(ps_shared_open(&options, &f.comm) == PS_OK, "comm");
  }
  for (size_t r = 1; r < threads.size(); ++r) pthread_create(&threads[r], nullptr, follow, &followers[r]);
  Ender ender{followers.back().comm, microseconds};
  pthread_t ender_thread;
  if (microseconds) pthread_create(&ender_thread, nullptr, end_later, &ender);
  Open whole, first;
  bool alive = first.open(paths[0], followers[0].comm, kv_layout);
  expect(alive || microseconds, "rank 0");
  const int32_t context_ranks = alive ? first.info.context_ranks : 1;
  expect(whole.open(whole_path, nullptr, kv_layout, kNumPages * context_ranks), "whole");
  int32_t lens[2] = {0, 0};
  Batch batch;
  for (int64_t step = 0; alive && (microseconds || step < num_steps); ++step) {
    batch.make(lens, whole.info, context_ranks);
    const ps_status status = ps_program_run(first.program, &batch.batch);
    alive = status == PS_OK;
    if (!alive) {
      expect(microseconds && status == PS_ABORTED, "run");
      break;
    }
    expect(ps_program_run(whole.program, &batch.batch) == PS_OK, "whole run");
    const float *a = nullptr, *b = nullptr;
    int32_t rows = 0, vocab = 0;
    expect(ps_program_logits(first.program, &a, &rows, &vocab) == PS_OK &&
               ps_program_logits(whole.program, &b, &rows, &vocab) == PS_OK,
           "logits");
    if (memcmp(a, b, static_cast<size_t>(rows) * static_cast<size_t>(vocab) * sizeof(float)) != 0) {
      printf("world %d, KV %d, step %lld: other logits\n", world, kv_layout, static_cast<long long>(step));
      ++num_failures;
    }
  }
  followers[0].comm->abort(followers[0].comm->self, "closed");
  for (size_t r = 1; r < threads.size(); ++r) pthread_join(threads[r], nullptr);
  if (microseconds) pthread_join(ender_thread, nullptr);
  first.close();
  whole.close();
  for (Follower& f : followers) ps_shared_close(f.comm);
  free(memory);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return fprintf(stderr, "usage: rank_check STEPS WHOLE [--stages] RANK_0 RANK_1 ...\n"), 2;
  const int64_t num_steps = atoll(argv[1]);
  in_stages = strcmp(argv[3], "--stages") == 0;
  char** parts = argv + 3 + in_stages;
  const int32_t world = argc - 3 - in_stages;
  for (int32_t kv_layout = PS_KV_F32; kv_layout <= PS_KV_INT4; ++kv_layout)
    run_group(num_steps, argv[2], parts, world, kv_layout, 0);
  for (useconds_t i = 1; i <= 20; ++i) run_group(0, argv[2], parts, world, PS_KV_BF16, i * i * 400);
  return num_failures ? 1 : 0;
}
