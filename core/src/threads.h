// A pool of threads that walk one function together.
#ifndef PENSTOCK_THREADS_H
#define PENSTOCK_THREADS_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include <atomic>

#include "error.h"

namespace ps {

constexpr int32_t kMaxThreads = 1024;

// A word that threads wait on until it changes: a short spin, then sleep.
class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  // Returns once the word differs from `old`.
  void wait_while(uint32_t old, bool spin);
  void advance();  // adds one and wakes every waiter

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> sleepers_{0};
};

// All threads arrive before any leaves.
class Barrier {
 public:
  void reset(int32_t num_threads, bool spin) {
    num_threads_ = num_threads;
    spin_ = spin;
  }
  void wait() {
    if (num_threads_ == 1) return;
    const uint32_t turn = turn_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.advance();
    } else {
      turn_.wait_while(turn, spin_);
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

  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();
  ps_status start(int32_t num_threads);
  int32_t num_threads() const { return num_threads_; }
  // Calls work(argument, i) for each i < num_threads, the caller being thread 0; returns when all are done.
  // `alone`: for thread 0 only.  Refused in a forked child, where the other threads do not exist.
  ps_status run(Work work, void* argument, bool alone = false);
  Barrier& barrier() { return barrier_; }  // for the threads inside run

 private:
  struct Worker {
    Pool* pool;
    int32_t index;
    pthread_t thread;
  };
  static void* worker_main(void* worker);
  void stop();

  int32_t num_threads_ = 1, num_started_ = 0;
  pid_t owner_ = 0;
  bool spin_ = true;
  Worker* workers_ = nullptr;
  pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER;  // programs that share a context take turns
  Work work_ = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;
  WaitWord turn_;
  Barrier barrier_;
};

// The part of `items` that one thread computes.
inline void split(int64_t items, int32_t thread, int32_t num_threads, int64_t* begin, int64_t* end) {
  *begin = items * thread / num_threads;
  *end = items * (thread + 1) / num_threads;
}

}  // namespace ps

#endif
