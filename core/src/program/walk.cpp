// The loop over the list of steps, which all threads run together.
// Hot: runs in every step.
#include "base/clock.h"
#include "program/program.h"

namespace ps {
namespace {

// The boundaries of a share's chunks, in 64ths: each chunk is half of the remainder, so that there are few, and little
// is left when the first thread comes to help.
constexpr int64_t kEdges[] = {0, 32, 48, 56, 60, 62, 63, 64}, kNumChunks = 7;
constexpr int64_t kRowsTogether = 8;  // number of rows taken through several steps while they are in the L1 cache
constexpr int64_t kPrefetchBytes =
    128 << 10;  // of the next weights, prefetched into a core's cache by a thread that waits
constexpr int64_t kLine = 64;

// Prefetches the beginning of a thread's share of the next weights while the thread waits.
class WeightPrefetch {
 public:
  void aim(const Step* step, const WalkSlot& slot) {
    if (step == step_) return;
    step_ = step;
    int64_t begin = 0, end = 0;
    if (step) split(step->weight_bytes, slot.rank, slot.num_threads, &begin, &end);
    second_half_ = step ? step->second_half : 0;
    at_ = step ? step->weights + begin : nullptr;
    end_ = at_ + (end - begin < kPrefetchBytes ? end - begin : kPrefetchBytes);
  }
  void operator()() {
    for (int i = 0; i < 4 && at_ < end_; ++i, at_ += kLine) {
      __builtin_prefetch(at_, 0, 2);
      if (second_half_) __builtin_prefetch(at_ + second_half_, 0, 2);
    }
  }

 private:
  const Step* step_ = nullptr;
  int64_t second_half_ = 0;
  const uint8_t *at_ = nullptr, *end_ = nullptr;
};

// Takes the next of `count` chunks of a share in the step of this stamp; -1: none left.
int64_t take(Share* share, uint64_t stamp, int64_t count) {
  uint64_t old = share->taken.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t old_stamp = old >> 16;
    const uint64_t next = old_stamp == stamp ? old & 0xffff : 0;
    if (old_stamp > stamp || next >= static_cast<uint64_t>(count)) return -1;
    if (share->taken.compare_exchange_weak(old, stamp << 16 | (next + 1), std::memory_order_relaxed))
      return static_cast<int64_t>(next);
  }
}

// Runs the chunks of one thread's share that no other thread has taken.
void run_share(const Step& step, Share* share, uint64_t stamp, int64_t begin, int64_t end, int32_t thread) {
  const int64_t grains = end - begin;
  for (int64_t i = take(share, stamp, kNumChunks); i >= 0; i = take(share, stamp, kNumChunks)) {
    const int64_t first = (begin + grains * kEdges[i] / 64) * step.grain;
    const int64_t last = (begin + grains * kEdges[i + 1] / 64) * step.grain;
    if (first < last) step.run(*step.call, first, last < step.items ? last : step.items, thread);
  }
}

void run_shares(const Step& step, Share* shares, uint64_t stamp, int32_t thread, const WalkSlot& slot) {
  const int32_t num_threads = slot.num_threads;
  const int64_t grains = (step.items + step.grain - 1) / step.grain;
  for (int32_t i = 0; i < num_threads; ++i) {
    const int32_t owner = slot.rank + i < num_threads ? slot.rank + i : slot.rank + i - num_threads;
    int64_t begin, end;
    split(grains, owner, num_threads, &begin, &end);
    run_share(step, &shares[owner], stamp, begin, end, thread);
  }
}

// The number of steps from `at` on over the same rows without a barrier between them.
int64_t num_together(const ps_program& p, int64_t at) {
  const Step& first = p.bound.steps[at];
  int64_t count = 1;
  if (first.split != SPLIT_ROWS) return count;
  for (; at + count < p.bound.steps.size(); ++count) {
    const Step& step = p.bound.steps[at + count];
    if (step.barrier || step.split != SPLIT_ROWS || step.items != first.items) break;
  }
  return count;
}

// Runs `count` steps over the rows of this thread, a few rows at a time.  Their spans, if recorded, are consecutive, as
// if each step had processed its rows at once.
void run_rows(const Step* steps, int64_t count, int32_t thread, const WalkSlot& slot, ps_span* spans) {
  int64_t begin, end;
  split(steps->items, slot.rank, slot.num_threads, &begin, &end);
  const int64_t start = spans ? now_ns() : 0;
  for (int64_t row = begin; row < end; row += kRowsTogether) {
    const int64_t stop = row + kRowsTogether < end ? row + kRowsTogether : end;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = spans ? now_ns() : 0;
      steps[i].run(*steps[i].call, row, stop, thread);
      if (spans) spans[i].end_ns += now_ns() - from;
    }
  }
  int64_t at = start;
  for (int64_t i = 0; spans && i < count; ++i) {
    spans[i].arrive_ns = i ? at : spans[i].arrive_ns;
    spans[i].begin_ns = at;
    spans[i].end_ns = at += spans[i].end_ns;
  }
}

// kTimed: each step's times go to the spans.
template <bool kTimed>
void walk(ps_program* p, int32_t thread, WalkSlot* slot, int64_t at) {
  WalkBarrier& barrier = p->context->pool.walk_barrier();
  Share* const shares = p->bound.shares.get();
  ps_span* span = kTimed ? p->spans.row(thread, p->bound.steps.size()) : nullptr;
  if (kTimed) span += at;
  WeightPrefetch prefetch;
  const int64_t first = at, num_steps = p->bound.steps.size();  // the barrier before the first step returns it
  for (int64_t count; at < num_steps; at += count) {
    const Step& step = p->bound.steps[at];
    if (kTimed) span->arrive_ns = now_ns();
    if (step.barrier && at > first) {
      if (slot->num_threads > 1) prefetch.aim(step.next_weights, *slot);
      if (!barrier.arrive_and_wait(slot, at, prefetch)) return;  // the program may be destroyed
    }
    count = num_together(*p, at);
    if (count > 1) {
      run_rows(&step, count, thread, *slot, span);
      if (kTimed) span += count;
      continue;
    }
    if (kTimed) span->begin_ns = now_ns();
    if (step.split == SPLIT_SHARES && slot->num_threads > 1) {
      run_shares(step, shares, p->last.stamp + static_cast<uint64_t>(at), thread, *slot);
    } else {
      int64_t begin, end;
      split(step.items, slot->rank, slot->num_threads, &begin, &end);
      if (begin < end) step.run(*step.call, begin, end, thread);
    }
    if (kTimed) (span++)->end_ns = now_ns();
  }
  barrier.finish(slot, thread == 0);
}

}  // namespace

void walk_steps(void* program, int32_t thread, WalkSlot* slot, int64_t at) {
  walk<false>(static_cast<ps_program*>(program), thread, slot, at);
}
void walk_steps_timed(void* program, int32_t thread, WalkSlot* slot, int64_t at) {
  walk<true>(static_cast<ps_program*>(program), thread, slot, at);
}

}  // namespace ps
