// The futex system calls.
// Hot: runs in every step.
#include "threads/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace ps {

namespace {

void wait_on(std::atomic<uint32_t>* word, int operation, uint32_t expected, int64_t nanoseconds) {
  const timespec limit{static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, expected, nanoseconds ? &limit : nullptr, nullptr,
          0);
}

}  // namespace

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds) {
  wait_on(word, FUTEX_WAIT_PRIVATE, expected, nanoseconds);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void futex_wait_shared(std::atomic<uint32_t>* word, uint32_t expected, int64_t nanoseconds) {
  wait_on(word, FUTEX_WAIT, expected, nanoseconds);
}

void futex_wake_shared(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void WaitWord::sleep_while(uint32_t old, int64_t until_ns) {
  while (load() == old) {
    const int64_t left = until_ns ? until_ns - now_ns() : 0;
    if (until_ns && left <= 0) return;
    // Either advance() sees the sleeper, or the kernel sees the new value and returns.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(&value_, old, left);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
}

bool WaitWord::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return false;
  futex_wake_all(&value_);
  return true;
}

}  // namespace ps
