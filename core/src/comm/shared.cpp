// Exchanges over shared memory.
//
// In exchange n a rank writes its part into its buffer n mod 2, announces n, and waits until every other rank has
// announced n.  Then it may read their buffers.  Two buffers suffice: a rank overwrites buffer n mod 2 in exchange n +
// 2, after all have announced n + 1, and a rank announces n + 1 only after it has read what it needs of exchange n.
// Hot: runs in every step.
#include "comm/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/memory.h"
#include "threads/wait.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // newer than the headers
#endif

namespace ps {
namespace {

constexpr int32_t kSpins = 2000, kSpinsBeside = 40;  // before a check whether the other is on the same core
constexpr int64_t kStayNanoseconds = 1000000;        // minimum time between two moves to another core
constexpr int64_t kWatchNanoseconds = 50000000;      // between two checks for processes that have ended
constexpr int64_t kStoppedNanoseconds = 500000000;   // between two checks for stopped processes
constexpr int64_t kPage = 4096, kDefaultTimeoutMs = 60000, kMaxPartBytes = int64_t{1} << 40;

bool has_come(uint32_t arrivals, uint32_t number) { return static_cast<int32_t>(arrivals - number) >= 0; }

int64_t words_bytes(int32_t world) {
  const int64_t bytes = static_cast<int64_t>(sizeof(GroupWords)) + world * static_cast<int64_t>(sizeof(RankWords)) +
                        int64_t{world} * world * static_cast<int64_t>(sizeof(MailWords));
  return round_up(bytes, kPage);
}

// A debugger stops a process in another state, which does not count as stopped.
bool is_stopped(int32_t pid) {
  char text[512];
  snprintf(text, sizeof(text), "/proc/%d/stat", pid);
  const int file = open(text, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t size = read(file, text, sizeof(text) - 1);
  close(file);
  text[size < 0 ? 0 : size] = 0;
  const char* name_end = strrchr(text, ')');  // a name may contain parentheses
  return name_end && name_end[1] == ' ' && name_end[2] == 'T';
}

}  // namespace

ps_status SharedComm::bytes(int32_t world, int64_t part_bytes, int64_t* out) {
  if (world < 1 || world > PS_MAX_RANKS)
    return fail(PS_INVALID_ARGUMENT, "world: expected 1 to %d, got %d", PS_MAX_RANKS, world);
  if (part_bytes < 1 || part_bytes > kMaxPartBytes)
    return fail(PS_INVALID_ARGUMENT, "part_bytes: expected 1 to 2^40, got %lld", static_cast<long long>(part_bytes));
  *out =
      words_bytes(world) + int64_t{world} * world * 2 * kMailBytes + int64_t{world} * 2 * round_up(part_bytes, kPage);
  return PS_OK;
}

ps_status SharedComm::open(const ps_shared_options& o) {
  PS_TRY(bytes(o.world, o.part_bytes, &mapped_bytes_));
  if (o.rank < 0 || o.rank >= o.world)
    return fail(PS_INVALID_ARGUMENT, "rank: expected 0 to %d, got %d", o.world - 1, o.rank);
  if (o.timeout_ms < 0)
    return fail(PS_INVALID_ARGUMENT, "timeout_ms: expected 0 or more, got %lld", static_cast<long long>(o.timeout_ms));
  uint8_t* base = static_cast<uint8_t*>(o.memory);
  if (!base) {
    struct stat found;
    if (fstat(o.fd, &found) != 0 || found.st_size < mapped_bytes_) {
      return fail(PS_INVALID_ARGUMENT, "fd: expected a file of at least %lld bytes for %d ranks",
                  static_cast<long long>(mapped_bytes_), o.world);
    }
    void* mapped = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, o.fd, 0);
    if (mapped == MAP_FAILED) return fail(PS_OUT_OF_MEMORY, "fd: the system refused to map it");
    mapped_ = mapped;
    base = static_cast<uint8_t*>(mapped);
  }
  if (reinterpret_cast<uintptr_t>(base) % 128) return fail(PS_INVALID_ARGUMENT, "memory: expected a multiple of 128");
  group_ = reinterpret_cast<GroupWords*>(base);
  ranks_ = reinterpret_cast<RankWords*>(group_ + 1);
  mails_ = reinterpret_cast<MailWords*>(ranks_ + o.world);
  pieces_ = base + words_bytes(o.world);
  buffers_ = pieces_ + int64_t{o.world} * o.world * 2 * kMailBytes;
  part_stride_ = round_up(o.part_bytes, kPage);
  timeout_ns_ = (o.timeout_ms ? o.timeout_ms : kDefaultTimeoutMs) * 1000000;
  yield_ = o.yield != 0;
  epoch_ = o.epoch;
  comm_.struct_size = sizeof(ps_comm);
  comm_.rank = o.rank;
  comm_.world = o.world;
  comm_.part_bytes = part_stride_;
  comm_.self = this;
  comm_.part = [](void* self) { return static_cast<SharedComm*>(self)->part(); };
  comm_.all_gather = [](void* self, uint64_t tag, const int64_t* bytes, const void** parts) {
    return static_cast<SharedComm*>(self)->exchange(tag, bytes, false, parts);
  };
  comm_.broadcast = [](void* self, uint64_t tag, int32_t root, int64_t bytes, int32_t forever, const void** data) {
    int64_t counts[PS_MAX_RANKS] = {};
    const void* parts[PS_MAX_RANKS];
    if (root < 0 || root >= static_cast<SharedComm*>(self)->comm_.world)
      return fail(PS_INVALID_ARGUMENT, "root: expected a rank, got %d", root);
    counts[root] = bytes;
    PS_TRY(static_cast<SharedComm*>(self)->exchange(tag, counts, forever != 0, parts));
    *data = parts[root];
    return PS_OK;
  };
  comm_.send = [](void* self, int32_t to, const void* data, int64_t bytes) {
    return static_cast<SharedComm*>(self)->send(to, static_cast<const uint8_t*>(data), bytes);
  };
  comm_.recv = [](void* self, int32_t from, void* data, int64_t bytes) {
    return static_cast<SharedComm*>(self)->receive(from, static_cast<uint8_t*>(data), bytes);
  };
  comm_.barrier = [](void* self, uint64_t tag) {
    return static_cast<SharedComm*>(self)->exchange(tag, nullptr, false, nullptr);
  };
  comm_.await = [](void* self, int32_t from) { return static_cast<SharedComm*>(self)->await(from); };
  comm_.abort = [](void* self, const char* reason) { static_cast<SharedComm*>(self)->abort(reason); };
  return PS_OK;
}

ps_status SharedComm::watch(const int32_t* pids) {
  for (int32_t& descriptor : processes_) descriptor = -1;
  watches_ = true;
  for (int32_t r = 0; r < comm_.world; ++r) {
    pids_[r] = pids[r];
    if (r == comm_.rank) continue;
    processes_[r] = static_cast<int32_t>(syscall(SYS_pidfd_open, pids[r], 0));
    if (processes_[r] < 0 && errno == ESRCH) return fail(PS_ABORTED, "ranks: rank %d ended before the group began", r);
    if (processes_[r] < 0)
      return fail(PS_UNSUPPORTED, "ranks: expected Linux 5.3 or newer, which tells when a process ends: %s",
                  strerror(errno));
  }
  return PS_OK;
}

int32_t SharedComm::ended_rank(int32_t peer) {
  pollfd polls[PS_MAX_RANKS];
  for (int32_t r = 0; r < comm_.world; ++r) polls[r] = pollfd{processes_[r], POLLIN, 0};
  const bool any = poll(polls, static_cast<nfds_t>(comm_.world), 0) > 0;
  for (int32_t r = 0; r < comm_.world; ++r) {
    const bool left = words(r).left.load(std::memory_order_acquire) != 0;
    if (left ? r == peer : any && polls[r].revents) return r;
  }
  return -1;
}

int32_t SharedComm::stopped_rank() {
  const int64_t now = now_ns(), since = now - looked_ns_;
  if (since < kStoppedNanoseconds) return -1;
  const uint64_t before = since < 4 * kStoppedNanoseconds ? stopped_ : 0;
  looked_ns_ = now;
  stopped_ = 0;
  for (int32_t r = 0; r < comm_.world; ++r) {
    if (r != comm_.rank && is_stopped(pids_[r])) stopped_ |= uint64_t{1} << r;
  }
  return before & stopped_ ? __builtin_ctzll(before & stopped_) : -1;
}

SharedComm::~SharedComm() {
  if (watches_) {
    words(comm_.rank).left.store(1, std::memory_order_seq_cst);
    for (int32_t descriptor : processes_) {
      if (descriptor >= 0) close(descriptor);
    }
  }
  if (mapped_) munmap(mapped_, static_cast<size_t>(mapped_bytes_));
}

ps_status SharedComm::aborted_status() {
  for (int i = 0; i < 1000000 && group_->aborted.load(std::memory_order_acquire) != 2; ++i)
    pause_cpu();  // the reason is being written
  const bool written = group_->aborted.load(std::memory_order_acquire) == 2;
  return fail(PS_ABORTED, "ranks: the group was ended: %.*s", static_cast<int>(kReasonBytes - 1),
              written ? group_->reason : "?");
}

void SharedComm::abort(const char* reason) {
  uint32_t expected = 0;
  if (group_->aborted.compare_exchange_strong(expected, 1, std::memory_order_acq_rel)) {
    snprintf(group_->reason, sizeof(group_->reason), "%s", reason ? reason : "");
    group_->aborted.store(2, std::memory_order_seq_cst);
  }
  for (int32_t r = 0; r < comm_.world; ++r) {
    words(r).doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_shared(&words(r).doorbell);
  }
}

// Sequentially consistent: either this rank sees what was announced before this call, or this call sees that the rank
// sleeps.
void SharedComm::wake(int32_t rank) {
  if (!words(rank).sleeping.load(std::memory_order_seq_cst)) return;
  words(rank).doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_shared(&words(rank).doorbell);
}

bool SharedComm::shares_core(int32_t peer) {
  const int32_t core = words(peer).core.load(std::memory_order_relaxed) - 1;
  return core >= 0 && core == sched_getcpu();
}

// The kernel tends to put threads that wake each other on one core, where two ranks would spin in turns.  So this rank
// moves to a core where no other rank was seen.  It restores its affinity at once, but the kernel leaves it there until
// it sleeps.
void SharedComm::leave_core() {
  cpu_set_t allowed, others;
  if (now_ns() - left_ns_ < kStayNanoseconds || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  left_ns_ = now_ns();
  others = allowed;
  for (int32_t r = 0; r < comm_.world; ++r) {
    const int32_t core = words(r).core.load(std::memory_order_relaxed) - 1;
    if (r != comm_.rank && core >= 0 && core < CPU_SETSIZE) CPU_CLR(static_cast<size_t>(core), &others);
  }
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0)
    sched_setaffinity(0, sizeof(allowed), &allowed);
}

template <typename Done>
ps_status SharedComm::wait(int32_t peer, bool forever, Done&& done) {
  for (int32_t i = 0; i < kSpins; ++i) {
    if (done()) return PS_OK;
    if (group_->aborted.load(std::memory_order_relaxed)) return aborted_status();
    if (i == kSpinsBeside && !yield_ && shares_core(peer)) {
      leave_core();
      if (shares_core(peer)) break;
    }
    if (yield_) {
      sched_yield();
    } else {
      pause_cpu();
    }
  }
  return sleep(peer, forever, done);
}

template <typename Done>
ps_status SharedComm::sleep(int32_t peer, bool forever, Done&& done) {
  RankWords& own = words(comm_.rank);
  const int64_t start = now_ns(), deadline = start + timeout_ns_;
  for (;;) {
    const uint32_t seen = own.doorbell.load(std::memory_order_seq_cst);
    own.sleeping.store(1, std::memory_order_seq_cst);
    const int32_t ended = watches_ ? ended_rank(peer) : -1;  // before done(): the last announcement of a rank counts
    const bool is_done = done(), is_aborted = group_->aborted.load(std::memory_order_seq_cst) != 0;
    const int64_t now = now_ns();
    const int32_t stopped = watches_ && !forever && !is_done && now - start >= kWatchNanoseconds ? stopped_rank() : -1;
    int64_t left = forever ? 0 : deadline - now;
    if (is_done || is_aborted || ended >= 0 || stopped >= 0 || (!forever && left <= 0)) {
      own.sleeping.store(0, std::memory_order_relaxed);
      if (is_done) return PS_OK;
      if (is_aborted) return aborted_status();
      char reason[128];
      if (ended >= 0) {
        snprintf(reason, sizeof(reason), "rank %d ended", ended);
      } else if (stopped >= 0) {
        snprintf(reason, sizeof(reason), "rank %d is stopped by a signal", stopped);
      } else {
        snprintf(reason, sizeof(reason), "rank %d waited %lld ms for rank %d", comm_.rank,
                 static_cast<long long>(timeout_ns_ / 1000000), peer);
      }
      abort(reason);
      return aborted_status();
    }
    if (watches_ && (forever || left > kWatchNanoseconds)) left = kWatchNanoseconds;
    futex_wait_shared(&own.doorbell, seen, left);
    own.sleeping.store(0, std::memory_order_relaxed);
  }
}

ps_status SharedComm::exchange(uint64_t tag, const int64_t* bytes, bool forever, const void** parts) {
  for (int32_t r = 0; bytes && r < comm_.world; ++r) {
    if (bytes[r] >= 0 && bytes[r] <= comm_.part_bytes) continue;
    return fail(PS_INVALID_ARGUMENT, "bytes[%d]: expected 0 to %lld, got %lld", r,
                static_cast<long long>(comm_.part_bytes), static_cast<long long>(bytes[r]));
  }
  if (group_->aborted.load(std::memory_order_acquire)) return aborted_status();
  const uint32_t number = next_++;
  tag += epoch_ * 0x9e3779b97f4a7c15u;
  RankWords& own = words(comm_.rank);
  own.tags[number & 1].store(tag, std::memory_order_relaxed);
  own.core.store(sched_getcpu() + 1, std::memory_order_relaxed);
  own.arrivals.store(number, std::memory_order_seq_cst);
  for (int32_t r = 0; r < comm_.world; ++r) {
    if (r != comm_.rank) wake(r);
  }
  for (int32_t r = 0; r < comm_.world; ++r) {
    if (r != comm_.rank)
      PS_TRY(wait(r, forever, [&] { return has_come(words(r).arrivals.load(std::memory_order_seq_cst), number); }));
    const uint64_t found = words(r).tags[number & 1].load(std::memory_order_relaxed);
    if (found != tag) {
      char reason[160];
      snprintf(
          reason, sizeof(reason),
          "ranks %d and %d do not run the same step: exchange %u has tag %016llx on rank %d and %016llx on rank %d",
          comm_.rank, r, number, static_cast<unsigned long long>(tag), comm_.rank,
          static_cast<unsigned long long>(found), r);
      abort(reason);
      return aborted_status();
    }
    if (parts) parts[r] = buffer(r, number);
  }
  return PS_OK;
}

ps_status SharedComm::send(int32_t to, const uint8_t* data, int64_t bytes) {
  if (to < 0 || to >= comm_.world || to == comm_.rank)
    return fail(PS_INVALID_ARGUMENT, "to: expected another rank, got %d", to);
  if (group_->aborted.load(std::memory_order_acquire)) return aborted_status();
  MailWords& words = mail(comm_.rank, to);
  for (int64_t at = 0; at < bytes; at += kMailBytes) {
    const uint32_t number = words.sent.load(std::memory_order_relaxed);
    PS_TRY(wait(to, false, [&] { return number - words.received.load(std::memory_order_seq_cst) < 2; }));
    memcpy(piece(comm_.rank, to, number), data + at,
           static_cast<size_t>(bytes - at < kMailBytes ? bytes - at : kMailBytes));
    words.sent.store(number + 1, std::memory_order_seq_cst);
    wake(to);
  }
  return PS_OK;
}

ps_status SharedComm::await(int32_t from) {
  if (from < 0 || from >= comm_.world || from == comm_.rank)
    return fail(PS_INVALID_ARGUMENT, "from: expected another rank, got %d", from);
  const MailWords& words = mail(from, comm_.rank);
  return wait(from, true, [&] {
    return words.sent.load(std::memory_order_seq_cst) != words.received.load(std::memory_order_relaxed);
  });
}

ps_status SharedComm::receive(int32_t from, uint8_t* data, int64_t bytes) {
  if (from < 0 || from >= comm_.world || from == comm_.rank)
    return fail(PS_INVALID_ARGUMENT, "from: expected another rank, got %d", from);
  MailWords& words = mail(from, comm_.rank);
  for (int64_t at = 0; at < bytes; at += kMailBytes) {
    const uint32_t number = words.received.load(std::memory_order_relaxed);
    PS_TRY(wait(from, false, [&] { return words.sent.load(std::memory_order_seq_cst) != number; }));
    memcpy(data + at, piece(from, comm_.rank, number),
           static_cast<size_t>(bytes - at < kMailBytes ? bytes - at : kMailBytes));
    words.received.store(number + 1, std::memory_order_seq_cst);
    wake(from);
  }
  return PS_OK;
}

}  // namespace ps
