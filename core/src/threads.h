// A pool of threads that walk one function together.
#ifndef PENSTOCK_THREADS_H
#define PENSTOCK_THREADS_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include <atomic>

#include "clock.h"
#include "error.h"

namespace ps {

constexpr int32_t kMaxThreads = 1024;

constexpr int64_t kSpinNanoseconds = 50000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A word that threads wait on until it changes: a short spin, then sleep.
class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  // Returns once the word differs from `old`, true if it slept.  A thread that spins calls idle() between looks.
  template <typename Idle>
  bool wait_while(uint32_t old, bool spin, Idle&& idle) {
    if (spin) {
      const int64_t deadline = now_ns() + kSpinNanoseconds;
      do {
        for (int i = 0; i < 32; ++i) {
          if (load() != old) return false;
          idle();
          pause_cpu();
        }
      } while (now_ns() < deadline);
    }
    sleep_while(old);
    return true;
  }
  void sleep_while(uint32_t old);
  void advance();  // adds one and wakes every waiter
  // Since when the first of those that sleep does; 0: nobody sleeps.
  int64_t asleep_since() const {
    return sleepers_.load(std::memory_order_relaxed) > 0 ? since_.load(std::memory_order_relaxed) : 0;
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> sleepers_{0};
  std::atomic<int64_t> since_{0};
};

// All threads arrive before any leaves.
class Barrier {
 public:
  void reset(int32_t num_threads, bool spin) {
    num_threads_ = num_threads;
    spin_ = spin;
  }
  void wait() {
    // Copies: once the last thread arrives, reset may make the barrier ready for other threads.
    const int32_t num_threads = num_threads_;
    const bool spin = spin_;
    if (num_threads == 1) return;
    const uint32_t turn = turn_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.advance();
    } else {
      turn_.wait_while(turn, spin, [] {});
    }
  }

 private:
  alignas(64) std::atomic<int32_t> arrived_{0};
  int32_t num_threads_ = 1;
  bool spin_ = true;
  WaitWord turn_;
};

// A thread among those that walk together.
struct Place {
  int32_t rank, num_threads;
  int64_t from_ns, from_thread_ns;  // when it last began to be awaited, by both clocks
};

// The barriers of a walk.  The others go on without a thread that keeps them waiting too long for lack of a core:
// something else holds it, and would again.  A thread that is late with work of its own, a fault of a page or a machine
// that stands still is waited for.
class Meeting {
 public:
  // `patience_ns` 0: waits for ever.
  void reset(int32_t num_threads, bool spin, int64_t patience_ns) {
    num_threads_ = num_threads;
    spin_ = spin;
    patience_ns_ = patience_ns;
    start_ns_ = now_ns();
  }
  int32_t num_threads() const { return num_threads_; }
  Place place_of(int32_t thread) const { return {thread, num_threads_, start_ns_, patience_ns_ ? thread_ns() : 0}; }
  // False: the thread is to leave the walk.  Else its place may be another one than before.
  template <typename Idle>
  bool meet(Place* place, Idle&& idle) {
    const uint32_t turn = turn_.load();
    const bool spin = spin_;  // a copy: after the last arrival reset may be next
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == place->num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      const bool late = is_late(*place);
      if (late) {
        late_rank_ = place->rank;
        num_threads_ = place->num_threads - 1;
      }
      turn_.advance();
      return !late;
    }
    if (turn_.wait_while(turn, spin, idle) && patience_ns_) {
      place->from_ns = now_ns();
      place->from_thread_ns = thread_ns();
    }
    if (num_threads_ != place->num_threads) {  // the last takes the place of the one that left
      if (place->rank == num_threads_) place->rank = late_rank_;
      place->num_threads = num_threads_;
    }
    return true;
  }

 private:
  bool is_late(const Place& place) const {
    const int64_t since = patience_ns_ ? turn_.asleep_since() : 0, now = now_ns();
    if (!since || now - since <= patience_ns_) return false;
    const int64_t without_core = now - place.from_ns - (thread_ns() - place.from_thread_ns);
    return 2 * without_core > now - since;
  }

  alignas(64) std::atomic<int32_t> arrived_{0};
  WaitWord turn_;
  // Written while all others wait.
  int32_t num_threads_ = 1, late_rank_ = 0;
  int64_t patience_ns_ = 0, start_ns_ = 0;
  bool spin_ = true;
};

// How many threads to walk with, after walks that some came late to: fewer for a while, and for twice as long when
// they are late again.
class Turnout {
 public:
  void reset(int32_t most) { most_ = fewer_ = most; }
  int32_t next() { return wait_ > 0 ? fewer_ : most_; }
  void note(int32_t began, int32_t ended) {
    if (wait_ > 0) --wait_;
    if (ended < began) {
      fewer_ = ended;
      pause_ = pause_ == 0 ? 1 : pause_ < kMostPause ? 2 * pause_ : kMostPause;
      wait_ = pause_;
      on_time_ = 0;
    } else if (began == most_ && ++on_time_ >= kOnTime) {
      pause_ = 0;
    }
  }

 private:
  static constexpr int32_t kMostPause = 64, kOnTime = 16;  // walks
  int32_t most_ = 1, fewer_ = 1, pause_ = 0, wait_ = 0, on_time_ = 0;
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
  // As run, with as many threads as there are cores for, fewer after threads came late: thread i of work begins as
  // rank i of meeting().  `patience_ns` is what a thread may be late; 0: for ever, and every thread walks.
  ps_status walk(Work work, void* argument, int64_t patience_ns, bool alone);
  Meeting& meeting() { return meeting_; }

 private:
  struct Worker {
    Pool* pool;
    int32_t index;
    pthread_t thread;
    WaitWord turn;
  };
  ps_status check_owner() const;
  void run_on(Work work, void* argument, int32_t num_threads);
  static void* worker_main(void* worker);
  void stop();

  int32_t num_threads_ = 1, num_started_ = 0;
  pid_t owner_ = 0;
  Worker* workers_ = nullptr;
  pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER;  // programs that share a context take turns
  Work work_ = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;
  int32_t num_cores_ = 1;
  Barrier barrier_;
  Meeting meeting_;
  Turnout turnout_;
};

// The part of `items` that one thread computes.
inline void split(int64_t items, int32_t thread, int32_t num_threads, int64_t* begin, int64_t* end) {
  *begin = items * thread / num_threads;
  *end = items * (thread + 1) / num_threads;
}

}  // namespace ps

#endif
