#include "comm/heartbeat.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

namespace ps {
namespace {

constexpr int64_t kMillisecond = 1000000, kBeat = 500 * kMillisecond, kLost = 1700 * kMillisecond;
constexpr int64_t kConnect = 30000 * kMillisecond, kTry = 1000 * kMillisecond;
constexpr int32_t kPollMs = 20;
// The bytes on a connection: heartbeats, a last byte when a rank leaves, and a null-terminated reason when one aborts.
constexpr char kBeatByte = 'h', kLeftByte = 'b', kReasonByte = 'a';

struct Greeting {
  uint64_t nonce;  // of the listening rank
  int32_t rank, reserved;
};

// the end of one connection attempt
int64_t soonest(int64_t deadline) {
  const int64_t soon = now_ns() + kTry;
  return soon < deadline ? soon : deadline;
}

bool wait_for(int fd, short events, int64_t deadline) {
  for (;;) {
    const int64_t left = (deadline - now_ns()) / kMillisecond;
    if (left <= 0) return false;
    pollfd one{fd, events, 0};
    const int found = poll(&one, 1, static_cast<int>(left));
    if (found > 0) return true;
    if (found < 0 && errno != EINTR) return false;
  }
}

bool receive_whole(int fd, void* data, size_t bytes, int64_t deadline) {
  for (size_t at = 0; at < bytes;) {
    if (!wait_for(fd, POLLIN, deadline)) return false;
    const ssize_t count = recv(fd, static_cast<uint8_t*>(data) + at, bytes - at, 0);
    if (count <= 0) return false;
    at += static_cast<size_t>(count);
  }
  return true;
}

socklen_t fill_address(const Contact& contact, int32_t i, sockaddr_storage* out) {
  memset(out, 0, sizeof(*out));
  if (contact.is_v6[i]) {
    sockaddr_in6* a = reinterpret_cast<sockaddr_in6*>(out);
    a->sin6_family = AF_INET6;
    a->sin6_port = htons(contact.port);
    memcpy(&a->sin6_addr, contact.addresses[i], 16);
    return sizeof(*a);
  }
  sockaddr_in* a = reinterpret_cast<sockaddr_in*>(out);
  a->sin_family = AF_INET;
  a->sin_port = htons(contact.port);
  memcpy(&a->sin_addr, contact.addresses[i], 4);
  return sizeof(*a);
}

// The addresses of this host that another host could reach; the loopback address last, for ranks on this host.
void list_addresses(Contact* out) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return;
  for (int32_t loopback = 0; loopback < 2; ++loopback) {
    for (const ifaddrs* i = first; i && out->num_addresses < kMaxAddresses; i = i->ifa_next) {
      if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK ? 1 : 0) != loopback) continue;
      uint8_t* to = out->addresses[out->num_addresses];
      if (i->ifa_addr->sa_family == AF_INET) {
        memcpy(to, &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr, 4);
        out->is_v6[out->num_addresses++] = 0;
      } else if (i->ifa_addr->sa_family == AF_INET6) {
        const in6_addr& a = reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr;
        if (IN6_IS_ADDR_LINKLOCAL(&a)) continue;  // needs the interface to be meaningful
        memcpy(to, &a, 16);
        out->is_v6[out->num_addresses++] = 1;
      }
    }
  }
  freeifaddrs(first);
}

// A connected socket, or -1.
int try_connect(const Contact& contact, int32_t i, int64_t deadline) {
  sockaddr_storage address;
  const socklen_t bytes = fill_address(contact, i, &address);
  const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  int error = 0;
  socklen_t size = sizeof(error);
  if ((connect(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0 || errno == EINPROGRESS) &&
      wait_for(fd, POLLOUT, soonest(deadline)) && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && !error)
    return fd;
  close(fd);
  return -1;
}

}  // namespace

ps_status Heartbeat::listen(Contact* own) {
  listener_ = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int off = 0;
  sockaddr_storage address{};
  address.ss_family = AF_INET6;
  if (listener_ >= 0) setsockopt(listener_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (listener_ < 0 ||
      bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(sockaddr_in6)) != 0) {  // a host without IPv6
    if (listener_ >= 0) close(listener_);
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.ss_family = AF_INET;
    if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(sockaddr_in)) != 0)
      return fail(PS_IO_ERROR, "ranks: no port for heartbeats: %s", strerror(errno));
  }
  socklen_t bytes = sizeof(address);
  if (::listen(listener_, PS_MAX_RANKS) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &bytes) != 0 ||
      getrandom(&own_.nonce, sizeof(own_.nonce), 0) != static_cast<ssize_t>(sizeof(own_.nonce)))
    return fail(PS_IO_ERROR, "ranks: no port for heartbeats: %s", strerror(errno));
  own_.port = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                                  : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  list_addresses(&own_);
  *own = own_;
  return PS_OK;
}

void Heartbeat::keep(int32_t peer, int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  links_[peer].fd = fd;
}

ps_status Heartbeat::connect_to(int32_t peer, const Contact& contact, int64_t deadline) {
  while (now_ns() < deadline) {
    for (int32_t i = 0; i < contact.num_addresses && i < kMaxAddresses; ++i) {
      const int fd = try_connect(contact, i, deadline);
      if (fd < 0) continue;
      const Greeting greeting{contact.nonce, rank_, 0};
      uint64_t answer = 0;
      const bool sent = send(fd, &greeting, sizeof(greeting), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(greeting));
      if (sent && receive_whole(fd, &answer, sizeof(answer), soonest(deadline)) && answer == own_.nonce &&
          send(fd, &kBeatByte, 1, MSG_NOSIGNAL) == 1) {
        keep(peer, fd);
        return PS_OK;
      }
      close(fd);  // another program, at an address that several hosts have
    }
    usleep(20000);
  }
  return fail(PS_ABORTED, "ranks: rank %d found no connection to rank %d for heartbeats", rank_, peer);
}

