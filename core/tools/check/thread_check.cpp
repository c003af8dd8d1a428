// Runs, shares and walks with many threads, some of them late, many times.  Checks that every item is processed once,
// that nothing is read before it was written, and that every thread returns.  Also built with ThreadSanitizer.
//
//   thread_check ROUNDS
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <vector>

#include "threads/pool.h"

using namespace ps;

namespace {

constexpr int64_t kMillisecond = 1000000;
constexpr int32_t kItems = 64;
int64_t num_failures = 0;
// Checks that a thread that leaves a walk does not touch it any more.
std::atomic<int64_t> num_left{0};

void expect(bool good, const char* what, int64_t found) {
  if (good) return;
  if (++num_failures > 20) exit(1);
  printf("%s: found %lld\n", what, static_cast<long long>(found));
}

void nap(int64_t nanoseconds) {
  const timespec time{0, static_cast<long>(nanoseconds)};
  nanosleep(&time, nullptr);
}

// Not atomic on purpose: only barriers order the threads' accesses to the cells.
struct Cells {
  Pool* pool;
  int64_t num_steps;
  std::vector<int64_t> cells;
  std::atomic<int64_t> num_wrong{0}, num_came{0};
  uint64_t naps;  // bit i: a thread naps in step 2 i
  // Step s expects every cell, its own and its neighbour's, to be s, and sets its own to s + 1; a barrier is in
  // between.
  void step(int64_t s, const WalkSlot& slot) {
    int64_t begin, end;
    split(kItems, slot.rank, slot.num_threads, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
      if (s % 2 == 0) num_wrong += cells[static_cast<size_t>((i + 17) % kItems)] != s / 2;
      if (s % 2 == 1) num_wrong += cells[static_cast<size_t>(i)]++ != s / 2;
    }
  }
};

void walk_cells(void* argument, int32_t thread, WalkSlot* slot, int64_t at) {
  Cells* c = static_cast<Cells*>(argument);
  if (thread != 0 && at > 0) ++c->num_came;
  for (const int64_t first = at; at < c->num_steps; ++at) {
    if (at > first && !c->pool->walk_barrier().arrive_and_wait(slot, at, [] {})) {
      ++num_left;
      return;
    }
    if (slot->rank == slot->num_threads - 1 && (c->naps >> (at / 2) & 1)) nap(kMillisecond * 2);
    c->step(at, *slot);
  }
  c->pool->walk_barrier().finish(slot, thread == 0);
}

struct Shared {
  std::atomic<int32_t> next{0};
  int32_t done[kItems] = {};
};

void share_items(void* argument, int32_t) {
  Shared* s = static_cast<Shared*>(argument);
  for (int32_t i; (i = s->next.fetch_add(1)) < kItems;) ++s->done[i];
}

void run_items(void* argument, int32_t thread) { ++static_cast<int32_t*>(argument)[thread * 16]; }

void stress(int32_t num_threads, int32_t num_cores, int64_t rounds) {
  Pool pool;
  expect(pool.start(num_threads, num_cores) == PS_OK, "start", num_threads);
  num_left = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    Cells cells{&pool, 40, std::vector<int64_t>(kItems), {}, {}, round % 4 == 1 ? uint64_t{0x21} : 0};
    const int64_t patience = round % 8 == 7 ? 0 : kMillisecond / 2;
    expect(pool.walk(walk_cells, &cells, patience, round % 16 == 5) == PS_OK, "walk", round);
    expect(cells.num_wrong == 0, "cells read or written at the wrong time", cells.num_wrong);
    for (int64_t cell : cells.cells) expect(cell == cells.num_steps / 2, "cell after the walk", cell);
    if (patience == 0) expect(cells.num_came == 0, "threads that came late to a walk of all", cells.num_came);
    Shared shared;
    expect(pool.share(share_items, &shared, round % 4 == 3) == PS_OK, "share", round);
    for (int32_t done : shared.done) expect(done == 1, "times that an item was shared", done);
    std::vector<int32_t> runs(static_cast<size_t>(num_threads) * 16);
    if (round % 4 == 2) expect(pool.run(run_items, runs.data()) == PS_OK, "run", round);
    for (size_t i = 0; i < runs.size(); i += 16) expect(runs[i] == (round % 4 == 2), "runs of a thread", runs[i]);
    if (round % 32 == 0) nap(kMillisecond);
  }
  printf("%d threads, %d cores: %lld walks, %lld times a thread left one\n", num_threads, num_cores,
         static_cast<long long>(rounds), static_cast<long long>(num_left.load()));
}

// A walk of four steps with three threads: how many take part in the last.
struct Late {
  Pool* pool;
  int64_t busy_ns, nap_ns;  // of thread 2, in the second step and in the third
  std::atomic<int32_t> num_threads{0};
  std::atomic<bool> was_late{false}, lacked_core{false};
};

void walk_late(void* argument, int32_t thread, WalkSlot* slot, int64_t at) {
  Late* late = static_cast<Late*>(argument);
  for (const int64_t first = at; at < 4; ++at) {
    if (at > first && !late->pool->walk_barrier().arrive_and_wait(slot, at, [] {})) return;
    if (thread == 0 && at == 0) nap(5 * kMillisecond);  // gives the others time to join
    if (thread == 2 && (at == 1 || at == 2) && slot->num_threads == 3) {
      late->was_late = true;
      const int64_t start = now_ns(), end = thread_ns() + late->busy_ns,
                    expected = at == 1 ? late->busy_ns : late->nap_ns;
      while (at == 1 && thread_ns() < end) {
      }
      if (at == 2 && late->nap_ns) nap(late->nap_ns);
      if (now_ns() - start > expected + 5 * kMillisecond) late->lacked_core = true;
    }
    if (at == 3) late->num_threads = slot->num_threads;
  }
  late->pool->walk_barrier().finish(slot, thread == 0);
}

// Checks whether a thread that is busy and then off its core for this long leaves the walk.  An attempt without a free
// core is inconclusive; if all are, the check is skipped.
void check_late(int64_t busy_ns, int64_t nap_ns, int32_t num_threads, const char* what) {
  Pool pool;
  pool.start(3, 3);
  for (int32_t tries = 0; tries < 20; ++tries) {
    Late late{&pool, busy_ns, nap_ns, {}, {}, {}};
    pool.walk(walk_late, &late, 40 * kMillisecond, false);
    if (late.was_late && !late.lacked_core) return expect(late.num_threads == num_threads, what, late.num_threads);
    nap(50 * kMillisecond);
  }
  printf("no core for: %s\n", what);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? atoll(argv[1]) : 1000;
  stress(1, 1, rounds / 10);
  stress(2, 2, rounds);
  stress(3, 3, rounds);
  stress(8, 8, rounds);
  stress(8, 2, rounds);
  check_late(0, 100 * kMillisecond, 2, "threads after one was off its core beyond patience");
  check_late(80 * kMillisecond, 0, 3, "threads after one was late with work of its own");
  // The others waited long at the barrier before, which must not count for this one.
  check_late(25 * kMillisecond, 20 * kMillisecond, 3, "threads after one was late within patience");
  printf("%lld failures\n", static_cast<long long>(num_failures));
  return num_failures != 0;
}
