#include "threads.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "cpu.h"

namespace ps {
namespace {

constexpr int64_t kSpinNanoseconds = 50000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void WaitWord::wait_while(uint32_t old, bool spin) {
  if (spin) {
    const int64_t deadline = now_ns() + kSpinNanoseconds;
    do {
      for (int i = 0; i < 32; ++i) {
        if (value_.load(std::memory_order_acquire) != old) return;
        pause_cpu();
      }
    } while (now_ns() < deadline);
  }
  while (value_.load(std::memory_order_acquire) == old) {
    // Either advance() sees the sleeper, or the kernel sees the new value and does not sleep.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    futex(&value_, FUTEX_WAIT_PRIVATE, old);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void WaitWord::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&value_, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

ps_status Pool::start(int32_t num_threads) {
  num_threads_ = num_threads;
  owner_ = getpid();
  spin_ = num_threads <= num_usable_cpus();  // a thread that cannot run must not be waited for by spinning
  barrier_.reset(num_threads, spin_);
  if (num_threads == 1) return PS_OK;
  workers_ = static_cast<Worker*>(calloc(static_cast<size_t>(num_threads), sizeof(Worker)));
  if (!workers_) return fail(PS_OUT_OF_MEMORY, "num_threads: no memory for %d threads", num_threads);
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are the application's threads' business
  for (int32_t i = 1; i < num_threads; ++i) {
    workers_[i] = Worker{this, i, pthread_t{}};
    if (pthread_create(&workers_[i].thread, nullptr, worker_main, &workers_[i]) != 0) break;
    num_started_ = i;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (num_started_ != num_threads - 1) {
    return fail(PS_OUT_OF_MEMORY, "num_threads: the system refused thread %d of %d", num_started_ + 2, num_threads);
  }
  return PS_OK;
}

void* Pool::worker_main(void* argument) {
  Worker* worker = static_cast<Worker*>(argument);
  Pool* pool = worker->pool;
  for (uint32_t seen = 0;; ++seen) {
    pool->turn_.wait_while(seen, pool->spin_);
    if (pool->stopping_) return nullptr;
    pool->work_(pool->argument_, worker->index);
    pool->barrier_.wait();
  }
}

ps_status Pool::run(Work work, void* argument, bool alone) {
  if (getpid() != owner_) {
    return fail(PS_INVALID_ARGUMENT,
                "context: made in process %d and used in its forked child %d, where its threads do not exist; "
                "make the context in the child, or spawn instead of forking",
                static_cast<int>(owner_), static_cast<int>(getpid()));
  }
  if (num_threads_ == 1 || alone) {
    pthread_mutex_lock(&busy_);
    work(argument, 0);
    pthread_mutex_unlock(&busy_);
    return PS_OK;
  }
  pthread_mutex_lock(&busy_);
  work_ = work;
  argument_ = argument;
  turn_.advance();
  work(argument, 0);
  barrier_.wait();
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

void Pool::stop() {
  stopping_ = true;
  turn_.advance();
  for (int32_t i = 1; i <= num_started_; ++i) pthread_join(workers_[i].thread, nullptr);
}

Pool::~Pool() {
  if (workers_ && getpid() == owner_) stop();  // a forked child has no threads to stop
  free(workers_);
  pthread_mutex_destroy(&busy_);
}

}  // namespace ps
