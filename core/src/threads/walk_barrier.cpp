#include "threads/walk_barrier.h"

namespace ps {

uint64_t Door::open() {
  const uint64_t key = (state_.load(std::memory_order_relaxed) & ~kCount) + kOne;
  state_.store(key, std::memory_order_seq_cst);
  return key;
}

int32_t Door::enter(uint64_t* key) {
  uint64_t state = state_.load(std::memory_order_relaxed);
  do {
    if (!(state & kOne)) return -1;
  } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_seq_cst, std::memory_order_relaxed));
  *key = state & ~kCount;
  return static_cast<int32_t>(state & kCount);
}

int32_t Door::close(uint64_t key) {
  uint64_t state = state_.load(std::memory_order_relaxed);
  do {
    if ((state & ~kCount) != key) return 0;
  } while (!state_.compare_exchange_weak(state, key + kOne, std::memory_order_seq_cst, std::memory_order_relaxed));
  return static_cast<int32_t>(state & kCount);
}

int64_t Rest::after(int64_t now, int64_t late_ns) {
  if (until_ns_ && now - until_ns_ < kMemory) {
    length_ns_ *= 2;
  } else {
    length_ns_ = late_ns > kLeast ? late_ns : kLeast;
  }
  if (length_ns_ > kMost) length_ns_ = kMost;
  return until_ns_ = now + length_ns_;
}

void Meeting::open(bool spin, int64_t patience_ns, bool closed, Place* place) {
  spin_.store(spin, std::memory_order_relaxed);
  patience_ns_ = patience_ns;
  num_threads_ = 1;
  num_admitted_ = 0;
  lost_ns_ = 0;
  epoch_ = (word_.load(std::memory_order_relaxed) + kEpochOne) & kEpoch;
  word_.store(epoch_, std::memory_order_relaxed);
  const int64_t now = now_ns();
  *place = {0, 1, epoch_, 0, closed ? 0 : door_.open(), now, patience_ns && !closed ? thread_ns() : 0, 0};
}

void Meeting::gather(int32_t others, int64_t nanoseconds, Place* place) {
  const auto are_here = [&] { return door_.num_entered() >= others; };
  if (!spin_until(nanoseconds ? nanoseconds : kSpinNanoseconds, are_here, [] {}) && !nanoseconds) {
    for (;;) {
      const uint32_t seen = knocks_.load();
      if (are_here()) break;
      knocks_.wait_while(seen, false);
    }
  }
  if (door_.num_entered() > 0) publish(place, 0, false);
}

bool Meeting::join(Place* place, int64_t* at) {
  uint64_t walk;
  const int32_t order = door_.enter(&walk);
  if (order < 0) return false;
  knocks_.advance();
  for (;;) {
    const uint32_t seen = news_.load();
    const uint64_t admitted = admitted_.load(std::memory_order_acquire);
    if ((admitted & ~Door::kCount) == walk && (admitted & Door::kCount) > static_cast<uint64_t>(order)) break;
    if (!door_.is_open(walk)) return false;
    news_.wait_while(seen, spin_.load(std::memory_order_relaxed));
  }
  *place = {first_rank_ + order - first_order_, 0, 0, 0, walk, now_ns(), patience_ns_ ? thread_ns() : 0, 0};
  take_place(place);
  *at = at_;
  return true;
}

// In a new epoch: the last takes the place of the thread that left.
void Meeting::take_place(Place* place) {
  if (left_rank_ >= 0 && place->rank == num_threads_) place->rank = left_rank_;
  place->num_threads = num_threads_;
  place->epoch = epoch_;
  place->target = static_cast<uint32_t>(num_threads_) * kOne;
}

int64_t Meeting::lateness(const Place& place, int64_t now) {
  const uint32_t word = word_.load(std::memory_order_acquire);
  if (!patience_ns_ || !(word & kSleep) || (word & kArrivals) + kOne != place.target) return 0;
  const int64_t waited = now - asleep_ns_.load(std::memory_order_relaxed) + kSpinNanoseconds;
  const int64_t without_core = now - place.from_ns - (thread_ns() - place.from_thread_ns);
  if (2 * without_core <= waited) return 0;
  lost_ns_ += waited;
  return lost_ns_ > patience_ns_ ? lost_ns_ : 0;
}

