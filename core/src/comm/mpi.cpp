#include "comm/mpi.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "threads/wait.h"

namespace ps {
namespace {

constexpr int64_t kDefaultTimeoutMs = 60000, kJoinMs = 300000, kMaxPart = (int64_t{1} << 30) - 4096;
constexpr int64_t kMessageBytes = 4 << 20;          // in one message of send
constexpr int64_t kSpin = 50000, kYield = 2000000;  // ns before a wait yields, and before it sleeps
constexpr int64_t kGrace = 1000000000;              // ns to receive what a rank sent before it left
constexpr int kExchangeTag = 1, kMailTag = 2;
constexpr uint64_t kMeetingTag = 0x6d656574696e6731u;

struct Header {
  uint64_t tag;
  int64_t bytes;
};

}  // namespace

ps_status MpiComm::end(const char* reason) {
  heartbeat_.abort(reason);
  has_ended_ = true;
  forget_mpi();
  while (!heartbeat_.is_aborted()) pause_cpu();  // another thread is writing the reason
  return fail(PS_ABORTED, "ranks: the group was ended: %s", heartbeat_.reason());
}

ps_status MpiComm::check(int code) {
  if (code == 0) return PS_OK;
  char text[600], reason[256];
  int bytes = 0;
  if (mpi_->error_string(code, text, &bytes) != 0) bytes = 0;
  snprintf(reason, sizeof(reason), "rank %d: MPI: %.*s", comm_.rank, bytes, text);
  return end(reason);
}

ps_status MpiComm::add_send(Wait* wait, int32_t peer, int32_t tag, const void* data, int64_t bytes) {
  wait->peers[wait->count] = peer;
  return check(mpi_->isend(data, static_cast<int>(bytes), mpi_handle(kMpiByte), peer, tag, group_,
                           &wait->requests[wait->count++]));
}

ps_status MpiComm::add_receive(Wait* wait, int32_t peer, int32_t tag, void* data, int64_t bytes) {
  wait->peers[wait->count] = peer;
  return check(mpi_->irecv(data, static_cast<int>(bytes), mpi_handle(kMpiByte), peer, tag, group_,
                           &wait->requests[wait->count++]));
}

// MPI cannot wait for a message and an abort together, so this polls: first spinning, then yielding the core, then
// sleeping.
ps_status MpiComm::finish(Wait* wait, bool forever) {
  const int64_t begin = now_ns();
  int64_t left_ns = 0;
  for (int32_t first = 0;;) {
    int done = 0;
    PS_TRY(check(mpi_->test(&wait->requests[first], &done, nullptr)));
    if (done && ++first == wait->count) return PS_OK;
    if (done) continue;
    if (heartbeat_.is_aborted()) return end("");
    const int64_t waited = now_ns() - begin;
    if (!heartbeat_.has_left(wait->peers[first])) {
      left_ns = 0;
    } else if (!left_ns) {
      left_ns = waited;
    }
    const bool left = left_ns && waited - left_ns > kGrace;
    if (left || (!forever && waited > timeout_ns_)) {
      char reason[80];
      if (left) {
        snprintf(reason, sizeof(reason), "rank %d ended", wait->peers[first]);
      } else {
        snprintf(reason, sizeof(reason), "rank %d waited %lld ms for rank %d", comm_.rank,
                 static_cast<long long>(timeout_ns_ / 1000000), wait->peers[first]);
      }
      return end(reason);
    }
    if (waited > kYield) {
      usleep(100);
    } else if (waited > kSpin) {
      sched_yield();
    } else {
      pause_cpu();
    }
  }
}

ps_status MpiComm::exchange(uint64_t tag, int32_t root, const int64_t* bytes, bool forever, const void** parts) {
  const int32_t own = comm_.rank, world = comm_.world;
  for (int32_t r = 0; bytes && r < world; ++r) {
    if (bytes[r] >= 0 && bytes[r] <= comm_.part_bytes) continue;
    return fail(PS_INVALID_ARGUMENT, "bytes[%d]: expected 0 to %lld, got %lld", r,
                static_cast<long long>(comm_.part_bytes), static_cast<long long>(bytes[r]));
  }
  if (heartbeat_.is_aborted()) return end("");
  const uint32_t number = next_++;
  Wait wait;
  wait.count = 0;
  const Header header{tag, bytes ? bytes[own] : 0};
  memcpy(buffer(own, number), &header, sizeof(header));
  for (int32_t r = 0; r < world; ++r) {
    if (r != own && (root < 0 || r == root))
      PS_TRY(add_receive(&wait, r, kExchangeTag, buffer(r, number), kHeaderBytes + (bytes ? bytes[r] : 0)));
  }
  for (int32_t i = 1; i < world; ++i) {
    const int32_t r = (own + i) % world;
    if (root < 0 || own == root)
      PS_TRY(add_send(&wait, r, kExchangeTag, buffer(own, number), kHeaderBytes + header.bytes));
  }
  if (wait.count) PS_TRY(finish(&wait, forever));
  for (int32_t r = 0; r < world; ++r) {
    if (parts) parts[r] = buffer(r, number) + kHeaderBytes;
    if (root >= 0 && r != root) continue;
    Header found;
    memcpy(&found, buffer(r, number), sizeof(found));
    if (found.tag == tag && found.bytes == (bytes ? bytes[r] : 0)) continue;
    char reason[160];
    snprintf(reason, sizeof(reason),
             "ranks %d and %d do not run the same step: exchange %u has tag %016llx on rank %d and %016llx on rank %d",
             own, r, number, static_cast<unsigned long long>(tag), own, static_cast<unsigned long long>(found.tag), r);
    return end(reason);
  }
  return PS_OK;
}

ps_status MpiComm::send(int32_t to, const uint8_t* data, int64_t bytes) {
  if (to < 0 || to >= comm_.world || to == comm_.rank)
    return fail(PS_INVALID_ARGUMENT, "to: expected another rank, got %d", to);
  if (heartbeat_.is_aborted()) return end("");
  for (int64_t at = 0; at < bytes; at += kMessageBytes) {
    const int64_t size = bytes - at < kMessageBytes ? bytes - at : kMessageBytes;
    Wait wait;
    wait.count = 0;
    memcpy(mail(), data + at, static_cast<size_t>(size));
    PS_TRY(add_send(&wait, to, kMailTag, mail(), size));
    PS_TRY(finish(&wait, false));
  }
  return PS_OK;
}

ps_status MpiComm::receive(int32_t from, uint8_t* data, int64_t bytes) {
  if (from < 0 || from >= comm_.world || from == comm_.rank)
    return fail(PS_INVALID_ARGUMENT, "from: expected another rank, got %d", from);
  if (heartbeat_.is_aborted()) return end("");
  for (int64_t at = 0; at < bytes; at += kMessageBytes) {
    const int64_t size = bytes - at < kMessageBytes ? bytes - at : kMessageBytes;
    Wait wait;
    wait.count = 0;
    PS_TRY(add_receive(&wait, from, kMailTag, mail(), size));
    PS_TRY(finish(&wait, false));
    memcpy(data + at, mail(), static_cast<size_t>(size));
  }
  return PS_OK;
}

ps_status MpiComm::check_membership(const ps_mpi_options& o) {
  int rank = 0, world = 0;
  if (mpi_->comm_rank(mpi_handle(kMpiCommWorld), &rank) != 0 || mpi_->comm_size(mpi_handle(kMpiCommWorld), &world) != 0)
    return fail(PS_UNSUPPORTED, "ranks: MPI says no rank");
  if (world != o.world || rank != o.rank) {
    return fail(
        PS_INVALID_ARGUMENT,
        "rank: expected rank %d of %d, got rank %d of %d of MPI: start the ranks with the mpiexec of this library",
        o.rank, o.world, rank, world);
  }
  return PS_OK;
}

// Tells every rank where the others listen.
ps_status MpiComm::meet() {
  Contact contacts[PS_MAX_RANKS];
  const void* parts[PS_MAX_RANKS];
  int64_t bytes[PS_MAX_RANKS];
  for (int64_t& n : bytes) n = sizeof(Contact);
  PS_TRY(heartbeat_.listen(static_cast<Contact*>(part())));
  const int64_t timeout = timeout_ns_;
  timeout_ns_ = kJoinMs * 1000000;
  PS_TRY(exchange(kMeetingTag, -1, bytes, false, parts));
  timeout_ns_ = timeout;
  unlink_mpi_memory();
  for (int32_t r = 0; r < comm_.world; ++r) memcpy(&contacts[r], parts[r], sizeof(Contact));
  return heartbeat_.start(comm_.rank, comm_.world, contacts);
}

void MpiComm::fill_struct() {
  comm_.self = this;
  comm_.part = [](void* self) { return static_cast<MpiComm*>(self)->part(); };
  comm_.all_gather = [](void* self, uint64_t tag, const int64_t* bytes, const void** parts) {
    return static_cast<MpiComm*>(self)->exchange(tag, -1, bytes, false, parts);
  };
  comm_.broadcast = [](void* self, uint64_t tag, int32_t root, int64_t bytes, int32_t forever, const void** data) {
    MpiComm* comm = static_cast<MpiComm*>(self);
    int64_t counts[PS_MAX_RANKS] = {};
    const void* parts[PS_MAX_RANKS];
    if (root < 0 || root >= comm->comm_.world) return fail(PS_INVALID_ARGUMENT, "root: expected a rank, got %d", root);
    counts[root] = bytes;
    PS_TRY(comm->exchange(tag, root, counts, forever != 0, parts));
    *data = parts[root];
    return PS_OK;
  };
  comm_.send = [](void* self, int32_t to, const void* data, int64_t bytes) {
    return static_cast<MpiComm*>(self)->send(to, static_cast<const uint8_t*>(data), bytes);
  };
  comm_.recv = [](void* self, int32_t from, void* data, int64_t bytes) {
    return static_cast<MpiComm*>(self)->receive(from, static_cast<uint8_t*>(data), bytes);
  };
  comm_.barrier = [](void* self, uint64_t tag) {
    return static_cast<MpiComm*>(self)->exchange(tag, -1, nullptr, false, nullptr);
  };
  comm_.abort = [](void* self, const char* reason) {
    forget_mpi();
    static_cast<MpiComm*>(self)->heartbeat_.abort(reason);
  };
}

ps_status MpiComm::open(const ps_mpi_options& o) {
  if (!o.trusted_network)
    return fail(PS_INVALID_ARGUMENT, "trusted_network: expected true, because MPI neither encrypts nor authenticates: "
                                     "only the ranks may use the network");
  if (o.world < 1 || o.world > PS_MAX_RANKS)
    return fail(PS_INVALID_ARGUMENT, "world: expected 1 to %d, got %d", PS_MAX_RANKS, o.world);
  if (o.part_bytes < 1 || o.part_bytes > kMaxPart)
    return fail(PS_INVALID_ARGUMENT, "part_bytes: expected 1 to %lld, got %lld", static_cast<long long>(kMaxPart),
                static_cast<long long>(o.part_bytes));
  if (o.timeout_ms < 0)
    return fail(PS_INVALID_ARGUMENT, "timeout_ms: expected 0 or more, got %lld", static_cast<long long>(o.timeout_ms));
  PS_TRY(load_mpi(o.library, &mpi_));
  PS_TRY(check_membership(o));
  const int64_t least = static_cast<int64_t>(sizeof(Contact));
  comm_.struct_size = sizeof(ps_comm);
  comm_.rank = o.rank;
  comm_.world = o.world;
  comm_.part_bytes = round_up(o.part_bytes > least ? o.part_bytes : least, 4096);
  stride_ = comm_.part_bytes + 4096;
  timeout_ns_ = (o.timeout_ms ? o.timeout_ms : kDefaultTimeoutMs) * 1000000;
  if (!buffers_.allocate(2 * o.world * stride_ + kMessageBytes))
    return fail(PS_OUT_OF_MEMORY, "part_bytes: the system refused the memory");
  fill_struct();
  // The group gets its own communicator, to keep messages of other groups of these processes apart.
  PS_TRY(check(mpi_->comm_dup(mpi_handle(kMpiCommWorld), &group_)));
  PS_TRY(check(mpi_->comm_set_errhandler(group_, mpi_handle(kMpiErrorsReturn))));
  return meet();
}

MpiComm::~MpiComm() {
  if (!group_) return;
  if (!has_ended_ && !heartbeat_.is_aborted()) {
    mpi_->comm_free(&group_);
  } else if (Region* kept = create_object<Region>()) {
    *kept = std::move(buffers_);  // MPI may still write to them
  }
}

}  // namespace ps
