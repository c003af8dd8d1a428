// A thread pool that runs one function on all threads.
#ifndef PENSTOCK_THREADS_POOL_H
#define PENSTOCK_THREADS_POOL_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include <atomic>

#include "base/error.h"
#include "threads/walk_barrier.h"

namespace ps {

constexpr int32_t kMaxThreads = 1024;

// All threads arrive before any leaves. `run` uses this instead of WalkBarrier: a walk of all threads also waits for
// them at its beginning, which makes short work two to three times slower (docs/history/log.md).
class Barrier {
 public:
  void reset(int32_t num_threads, bool spin) {
    num_threads_ = num_threads;
    spin_ = spin;
  }
  void wait() {
    // By value: once the last thread arrives, reset may prepare the barrier for other threads.
    const int32_t num_threads = num_threads_;
    const bool spin = spin_;
    if (num_threads == 1) return;
    const uint32_t turn = turn_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.advance();
    } else {
      turn_.wait_while(turn, spin);
    }
  }

 private:
  alignas(64) std::atomic<int32_t> arrived_{0};
  int32_t num_threads_ = 1;
  bool spin_ = true;
  WaitWord turn_;
};

class Pool {
 public:
  using Work = void (*)(void* argument, int32_t thread);
  // Runs steps from `at` on, with the slot that it has before that step.
  using Walk = void (*)(void* argument, int32_t thread, WalkSlot* slot, int64_t at);

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();
  // At most `num_cores` of these threads walk or share; 0: the number available to this process.
  ps_status start(int32_t num_threads, int32_t num_cores = 0);
  int32_t num_threads() const { return num_threads_; }
  // Calls work(argument, i) for each i < num_threads, with the caller as thread 0; returns when all are done.  Refused
  // in a forked child, where the other threads do not exist.
  ps_status run(Work work, void* argument);
  // Calls work(argument, i) for 0 and for those other threads that arrive before thread 0 is done.  The work takes
  // shares itself until nothing is left. `single_thread`: thread 0 only.
  ps_status share(Work work, void* argument, bool single_thread);
  // Calls walk(argument, 0, ...), and lets other threads join at the barriers of walk_barrier() as they arrive.
  // Threads that were late by more than `patience_ns` return after a backoff; 0: all threads walk from the beginning to
  // the end. `single_thread`: thread 0 only.
  ps_status walk(Walk walk, void* argument, int64_t patience_ns, bool single_thread);
  WalkBarrier& walk_barrier() { return walk_barrier_; }

 private:
  struct Worker {
    Pool* pool;
    int32_t index;
    pthread_t thread;
    std::atomic<int64_t> backoff_until_ns;
    WaitWord turn;
  };
  ps_status check_owner() const;
  int32_t call_workers(int64_t now, int32_t spared);
  void walk_together(Walk walk, void* argument, int64_t patience_ns);
  void attend(Worker* worker, uint32_t seen);
  static void* worker_main(void* worker);
  void stop();

  int32_t num_threads_ = 1, num_started_ = 0, num_cores_ = 1;
  pid_t owner_ = 0;
  Worker* workers_ = nullptr;
  int64_t backoff_until_ns_ = 0;                      // of thread 0
  pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER;  // programs that share a context take turns
  Work work_ = nullptr;
  Walk walk_ = nullptr;
  void* argument_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> num_runs_{0};
  Barrier barrier_;           // for run
  EntryGate sharing_;         // for share
  WaitWord shared_;           // counts the threads that finished a share
  WalkBarrier walk_barrier_;  // for walk
};

// Computes the part of `items` that belongs to one thread.
inline void split(int64_t items, int32_t thread, int32_t num_threads, int64_t* begin, int64_t* end) {
  *begin = items * thread / num_threads;
  *end = items * (thread + 1) / num_threads;
}

}  // namespace ps

#endif
