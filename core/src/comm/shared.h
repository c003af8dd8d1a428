// The transport between ranks on one host: state and buffers in memory that all of them map.
#ifndef PENSTOCK_COMM_SHARED_H
#define PENSTOCK_COMM_SHARED_H

#include <atomic>

#include "base/error.h"

namespace ps {

constexpr int64_t kReasonBytes = 256, kMailBytes = 64 << 10;

// The shared memory.  It is zero at first, and no rank constructs anything in it, because others may already use it.  A
// rank writes only its own RankWords, and the doorbells of others.
struct alignas(128) GroupWords {
  std::atomic<uint32_t> aborted;  // 1: some rank writes the reason, 2: it is written
  alignas(128) char reason[kReasonBytes];
};
struct alignas(128) RankWords {
  std::atomic<uint32_t> arrivals;               // exchanges that the rank has reached; wraps
  std::atomic<uint64_t> tags[2];                // of the last two
  std::atomic<int32_t> core;                    // the core it ran on at that time, + 1
  alignas(128) std::atomic<uint32_t> doorbell;  // a sleeping rank waits on it
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> left;  // 1: the rank closed its comm
};
// The channel from one rank to another: a ring of two pieces.
struct alignas(128) MailWords {
  std::atomic<uint32_t> sent;  // number of pieces; wraps
  alignas(128) std::atomic<uint32_t> received;
};

class SharedComm {
 public:
  SharedComm() = default;
  SharedComm(const SharedComm&) = delete;
  SharedComm& operator=(const SharedComm&) = delete;
  ~SharedComm();
  ps_status open(const ps_shared_options& options);
  // Ends the group if a process ends without closing its comm. pids: of all ranks, in this process's namespace.
  ps_status watch(const int32_t* pids);
  ps_comm* comm() { return &comm_; }
  static ps_status bytes(int32_t world, int64_t part_bytes, int64_t* out);

  void* part() { return buffer(comm_.rank, next_); }
  // bytes null: a barrier.
  ps_status exchange(uint64_t tag, const int64_t* bytes, bool forever, const void** parts);
  ps_status send(int32_t to, const uint8_t* data, int64_t bytes);
  ps_status receive(int32_t from, uint8_t* data, int64_t bytes);
  ps_status await(int32_t from);
  void abort(const char* reason);

 private:
  RankWords& words(int32_t rank) { return ranks_[rank]; }
  uint8_t* buffer(int32_t rank, uint32_t number) { return buffers_ + (2 * rank + (number & 1)) * part_stride_; }
  MailWords& mail(int32_t from, int32_t to) { return mails_[from * comm_.world + to]; }
  uint8_t* piece(int32_t from, int32_t to, uint32_t number) {
    return pieces_ + ((from * comm_.world + to) * 2 + (number & 1)) * kMailBytes;
  }
  template <typename Done>
  ps_status wait(int32_t peer, bool forever, Done&& done);
  template <typename Done>
  ps_status sleep(int32_t peer, bool forever, Done&& done);
  void wake(int32_t rank);
  // Whether rank `peer` was last seen on this thread's core, where it cannot run while this thread spins.
  bool shares_core(int32_t peer);
  void leave_core();
  ps_status aborted_status();
  // A rank whose process ended without leaving, or `peer` if it has left; -1: none.  Watched groups only.
  int32_t ended_rank(int32_t peer);
  // A watched rank that was stopped by a signal at this check and the one before; -1: none, or too early to check.
  int32_t stopped_rank();

  ps_comm comm_{};
  void* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0, part_stride_ = 0, timeout_ns_ = 0;
  bool yield_ = false, watches_ = false;
  int32_t processes_[PS_MAX_RANKS];  // pidfds of the other ranks, if the group is watched
  int32_t pids_[PS_MAX_RANKS];
  uint64_t stopped_ = 0;  // bit per rank: stopped at the last check
  int64_t looked_ns_ = 0;
  uint64_t epoch_ = 0;
  uint32_t next_ = 1;    // the number of the next exchange
  int64_t left_ns_ = 0;  // when this rank last moved to another core
  GroupWords* group_ = nullptr;
  RankWords* ranks_ = nullptr;
  MailWords* mails_ = nullptr;
  uint8_t *pieces_ = nullptr, *buffers_ = nullptr;
};

}  // namespace ps

#endif
