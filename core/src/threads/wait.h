// Words that threads wait on: they spin briefly, then sleep.
#ifndef PENSTOCK_THREADS_WAIT_H
#define PENSTOCK_THREADS_WAIT_H

#include <stdint.h>

#include <atomic>

#include "base/clock.h"

namespace ps {

constexpr int64_t kSpinNanoseconds = 50000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until done() or a timeout, calling idle() in between; returns whether it was done.
template <typename Done, typename Idle>
bool spin_until(int64_t nanoseconds, Done&& done, Idle&& idle) {
  const int64_t deadline = now_ns() + nanoseconds;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      idle();
      pause_cpu();
    }
  } while (now_ns() < deadline);
  return false;
}

// Sleeps while the word is `expected`, at most `nanoseconds` (0: no limit); may wake up spuriously.
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds);
void futex_wake_all(std::atomic<uint32_t>* word);
// The same for a word in memory shared between processes.
void futex_wait_shared(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds);
void futex_wake_shared(std::atomic<uint32_t>* word);

// A counter; every advance wakes its waiters.
class alignas(64) WaitWord {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  // Returns when the word differs from `old`, or at `until_ns` (0: no limit).
  void wait_while(uint32_t old, bool spin, int64_t until_ns = 0) {
    if (spin && spin_until(kSpinNanoseconds, [&] { return load() != old; }, [] {})) return;
    sleep_while(old, until_ns);
  }
  // Adds one; returns whether it woke a thread.
  bool advance();

 private:
  void sleep_while(uint32_t old, int64_t until_ns);

  std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> sleepers_{0};
};

}  // namespace ps

#endif
