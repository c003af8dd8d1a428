// The barrier of a walk: admission, arrival, leaving and waking.
// Hot: runs in every step.
#include "threads/walk_barrier.h"

namespace ps {

uint64_t EntryGate::open() {
  const uint64_t key = (state_.load(std::memory_order_relaxed) & ~kCount) + kOne;
  state_.store(key, std::memory_order_seq_cst);
  return key;
}

int32_t EntryGate::enter(uint64_t* key) {
  uint64_t state = state_.load(std::memory_order_relaxed);
  do {
    if (!(state & kOne)) return -1;
  } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_seq_cst, std::memory_order_relaxed));
  *key = state & ~kCount;
  return static_cast<int32_t>(state & kCount);
}

int32_t EntryGate::close(uint64_t key) {
  uint64_t state = state_.load(std::memory_order_relaxed);
  do {
    if ((state & ~kCount) != key) return 0;
  } while (!state_.compare_exchange_weak(state, key + kOne, std::memory_order_seq_cst, std::memory_order_relaxed));
  return static_cast<int32_t>(state & kCount);
}

int64_t Backoff::extend(int64_t now, int64_t late_ns) {
  if (until_ns_ && now - until_ns_ < kMemoryNanoseconds) {
    length_ns_ *= 2;
  } else {
    length_ns_ = late_ns > kMinNanoseconds ? late_ns : kMinNanoseconds;
  }
  if (length_ns_ > kMaxNanoseconds) length_ns_ = kMaxNanoseconds;
  return until_ns_ = now + length_ns_;
}

void WalkBarrier::open(bool spin, int64_t patience_ns, bool closed, WalkSlot* slot) {
  spin_.store(spin, std::memory_order_relaxed);
  patience_ns_ = patience_ns;
  num_threads_ = 1;
  num_admitted_ = 0;
  lost_ns_ = 0;
  epoch_ = (word_.load(std::memory_order_relaxed) + kEpochOne) & kEpoch;
  word_.store(epoch_, std::memory_order_relaxed);
  const int64_t now = now_ns();
  *slot = {0, 1, epoch_, 0, closed ? 0 : gate_.open(), now, patience_ns && !closed ? thread_ns() : 0, 0};
}

void WalkBarrier::gather(int32_t others, int64_t nanoseconds, WalkSlot* slot) {
  const auto are_here = [&] { return gate_.num_entered() >= others; };
  if (!spin_until(nanoseconds ? nanoseconds : kSpinNanoseconds, are_here, [] {}) && !nanoseconds) {
    for (;;) {
      const uint32_t seen = gatherer_wake_.load();
      if (are_here()) break;
      gatherer_wake_.wait_while(seen, false);
    }
  }
  if (gate_.num_entered() > 0) publish(slot, 0, false);
}

bool WalkBarrier::join(WalkSlot* slot, int64_t* at) {
  uint64_t walk;
  const int32_t order = gate_.enter(&walk);
  if (order < 0) return false;
  gatherer_wake_.advance();
  for (;;) {
    const uint32_t seen = joiner_wake_.load();
    const uint64_t admitted = admitted_.load(std::memory_order_acquire);
    if ((admitted & ~EntryGate::kCount) == walk && (admitted & EntryGate::kCount) > static_cast<uint64_t>(order)) break;
    if (!gate_.is_open(walk)) return false;
    joiner_wake_.wait_while(seen, spin_.load(std::memory_order_relaxed));
  }
  *slot = {first_rank_ + order - first_order_, 0, 0, 0, walk, now_ns(), patience_ns_ ? thread_ns() : 0, 0};
  take_slot(slot);
  *at = at_;
  return true;
}

// Starts a new epoch: the thread with the highest rank takes the slot of the thread that left.
void WalkBarrier::take_slot(WalkSlot* slot) {
  if (left_rank_ >= 0 && slot->rank == num_threads_) slot->rank = left_rank_;
  slot->num_threads = num_threads_;
  slot->epoch = epoch_;
  slot->target = static_cast<uint32_t>(num_threads_) * kOne;
}

int64_t WalkBarrier::lateness(const WalkSlot& slot, int64_t now) {
  const uint32_t word = word_.load(std::memory_order_acquire);
  if (!patience_ns_ || !(word & kSleep) || (word & kArrivals) + kOne != slot.target) return 0;
  const int64_t waited = now - asleep_ns_.load(std::memory_order_relaxed) + kSpinNanoseconds;
  const int64_t without_core = now - slot.from_ns - (thread_ns() - slot.from_thread_ns);
  if (2 * without_core <= waited) return 0;
  lost_ns_ += waited;
  return lost_ns_ > patience_ns_ ? lost_ns_ : 0;
}

