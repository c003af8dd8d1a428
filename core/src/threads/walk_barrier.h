// The barrier between the steps of a walk, where threads may join and leave.
#ifndef PENSTOCK_THREADS_WALK_BARRIER_H
#define PENSTOCK_THREADS_WALK_BARRIER_H

#include "threads/wait.h"

namespace ps {

// The slot of a thread in a walk.
struct WalkSlot {
  int32_t rank, num_threads;
  uint32_t epoch, target;           // target: value of WalkBarrier::word_ when all have arrived at the next barrier
  uint64_t walk;                    // the gate's key
  int64_t from_ns, from_thread_ns;  // when the thread last started to run, by wall clock and CPU clock
  int64_t backoff_until_ns;         // after leaving: earliest time to return
};

// Admits threads while it is open, and counts them.  A key names one opening.
class alignas(64) EntryGate {
 public:
  uint64_t open();
  // Returns the thread's number, from 0, or -1 if the gate is closed.  The key names the opening that it entered
  // through.
  int32_t enter(uint64_t* key);
  // Closes the gate and returns the number of threads that entered, or 0 if it was already closed.
  int32_t close(uint64_t key);
  bool is_open(uint64_t key) const { return key == (state_.load(std::memory_order_seq_cst) & ~kCount); }
  int32_t num_entered() const { return static_cast<int32_t>(state_.load(std::memory_order_relaxed) & kCount); }

  static constexpr uint64_t kCount = 0xffffff;  // the low bits of the state

 private:
  static constexpr uint64_t kOne = kCount + 1;  // the key is odd, in units of it, while the gate is open
  std::atomic<uint64_t> state_{0};
};

// The backoff of a thread that was late because something else used its core.
class Backoff {
 public:
  // Returns the end of the backoff after the thread was late by `late_ns`.
  int64_t extend(int64_t now, int64_t late_ns);

 private:
  // The first backoff is as long as the delay.  It doubles each time the thread is late again, so that stalls (a time
  // slice of the kernel, 1 to 4 ms) cost little compared with it.
  static constexpr int64_t kMinNanoseconds = 1000000, kMaxNanoseconds = 32000000, kMemoryNanoseconds = 50000000;
  int64_t until_ns_ = 0, length_ns_ = 0;
};

// A walk begins with one thread, and others join at its barriers.  They continue without a thread that delayed them too
// long because it had no core: something else uses the core and probably will again.  They do wait for a thread that is
// late for another reason, such as its own work, a page fault or a stopped machine.
class WalkBarrier {
 public:
  // For the first thread. `closed`: no other thread joins. `patience_ns` 0: waits without limit.
  void open(bool spin, int64_t patience_ns, bool closed, WalkSlot* slot);
  // Waits until this many others have entered, spinning at most `nanoseconds`; 0: no limit.  Call before the first
  // barrier.
  void gather(int32_t others, int64_t nanoseconds, WalkSlot* slot);
  // For the other threads: returns when a barrier admits the caller. *at is the step after that barrier, or 0 before
  // the first one.  False: the walk is over.
  bool join(WalkSlot* slot, int64_t* at);
  // The barrier before step `at`.  False: the thread must leave the walk.  Otherwise its slot may have changed.
  template <typename Idle>
  bool arrive_and_wait(WalkSlot* slot, int64_t at, Idle&& idle) {
    const bool change = slot->rank == 0 && gate_.num_entered() > num_admitted_;
    if (slot->num_threads == 1) {
      if (change) publish(slot, at, false);
      return true;
    }
    if (change || is_awaited(*slot)) {
      const Arrival arrival = arrive_slowly(slot, at, change);
      if (arrival != WAITS) return arrival == WENT_ON;
    } else {
      const uint32_t old = word_.fetch_add(kOne, std::memory_order_acq_rel);
      if ((old & kArrivals) + kOne == slot->target) {
        finish_barrier(slot, at, old);
        return true;
      }
    }
    wait(slot, idle);
    return true;
  }
  // After the last step.  The walk is over when all its threads have called this; `waits`: return only then.
  void finish(WalkSlot* slot, bool waits);
  // Returns true when the walk of this key is over; false at `until_ns`, if not 0.
  bool await_end(uint64_t walk, int64_t until_ns);

 private:
  enum Arrival { WAITS, WENT_ON, LEFT };

  // word_: arrivals since the epoch began, the epoch, and two flags.
  static constexpr uint32_t kSleep = 1;   // some thread sleeps on the word
  static constexpr uint32_t kChange = 2;  // the last to arrive must begin an epoch with other threads
  static constexpr uint32_t kEpochOne = 4, kEpoch = 0xffc, kOne = 0x1000, kArrivals = ~(kOne - 1);

  static bool is_over(uint32_t word, const WalkSlot& slot) {
    if ((word & kEpoch) != slot.epoch) return true;
    const int32_t beyond = static_cast<int32_t>((word & kArrivals) - slot.target);
    return beyond > 0 || (beyond == 0 && !(word & kChange));
  }
  // Whether other threads sleep until this one arrives.  If not, the word was not written since and is cached.
  bool is_awaited(const WalkSlot& slot) const {
    return asleep_turn_.load(std::memory_order_acquire) == (slot.target | slot.epoch);
  }
  // For the last to arrive: the time lost so far to descheduled threads if it exceeds patience, else 0.  Two threads
  // that alternate on one core lose little at each barrier, but most of a walk in total.
  int64_t lateness(const WalkSlot& slot, int64_t now);
  Arrival arrive_slowly(WalkSlot* slot, int64_t at, bool change);
  void finish_barrier(WalkSlot* slot, int64_t at, uint32_t old);
  void publish(WalkSlot* slot, int64_t at, bool leaves);
  template <typename Idle>
  void wait(WalkSlot* slot, Idle&& idle) {
    uint32_t word;
    const auto over = [&] { return is_over(word = word_.load(std::memory_order_acquire), *slot); };
    if (!spin_.load(std::memory_order_relaxed) || !spin_until(kSpinNanoseconds, over, idle)) word = sleep(slot);
    if ((word & kEpoch) == slot->epoch) {
      slot->target += static_cast<uint32_t>(slot->num_threads) * kOne;
    } else {
      take_slot(slot);
    }
  }
  uint32_t sleep(WalkSlot* slot);
  void take_slot(WalkSlot* slot);
  void wake();
  void close(uint64_t walk);

  alignas(64) std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<uint32_t> asleep_turn_{0};  // the barrier at which a thread began to sleep, and when
  std::atomic<int64_t> asleep_ns_{0};
  // Written by one thread while all others wait.
  int32_t num_threads_ = 1, num_admitted_ = 0, first_order_ = 0, first_rank_ = 0, left_rank_ = -1;
  uint32_t epoch_ = 0;
  int64_t at_ = 0, patience_ns_ = 0, lost_ns_ = 0;
  // Also read by threads outside a walk: if they enter as it ends, they may see the next one's.
  std::atomic<bool> spin_{true};
  Backoff backoff_;
  EntryGate gate_;
  alignas(64) std::atomic<uint64_t> admitted_{0};  // the walk's key + the number of admitted threads
  WaitWord joiner_wake_;                           // for threads outside: some were admitted, or the walk is over
  WaitWord gatherer_wake_;                         // for the thread in gather
};

}  // namespace ps

#endif
