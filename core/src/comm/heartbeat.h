// Ranks on several hosts: each pair has a TCP connection for a heartbeat, and for the reason when a rank aborts the
// group.
#ifndef PENSTOCK_COMM_HEARTBEAT_H
#define PENSTOCK_COMM_HEARTBEAT_H

#include <pthread.h>

#include <atomic>

#include "base/error.h"

namespace ps {

constexpr int32_t kMaxAddresses = 8;

// The address of a rank.  A connection counts only if both ends know the other's nonce.
struct Contact {
  uint64_t nonce;
  uint16_t port, num_addresses;
  uint8_t is_v6[kMaxAddresses], addresses[kMaxAddresses][16];
};

class Heartbeat {
 public:
  Heartbeat() = default;
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat();
  ps_status listen(Contact* own);
  // Connects to all other ranks, which do the same, and starts the thread. contacts: of all ranks.
  ps_status start(int32_t rank, int32_t world, const Contact* contacts);
  bool is_aborted() const { return aborted_.load(std::memory_order_acquire) == 2; }
  const char* reason() const { return reason_; }
  bool has_left(int32_t rank) const { return links_[rank].left.load(std::memory_order_acquire); }
  void abort(const char* reason);

 private:
  struct Link {
    int fd = -1;
    int64_t heard_ns = 0;
    std::atomic<bool> left{false};  // the rank closed its comm
    int32_t reason_bytes = -1;      // of the reason being received
    char reason[256];
  };
  ps_status connect_to(int32_t peer, const Contact& contact, int64_t deadline);
  ps_status accept_others(const Contact* contacts, int64_t deadline);
  void keep(int32_t peer, int fd);
  static void* thread_main(void* self);
  void run();
  void send_all(const void* data, size_t bytes);
  void receive(int32_t peer);

  int32_t rank_ = 0, world_ = 0;
  int listener_ = -1;
  Contact own_{};
  Link links_[PS_MAX_RANKS];
  pthread_t thread_{};
  bool has_thread_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> aborted_{0};  // 1: a thread writes the reason, 2: it is written
  char reason_[256] = {};
};

}  // namespace ps

#endif