WalkBarrier::Arrival WalkBarrier::arrive_slowly(WalkSlot* slot, int64_t at, bool change) {
  const int64_t now = now_ns(), late = lateness(*slot, now);
  if (late) {
    slot->backoff_until_ns = backoff_.extend(now, late);
    lost_ns_ = 0;
  }
  const uint32_t flags = change || late ? kChange : 0;
  uint32_t old = word_.load(std::memory_order_relaxed);
  while (!word_.compare_exchange_weak(old, (old + kOne) | flags, std::memory_order_acq_rel)) {
  }
  if ((old & kArrivals) + kOne != slot->target) return WAITS;
  if (late) {
    publish(slot, at, true);
    return LEFT;
  }
  finish_barrier(slot, at, old | flags);
  return WENT_ON;
}

void WalkBarrier::finish_barrier(WalkSlot* slot, int64_t at, uint32_t old) {
  if (old & kChange) return publish(slot, at, false);
  slot->target += static_cast<uint32_t>(slot->num_threads) * kOne;
  if (old & kSleep) wake();
}

// A thread that leaves admits no others: its later writes could come after the next barrier.
void WalkBarrier::publish(WalkSlot* slot, int64_t at, bool leaves) {
  const int32_t before = num_admitted_, entered = leaves ? before : gate_.num_entered();
  first_order_ = before;
  first_rank_ = num_threads_;
  left_rank_ = leaves ? slot->rank : -1;
  num_threads_ += entered - before - leaves;
  num_admitted_ = entered;
  at_ = at;
  epoch_ = (epoch_ + kEpochOne) & kEpoch;
  const uint32_t epoch = epoch_;
  if (!leaves) take_slot(slot);
  const uint32_t old = word_.exchange(epoch, std::memory_order_acq_rel);
  // From here on the others continue; threads that join use the fields above until they reach a barrier too.
  if (entered != before) {
    admitted_.store(slot->walk + static_cast<uint64_t>(entered), std::memory_order_release);
    joiner_wake_.advance();
  }
  if (old & kSleep) futex_wake_all(&word_);
}

uint32_t WalkBarrier::sleep(WalkSlot* slot) {
  uint32_t word = word_.load(std::memory_order_acquire);
  while (!is_over(word, *slot)) {
    if (!(word & kSleep)) {
      if (!word_.compare_exchange_weak(word, word | kSleep, std::memory_order_acq_rel)) continue;
      word |= kSleep;
      asleep_ns_.store(now_ns(), std::memory_order_relaxed);
      asleep_turn_.store(slot->target | slot->epoch, std::memory_order_release);
    }
    futex_wait(&word_, word, 0);
    word = word_.load(std::memory_order_acquire);
  }
  if (patience_ns_) {
    slot->from_ns = now_ns();
    slot->from_thread_ns = thread_ns();
  }
  return word;
}

// A thread about to sleep sees the changed word, or is woken; threads that sleep at the next barrier check and sleep
// again.
void WalkBarrier::wake() {
  word_.fetch_and(~kSleep, std::memory_order_acq_rel);
  futex_wake_all(&word_);
}

void WalkBarrier::finish(WalkSlot* slot, bool waits) {
  if (slot->num_threads > 1) {
    if (is_awaited(*slot)) {
      const int64_t now = now_ns(), late = lateness(*slot, now);
      if (late) slot->backoff_until_ns = backoff_.extend(now, late);
    }
    const uint32_t old = word_.fetch_add(kOne, std::memory_order_acq_rel);
    if ((old & kArrivals) + kOne == slot->target) {
      if (old & kSleep) wake();
    } else if (waits) {
      wait(slot, [] {});
    } else {
      return;
    }
  }
  if (slot->walk) close(slot->walk);
}

// Called by the last to arrive and by the waiting thread; the first call closes the gate.
void WalkBarrier::close(uint64_t walk) {
  gate_.close(walk);
  joiner_wake_.advance();
}

bool WalkBarrier::await_end(uint64_t walk, int64_t until_ns) {
  for (;;) {
    const uint32_t seen = joiner_wake_.load();
    if (!gate_.is_open(walk)) return true;
    if (until_ns && now_ns() >= until_ns) return false;
    joiner_wake_.wait_while(seen, spin_.load(std::memory_order_relaxed), until_ns);
  }
}

}  // namespace ps
