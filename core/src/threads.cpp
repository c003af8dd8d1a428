#include "threads.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "cpu.h"

namespace ps {
namespace {

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void WaitWord::sleep_while(uint32_t old) {
  if (sleepers_.load(std::memory_order_relaxed) == 0) since_.store(now_ns(), std::memory_order_relaxed);
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
  num_cores_ = num_usable_cpus();
  turnout_.reset(num_threads < num_cores_ ? num_threads : num_cores_);
  if (num_threads == 1) return PS_OK;
  const size_t bytes = static_cast<size_t>(num_threads) * sizeof(Worker);
  workers_ = static_cast<Worker*>(aligned_alloc(alignof(Worker), bytes));
  if (!workers_) return fail(PS_OUT_OF_MEMORY, "num_threads: no memory for %d threads", num_threads);
  for (int32_t i = 0; i < num_threads; ++i) new (&workers_[i]) Worker{this, i, pthread_t{}, {}};
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are the application's threads' business
  for (int32_t i = 1; i < num_threads; ++i) {
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
  // A thread that cannot run must not be waited for by spinning.
  const bool spin = worker->index < pool->num_cores_;
  for (uint32_t seen = 0;; ++seen) {
    worker->turn.wait_while(seen, spin, [] {});
    if (pool->stopping_) return nullptr;
    pool->work_(pool->argument_, worker->index);
    pool->barrier_.wait();
  }
}

ps_status Pool::check_owner() const {
  if (getpid() == owner_) return PS_OK;
  return fail(PS_INVALID_ARGUMENT,
              "context: made in process %d and used in its forked child %d, where its threads do not exist; "
              "make the context in the child, or spawn instead of forking",
              static_cast<int>(owner_), static_cast<int>(getpid()));
}

void Pool::run_on(Work work, void* argument, int32_t num_threads) {
  work_ = work;
  argument_ = argument;
  barrier_.reset(num_threads, num_threads <= num_cores_);
  for (int32_t i = 1; i < num_threads; ++i) workers_[i].turn.advance();
  work(argument, 0);
  barrier_.wait();
}

ps_status Pool::run(Work work, void* argument, bool alone) {
  PS_TRY(check_owner());
  pthread_mutex_lock(&busy_);
  run_on(work, argument, alone ? 1 : num_threads_);
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

ps_status Pool::walk(Work work, void* argument, int64_t patience_ns, bool alone) {
  PS_TRY(check_owner());
  pthread_mutex_lock(&busy_);
  const int32_t num_threads = alone ? 1 : patience_ns ? turnout_.next() : num_threads_;
  meeting_.reset(num_threads, num_threads <= num_cores_, patience_ns);
  run_on(work, argument, num_threads);
  if (patience_ns && !alone) turnout_.note(num_threads, meeting_.num_threads());
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

void Pool::stop() {
  stopping_ = true;
  for (int32_t i = 1; i <= num_started_; ++i) workers_[i].turn.advance();
  for (int32_t i = 1; i <= num_started_; ++i) pthread_join(workers_[i].thread, nullptr);
}

Pool::~Pool() {
  if (workers_ && getpid() == owner_) stop();  // a forked child has no threads to stop
  free(workers_);
  pthread_mutex_destroy(&busy_);
}

}  // namespace ps