ps_status Heartbeat::accept_others(const Contact* contacts, int64_t deadline) {
  for (int32_t missing = world_ - 1 - rank_; missing > 0;) {
    if (!wait_for(listener_, POLLIN, deadline))
      return fail(PS_ABORTED, "ranks: %d ranks found no connection to rank %d for heartbeats", missing, rank_);
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {  // out of file descriptors: the rank stays in the queue
      usleep(kPollMs * 1000);
      continue;
    }
    Greeting greeting{};
    char confirmed = 0;
    const int64_t soon = soonest(deadline);
    // The last byte shows that the other rank still has this connection after the wait in the queue.
    if (receive_whole(fd, &greeting, sizeof(greeting), soon) && greeting.nonce == own_.nonce && greeting.rank > rank_ &&
        greeting.rank < world_ && links_[greeting.rank].fd < 0 &&
        send(fd, &contacts[greeting.rank].nonce, sizeof(uint64_t), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(sizeof(uint64_t)) &&
        receive_whole(fd, &confirmed, 1, soon) && confirmed == kBeatByte) {
      keep(greeting.rank, fd);
      --missing;
    } else {
      close(fd);
    }
  }
  return PS_OK;
}

ps_status Heartbeat::start(int32_t rank, int32_t world, const Contact* contacts) {
  rank_ = rank;
  world_ = world;
  const int64_t deadline = now_ns() + kConnect;
  for (int32_t r = 0; r < rank; ++r) PS_TRY(connect_to(r, contacts[r], deadline));
  PS_TRY(accept_others(contacts, deadline));
  close(listener_);
  listener_ = -1;
  for (Link& link : links_) link.heard_ns = now_ns();
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // leave signals to the application's threads
  has_thread_ = pthread_create(&thread_, nullptr, thread_main, this) == 0;
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return has_thread_ ? PS_OK : fail(PS_OUT_OF_MEMORY, "ranks: no thread for heartbeats");
}

Heartbeat::~Heartbeat() {
  stopping_.store(true, std::memory_order_release);
  if (has_thread_) pthread_join(thread_, nullptr);
  if (listener_ >= 0) close(listener_);
  for (const Link& link : links_) {
    if (link.fd >= 0) close(link.fd);
  }
}

void Heartbeat::abort(const char* reason) {
  uint32_t expected = 0;
  if (!aborted_.compare_exchange_strong(expected, 1, std::memory_order_acq_rel)) return;
  snprintf(reason_, sizeof(reason_), "%s", reason ? reason : "");
  aborted_.store(2, std::memory_order_release);
}

void* Heartbeat::thread_main(void* self) {
  static_cast<Heartbeat*>(self)->run();
  return nullptr;
}

void Heartbeat::send_all(const void* data, size_t bytes) {
  for (const Link& link : links_) {
    if (link.fd >= 0 && send(link.fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
      continue;  // an error shows as silence
  }
}

void Heartbeat::run() {
  int64_t sent = 0;
  bool told = false;
  while (!stopping_.load(std::memory_order_acquire)) {
    if (now_ns() - sent >= kBeat) {
      send_all(&kBeatByte, 1);
      sent = now_ns();
    }
    pollfd polls[PS_MAX_RANKS];
    for (int32_t r = 0; r < world_; ++r) polls[r] = pollfd{links_[r].fd, POLLIN, 0};
    poll(polls, static_cast<nfds_t>(world_), kPollMs);
    for (int32_t r = 0; r < world_; ++r) {
      if (links_[r].fd >= 0 && polls[r].revents) receive(r);
    }
    // Checked only after pending bytes were read: a process that was stopped for a while still finds heartbeats.
    for (int32_t r = 0; r < world_; ++r) {
      if (links_[r].fd < 0 || polls[r].revents || now_ns() - links_[r].heard_ns < kLost) continue;
      char reason[80];
      snprintf(reason, sizeof(reason), "rank %d is lost: no heartbeat for %lld ms", r,
               static_cast<long long>(kLost / kMillisecond));
      abort(reason);
    }
    if (is_aborted() && !told) {
      char message[sizeof(reason_) + 2];
      const int bytes = snprintf(message, sizeof(message), "%c%s", kReasonByte, reason_);
      send_all(message, static_cast<size_t>(bytes) + 1);
      told = true;
    }
  }
  send_all(&kLeftByte, 1);
}

void Heartbeat::receive(int32_t peer) {
  Link& link = links_[peer];
  char data[512];
  const ssize_t count = recv(link.fd, data, sizeof(data), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) {
    close(link.fd);
    link.fd = -1;
    char reason[40];
    snprintf(reason, sizeof(reason), "rank %d ended", peer);
    if (!link.left.load(std::memory_order_relaxed)) abort(reason);
    return;
  }
  link.heard_ns = now_ns();
  for (ssize_t i = 0; i < count; ++i) {
    if (link.reason_bytes < 0) {
      if (data[i] == kLeftByte) link.left.store(true, std::memory_order_release);
      if (data[i] == kReasonByte) link.reason_bytes = 0;
    } else if (data[i] && link.reason_bytes < static_cast<int32_t>(sizeof(link.reason)) - 1) {
      link.reason[link.reason_bytes++] = data[i];
    } else if (!data[i]) {
      link.reason[link.reason_bytes] = 0;
      link.reason_bytes = -1;
      abort(link.reason);
    }
  }
}

}  // namespace ps
