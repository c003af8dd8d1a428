// Rank 0 listens on an abstract socket, whose name disappears with it, and the others connect.  When all have arrived,
// rank 0 creates a memfd and sends it to each.  Both ends check that the other process belongs to the same user.
#include "comm/rendezvous.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"

namespace ps {
namespace {

constexpr int64_t kDefaultJoinMs = 300000, kRetryMs = 10;
constexpr char kMagic[8] = {'p', 's', 'r', 'a', 'n', 'k', 's', '1'};
constexpr char kVersion[16] = PS_VERSION;

struct Hello {
  char magic[8], version[16];
  int32_t rank, world;
  int64_t part_bytes;
  uint64_t pid_namespace;
};
struct Welcome {
  char reason[kReasonBytes];  // why the group failed; empty: this message carries the memory
  uint64_t epoch;
  int32_t pids[PS_MAX_RANKS];
};

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(-1); }
  void reset(int fd) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Rendezvous {
  const ps_join_options& options;
  sockaddr_un address;
  socklen_t address_bytes;
  int64_t deadline;
  Hello hello;
  const char* named_by;  // the setting that chooses another name
};

// `refused`: why the last rank that connected does not belong to this group; may be empty.
ps_status late(const Rendezvous& m, const char* what, const char* refused = "") {
  const long long ms = m.options.join_timeout_ms ? m.options.join_timeout_ms : kDefaultJoinMs;
  return fail(PS_ABORTED, "ranks: %s within %lld ms%s%s", what, ms, refused[0] ? "; refused one: " : "", refused);
}

// Waits until `fd` can be read or a connection accepted; false: timeout or error.
bool wait_readable(int fd, int64_t deadline) {
  for (;;) {
    const int64_t left = (deadline - now_ns()) / 1000000;
    if (left <= 0) return false;
    pollfd one{fd, POLLIN, 0};
    const int found = poll(&one, 1, static_cast<int>(left < 1000 ? left : 1000));
    if (found > 0) return true;
    if (found < 0 && errno != EINTR) return false;
  }
}

bool is_own_user(int fd, int32_t* pid) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.uid != geteuid()) return false;
  *pid = peer.pid;
  return true;
}

// Whether a process has the variable NAME=VALUE of this process; false if its environment cannot be read.
bool has_variable(int32_t pid, const char* name, const char* value) {
  char path[40], text[4096], wanted[128];
  snprintf(path, sizeof(path), "/proc/%d/environ", pid);
  const int size = snprintf(wanted, sizeof(wanted), "%s=%s", name, value);
  FILE* file = fopen(path, "rbe");
  if (!file || size >= static_cast<int>(sizeof(wanted))) {
    if (file) fclose(file);
    return false;
  }
  bool found = false;
  int at = 0;  // bytes of this variable that match so far; -1: it does not match
  for (size_t count; !found && (count = fread(text, 1, sizeof(text), file)) > 0;) {
    for (size_t i = 0; i < count && !found; ++i) {
      if (at >= 0 && at == size && !text[i]) found = true;
      at = !text[i] ? 0 : at >= 0 && at < size && text[i] == wanted[at] ? at + 1 : -1;
    }
  }
  fclose(file);
  return found;
}