Meeting::Arrival Meeting::arrive_slowly(Place* place, int64_t at, bool change) {
  const int64_t now = now_ns(), late = lateness(*place, now);
  if (late) {
    place->rest_until_ns = rest_.after(now, late);
    lost_ns_ = 0;
  }
  const uint32_t flags = change || late ? kChange : 0;
  uint32_t old = word_.load(std::memory_order_relaxed);
  while (!word_.compare_exchange_weak(old, (old + kOne) | flags, std::memory_order_acq_rel)) {
  }
  if ((old & kArrivals) + kOne != place->target) return WAITS;
  if (late) {
    publish(place, at, true);
    return LEFT;
  }
  finish_barrier(place, at, old | flags);
  return WENT_ON;
}

void Meeting::finish_barrier(Place* place, int64_t at, uint32_t old) {
  if (old & kChange) return publish(place, at, false);
  place->target += static_cast<uint32_t>(place->num_threads) * kOne;
  if (old & kSleep) wake();
}

// A thread that leaves lets nobody in: what it did after the exchange could come after the next barrier.
void Meeting::publish(Place* place, int64_t at, bool leaves) {
  const int32_t before = num_admitted_, entered = leaves ? before : door_.num_entered();
  first_order_ = before;
  first_rank_ = num_threads_;
  left_rank_ = leaves ? place->rank : -1;
  num_threads_ += entered - before - leaves;
  num_admitted_ = entered;
  at_ = at;
  epoch_ = (epoch_ + kEpochOne) & kEpoch;
  const uint32_t epoch = epoch_;
  if (!leaves) take_place(place);
  const uint32_t old = word_.exchange(epoch, std::memory_order_acq_rel);
  // From here on the others walk; those who come in find the fields above until they have come to a barrier too.
  if (entered != before) {
    admitted_.store(place->walk + static_cast<uint64_t>(entered), std::memory_order_release);
    news_.advance();
  }
  if (old & kSleep) futex_wake_all(&word_);
}

uint32_t Meeting::sleep(Place* place) {
  uint32_t word = word_.load(std::memory_order_acquire);
  while (!is_over(word, *place)) {
    if (!(word & kSleep)) {
      if (!word_.compare_exchange_weak(word, word | kSleep, std::memory_order_acq_rel)) continue;
      word |= kSleep;
      asleep_ns_.store(now_ns(), std::memory_order_relaxed);
      asleep_turn_.store(place->target | place->epoch, std::memory_order_release);
    }
    futex_wait(&word_, word, 0);
    word = word_.load(std::memory_order_acquire);
  }
  if (patience_ns_) {
    place->from_ns = now_ns();
    place->from_thread_ns = thread_ns();
  }
  return word;
}

// A sleeper either finds the word changed and does not sleep, or is woken; those who sleep at the next barrier already
// look and sleep again.
void Meeting::wake() {
  word_.fetch_and(~kSleep, std::memory_order_acq_rel);
  futex_wake_all(&word_);
}

void Meeting::finish(Place* place, bool waits) {
  if (place->num_threads > 1) {
    if (is_awaited(*place)) {
      const int64_t now = now_ns(), late = lateness(*place, now);
      if (late) place->rest_until_ns = rest_.after(now, late);
    }
    const uint32_t old = word_.fetch_add(kOne, std::memory_order_acq_rel);
    if ((old & kArrivals) + kOne == place->target) {
      if (old & kSleep) wake();
    } else if (waits) {
      wait(place, [] {});
    } else {
      return;
    }
  }
  if (place->walk) close(place->walk);
}

// By the last to arrive and by the thread that waits: who is first does it.
void Meeting::close(uint64_t walk) {
  door_.close(walk);
  news_.advance();
}

bool Meeting::await_end(uint64_t walk, int64_t until_ns) {
  for (;;) {
    const uint32_t seen = news_.load();
    if (!door_.is_open(walk)) return true;
    if (until_ns && now_ns() >= until_ns) return false;
    news_.wait_while(seen, spin_.load(std::memory_order_relaxed), until_ns);
  }
}

}  // namespace ps
