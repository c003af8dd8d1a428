// The workers of a pool, and its three modes: run, share and walk.
// Hot: runs in every step.
#include "threads/pool.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <new>

#include "base/cpu.h"
#include "base/float_environment.h"

namespace ps {
namespace {

// How long a walk waits for awake threads before it begins.
constexpr int64_t kGatherNanoseconds = 20000;

}  // namespace

ps_status Pool::start(int32_t num_threads, int32_t num_cores) {
  num_threads_ = num_threads;
  owner_ = getpid();
  num_cores_ = num_cores ? num_cores : num_usable_cpus();
  if (num_threads == 1) return PS_OK;
  const size_t bytes = static_cast<size_t>(num_threads) * sizeof(Worker);
  workers_ = static_cast<Worker*>(aligned_alloc(alignof(Worker), bytes));
  if (!workers_) return fail(PS_OUT_OF_MEMORY, "num_threads: no memory for %d threads", num_threads);
  for (int32_t i = 0; i < num_threads; ++i) new (&workers_[i]) Worker{this, i, pthread_t{}, {0}, {}};
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // leave signals to the application's threads
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
  set_default_float_environment();  // a thread inherits the environment of its creator
  // Without a core of its own, a thread must not spin while it waits.
  const bool spin = worker->index < pool->num_cores_;
  uint32_t runs = 0;
  for (uint32_t seen = 0;;) {
    worker->turn.wait_while(seen, spin);
    seen = worker->turn.load();
    if (pool->stopping_.load(std::memory_order_acquire)) return nullptr;
    if (pool->num_runs_.load(std::memory_order_acquire) != runs) {  // at most one ahead: run waits for every thread
      ++runs;
      pool->work_(pool->argument_, worker->index);
      pool->barrier_.wait();
      continue;
    }
    pool->attend(worker, seen);
  }
}

// Takes part in the current share or walk, if it is not over.
void Pool::attend(Worker* worker, uint32_t seen) {
  uint64_t key;
  if (sharing_.enter(&key) >= 0) {
    work_(argument_, worker->index);
    shared_.advance();
    return;
  }
  WalkSlot slot;
  int64_t at;
  while (walk_barrier_.join(&slot, &at)) {
    walk_(argument_, worker->index, &slot, at);
    if (!slot.backoff_until_ns) return;
    worker->backoff_until_ns.store(slot.backoff_until_ns, std::memory_order_relaxed);
    worker->turn.wait_while(seen, false, slot.backoff_until_ns);
    if (worker->turn.load() != seen) return;
  }
}

ps_status Pool::check_owner() const {
  if (getpid() == owner_) return PS_OK;
  return fail(PS_INVALID_ARGUMENT,
              "context: made in process %d and used in its forked child %d, where its threads do not exist; "
              "make the context in the child, or spawn instead of forking",
              static_cast<int>(owner_), static_cast<int>(getpid()));
}

ps_status Pool::run(Work work, void* argument) {
  PS_TRY(check_owner());
  pthread_mutex_lock(&busy_);
  work_ = work;
  argument_ = argument;
  barrier_.reset(num_threads_, num_threads_ <= num_cores_);
  num_runs_.fetch_add(1, std::memory_order_release);
  for (int32_t i = 1; i < num_threads_; ++i) workers_[i].turn.advance();
  work(argument, 0);
  barrier_.wait();
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

// Wakes the workers that have a core and are not backing off, except `spared`; returns how many were awake.
int32_t Pool::call_workers(int64_t now, int32_t spared) {
  int32_t num_awake = 0;
  for (int32_t i = (num_threads_ < num_cores_ ? num_threads_ : num_cores_) - 1; i > 0; --i) {
    if (workers_[i].backoff_until_ns.load(std::memory_order_relaxed) > now) continue;
    if (spared-- > 0) continue;
    num_awake += !workers_[i].turn.advance();
  }
  return num_awake;
}

ps_status Pool::share(Work work, void* argument, bool single_thread) {
  PS_TRY(check_owner());
  pthread_mutex_lock(&busy_);
  work_ = work;
  argument_ = argument;
  const uint32_t before = shared_.load();
  const uint64_t key = sharing_.open();
  if (!single_thread) call_workers(now_ns(), 0);
  work(argument, 0);
  const uint32_t after = before + static_cast<uint32_t>(sharing_.close(key));
  for (uint32_t seen = shared_.load(); seen != after; seen = shared_.load()) shared_.wait_while(seen, true);
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

void Pool::walk_together(Walk walk, void* argument, int64_t patience_ns) {
  walk_ = walk;
  argument_ = argument;
  WalkSlot slot;
  walk_barrier_.open(patience_ns || num_threads_ <= num_cores_, patience_ns, false, &slot);
  if (patience_ns) {
    const int64_t now = now_ns();
    const int32_t num_awake = call_workers(now, backoff_until_ns_ > now);
    if (num_awake) walk_barrier_.gather(num_awake, kGatherNanoseconds, &slot);
  } else {
    for (int32_t i = 1; i < num_threads_; ++i) workers_[i].turn.advance();
    walk_barrier_.gather(num_threads_ - 1, 0, &slot);
  }
  const uint64_t key = slot.walk;
  int64_t at = 0;
  do {
    walk(argument, 0, &slot, at);
    if (slot.backoff_until_ns) backoff_until_ns_ = slot.backoff_until_ns;
  } while (!walk_barrier_.await_end(key, backoff_until_ns_) && walk_barrier_.join(&slot, &at));
  walk_barrier_.await_end(key, 0);
}

ps_status Pool::walk(Walk walk, void* argument, int64_t patience_ns, bool single_thread) {
  PS_TRY(check_owner());
  pthread_mutex_lock(&busy_);
  if (single_thread || num_threads_ == 1) {
    WalkSlot slot;
    walk_barrier_.open(true, 0, true, &slot);
    walk(argument, 0, &slot, 0);
  } else {
    walk_together(walk, argument, patience_ns);
  }
  pthread_mutex_unlock(&busy_);
  return PS_OK;
}

void Pool::stop() {
  stopping_.store(true, std::memory_order_release);
  for (int32_t i = 1; i <= num_started_; ++i) workers_[i].turn.advance();
  for (int32_t i = 1; i <= num_started_; ++i) pthread_join(workers_[i].thread, nullptr);
}

Pool::~Pool() {
  if (workers_ && getpid() == owner_) stop();  // a forked child has no threads to stop
  free(workers_);
  pthread_mutex_destroy(&busy_);
}

}  // namespace ps