// Parent and start time of a process (in ticks since boot).
bool read_stat(int32_t pid, int32_t* parent, unsigned long long* start) {
  char path[40], text[1024];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = fopen(path, "rbe");
  if (!file) return false;
  const size_t count = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  text[count] = 0;
  const char* end = strrchr(text, ')');  // the name before it may contain anything
  return end && sscanf(end + 1, " %*c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                       parent, start) == 2;
}

// Finds the nearest ancestor of this process that is not a rank: it started all ranks of this host.
void name_launcher(char* text, size_t bytes) {
  static const char* const kNames[] = {"PENSTOCK_RANK", "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"};
  int32_t pid = getppid(), parent = 0;
  unsigned long long start = 0;
  const char* name = nullptr;
  for (const char* each : kNames) name = !name && getenv(each) ? each : name;
  while (read_stat(pid, &parent, &start) && name && parent > 0 && has_variable(pid, name, getenv(name))) pid = parent;
  snprintf(text, bytes, "launcher %d %llu", pid, start);
}

// Returns what the name is derived from.
const char* name_meeting(const char* given, char* text, size_t bytes) {
  const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT"), *run = getenv("TORCHELASTIC_RUN_ID"),
             *restart = getenv("TORCHELASTIC_RESTART_COUNT");
  if (given) {
    snprintf(text, bytes, "meeting %s", given);
    return "meeting";
  }
  if (address && port) {
    snprintf(text, bytes, "master %s %s %s %s", address, port, run ? run : "", restart ? restart : "");
    return "MASTER_PORT";
  }
  name_launcher(text, bytes);
  return "launcher process, or MASTER_ADDR and MASTER_PORT";
}

void set_address(const char* given, Rendezvous* m) {
  char text[512];
  m->named_by = name_meeting(given, text, sizeof(text));
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char* c = text; *c; ++c) hash = (hash ^ static_cast<uint8_t>(*c)) * 0x100000001b3u;
  m->address.sun_family = AF_UNIX;
  const int size = snprintf(m->address.sun_path + 1, sizeof(m->address.sun_path) - 1, "penstock-ranks-%u-%016llx",
                            geteuid(), static_cast<unsigned long long>(hash));
  m->address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(size));
}

// Sends a message, with the memory if it is not -1.
bool send_welcome(int fd, const Welcome& welcome, int memory) {
  iovec data{const_cast<Welcome*>(&welcome), sizeof(welcome)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (memory >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &memory, sizeof(int));
  }
  return sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(welcome));
}

// False: the other end closed the connection.
bool receive_welcome(int fd, Welcome* welcome, Descriptor* memory) {
  iovec data{welcome, sizeof(*welcome)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(*welcome))) return false;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int found;
    memcpy(&found, CMSG_DATA(header), sizeof(int));
    memory->reset(found);
  }
  welcome->reason[kReasonBytes - 1] = 0;
  return welcome->reason[0] || memory->get() >= 0;
}

// Returns why a rank belongs to another group, such as one that has not ended; empty: it belongs to this one.
void find_stranger(const Hello& own, const Hello& other, const bool* has_come, char* reason) {
  const int32_t r = other.rank;
  if (own.world != other.world) {
    snprintf(reason, kReasonBytes, "world: rank 0 has %d, rank %d has %d", own.world, r, other.world);
  } else if (r < 1 || r >= own.world || has_come[r]) {
    snprintf(reason, kReasonBytes, "rank: expected each of 0 to %d once, got a second %d", own.world - 1, r);
  }
}

// Returns why a rank of this group cannot work with rank 0; empty: it can.
void find_misfit(const Hello& own, const Hello& other, char* reason) {
  const int32_t r = other.rank;
  if (strncmp(own.version, other.version, sizeof(own.version))) {
    snprintf(reason, kReasonBytes, "version: rank 0 has %s, rank %d has %.15s", own.version, r, other.version);
  } else if (own.part_bytes != other.part_bytes) {
    snprintf(reason, kReasonBytes,
             "part_bytes: rank 0 has %lld, rank %d has %lld: expected bundles of one network, and equal limits",
             static_cast<long long>(own.part_bytes), r, static_cast<long long>(other.part_bytes));
  } else if (own.pid_namespace != other.pid_namespace) {
    snprintf(reason, kReasonBytes, "rank %d is in another container: it cannot be watched from here", r);
  }
}

ps_status make_memory(const ps_join_options& o, Descriptor* out) {
  int64_t bytes;
  PS_TRY(SharedComm::bytes(o.world, o.part_bytes, &bytes));
  // A direct system call, because older C libraries have no function for it.
  out->reset(static_cast<int>(syscall(SYS_memfd_create, "penstock-ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (out->get() < 0 || ftruncate(out->get(), bytes) != 0)
    return fail(PS_OUT_OF_MEMORY, "ranks: the system refused %lld bytes of shared memory: %s",
                static_cast<long long>(bytes), strerror(errno));
  fcntl(out->get(), F_ADD_SEALS,
        F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);  // access beyond the end of a truncated file would kill a process
  return PS_OK;
}

ps_status open_comm(const Rendezvous& m, int memory, const Welcome& welcome, SharedComm* out) {
  const ps_join_options& o = m.options;
  ps_shared_options shared{};
  shared.struct_size = sizeof(shared);
  shared.rank = o.rank;
  shared.world = o.world;
  shared.fd = memory;
  shared.part_bytes = o.part_bytes;
  shared.timeout_ms = o.timeout_ms;
  shared.epoch = welcome.epoch;
  shared.yield = o.yield;
  PS_TRY(out->open(shared));
  return out->watch(welcome.pids);
}

// The name is taken, so rank 0 cannot listen.  The message tells which process has it; it may belong to another user.
ps_status fail_taken(const Rendezvous& m) {
  const Descriptor link(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  char holder[80] = "another group";
  if (connect(link.get(), reinterpret_cast<const sockaddr*>(&m.address), m.address_bytes) == 0 &&
      getsockopt(link.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0) {
    if (peer.uid == geteuid()) {
      snprintf(holder, sizeof(holder), "another group (process %d)", peer.pid);
    } else {
      snprintf(holder, sizeof(holder), "process %d of user %u", peer.pid, peer.uid);
    }
  }
  return fail(PS_IO_ERROR, "ranks: the meeting of this group is taken by %s: expected another %s", holder, m.named_by);
}

ps_status host_group(const Rendezvous& m, SharedComm* out) {
  const int32_t world = m.options.world;
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)), memory;
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&m.address), m.address_bytes) != 0) {
    if (errno == EADDRINUSE) return fail_taken(m);
    return fail(PS_IO_ERROR, "ranks: no socket for the meeting: %s", strerror(errno));
  }
  if (listen(listener.get(), PS_MAX_RANKS) != 0)
    return fail(PS_IO_ERROR, "ranks: no socket for the meeting: %s", strerror(errno));
  Descriptor peers[PS_MAX_RANKS];
  bool has_come[PS_MAX_RANKS] = {};
  Welcome welcome{};
  welcome.pids[0] = getpid();
  welcome.epoch = static_cast<uint64_t>(now_ns()) ^ static_cast<uint64_t>(getpid()) << 40;
  Welcome refusal{};  // for the last rank of another group
  int32_t missing = world - 1;
  while (missing && !welcome.reason[0]) {
    if (!wait_readable(listener.get(), m.deadline)) {
      snprintf(welcome.reason, kReasonBytes, "%d of %d ranks came", world - missing, world);
      late(m, welcome.reason, refusal.reason);
      break;
    }
    const int fd = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {  // out of file descriptors: the rank stays in the queue
      usleep(kRetryMs * 1000);
      continue;
    }
    Hello hello{};
    int32_t pid = 0;
    const int64_t soon = now_ns() + 1000000000;
    if (!is_own_user(fd, &pid) || !wait_readable(fd, soon < m.deadline ? soon : m.deadline) ||
        recv(fd, &hello, sizeof(hello), MSG_TRUNC) != static_cast<ssize_t>(sizeof(hello)) ||
        memcmp(hello.magic, kMagic, sizeof(kMagic))) {
      close(fd);
      continue;
    }
    char stranger[kReasonBytes] = "";
    find_stranger(m.hello, hello, has_come, stranger);
    if (stranger[0]) {  // refuse only this rank: those of this group may still come
      memcpy(refusal.reason, stranger, kReasonBytes);
      send_welcome(fd, refusal, -1);
      close(fd);
      continue;
    }
    find_misfit(m.hello, hello, welcome.reason);
    if (welcome.reason[0]) {
      peers[0].reset(fd);  // to tell it why
      fail(PS_ABORTED, "ranks: %s", welcome.reason);
    } else {
      peers[hello.rank].reset(fd);
      welcome.pids[hello.rank] = pid;
      has_come[hello.rank] = true;
      --missing;
    }
  }
  listener.reset(-1);  // before any rank goes on, because it may join the next group at once
  ps_status status = welcome.reason[0] ? PS_ABORTED : make_memory(m.options, &memory);
  if (status != PS_OK && !welcome.reason[0]) snprintf(welcome.reason, kReasonBytes, "%s", error_message());
  for (const Descriptor& peer : peers) {
    if (peer.get() >= 0) send_welcome(peer.get(), welcome, memory.get());
  }
  return status == PS_OK ? open_comm(m, memory.get(), welcome, out) : status;
}

// PS_IO_ERROR: rank 0 is not listening yet.
ps_status ask_host(const Rendezvous& m, SharedComm* out) {
  const Descriptor link(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  int32_t pid = 0;
  if (connect(link.get(), reinterpret_cast<const sockaddr*>(&m.address), m.address_bytes) != 0) return PS_IO_ERROR;
  if (!is_own_user(link.get(), &pid))
    return fail(PS_ABORTED, "ranks: another user's process listens where rank 0 should");
  if (send(link.get(), &m.hello, sizeof(m.hello), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(m.hello)))
    return PS_IO_ERROR;
  if (!wait_readable(link.get(), m.deadline)) return late(m, "not all ranks came");
  Welcome welcome;
  Descriptor memory;
  if (!receive_welcome(link.get(), &welcome, &memory)) {
    if (kill(pid, 0) != 0) return fail(PS_ABORTED, "ranks: rank 0 ended before all ranks came");
    return PS_IO_ERROR;
  }
  if (welcome.reason[0]) return fail(PS_ABORTED, "ranks: %s", welcome.reason);
  return open_comm(m, memory.get(), welcome, out);
}

ps_status join_group(const Rendezvous& m, SharedComm* out) {
  for (;;) {
    const ps_status status = ask_host(m, out);
    if (status != PS_IO_ERROR) return status;
    if (now_ns() > m.deadline) return late(m, "rank 0 did not come");
    usleep(kRetryMs * 1000);
  }
}

}  // namespace

ps_status join_ranks(const ps_join_options& o, SharedComm* out) {
  int64_t bytes;
  PS_TRY(SharedComm::bytes(o.world, o.part_bytes, &bytes));
  if (o.rank < 0 || o.rank >= o.world)
    return fail(PS_INVALID_ARGUMENT, "rank: expected 0 to %d, got %d", o.world - 1, o.rank);
  if (o.join_timeout_ms < 0)
    return fail(PS_INVALID_ARGUMENT, "join_timeout_ms: expected 0 or more, got %lld",
                static_cast<long long>(o.join_timeout_ms));
  Rendezvous m{o, {}, 0, now_ns() + (o.join_timeout_ms ? o.join_timeout_ms : kDefaultJoinMs) * 1000000, {}, ""};
  set_address(o.meeting, &m);
  memcpy(m.hello.magic, kMagic, sizeof(kMagic));
  memcpy(m.hello.version, kVersion, sizeof(kVersion));
  m.hello.rank = o.rank;
  m.hello.world = o.world;
  m.hello.part_bytes = o.part_bytes;
  struct stat space{};
  if (stat("/proc/self/ns/pid", &space) == 0) m.hello.pid_namespace = space.st_ino;
  return o.rank == 0 ? host_group(m, out) : join_group(m, out);
}

}  // namespace ps
