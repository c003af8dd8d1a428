// The transport between ranks on several hosts: MPI messages, and our own heartbeats, because MPI does not notice a
// broken link.
#ifndef PENSTOCK_COMM_MPI_H
#define PENSTOCK_COMM_MPI_H

#include "base/memory.h"
#include "comm/heartbeat.h"
#include "comm/mpi_library.h"

namespace ps {

class MpiComm {
 public:
  MpiComm() = default;
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;
  ~MpiComm();
  ps_status open(const ps_mpi_options& options);
  ps_comm* comm() { return &comm_; }

 private:
  struct Wait {
    MpiHandle requests[2 * PS_MAX_RANKS];
    int32_t peers[2 * PS_MAX_RANKS], count;
  };
  void* part() { return buffer(comm_.rank, next_) + kHeaderBytes; }
  // root -1: all to all; otherwise only the root sends.
  ps_status exchange(uint64_t tag, int32_t root, const int64_t* bytes, bool forever, const void** parts);
  ps_status send(int32_t to, const uint8_t* data, int64_t bytes);
  ps_status receive(int32_t from, uint8_t* data, int64_t bytes);
  ps_status check_membership(const ps_mpi_options& options);
  ps_status meet();
  void fill_struct();
  uint8_t* buffer(int32_t rank, uint32_t number) { return buffers_.data() + (2 * rank + (number & 1)) * stride_; }
  // The buffers that send and receive pass to MPI.  MPI may still use them after the group has ended and its program is
  // destroyed.
  uint8_t* mail() { return buffers_.data() + 2 * comm_.world * stride_; }
  ps_status add_send(Wait* wait, int32_t peer, int32_t tag, const void* data, int64_t bytes);
  ps_status add_receive(Wait* wait, int32_t peer, int32_t tag, void* data, int64_t bytes);
  ps_status finish(Wait* wait, bool forever);
  ps_status check(int code);
  ps_status end(const char* reason);

  static constexpr int64_t kHeaderBytes = 64;
  const MpiLibrary* mpi_ = nullptr;
  MpiHandle group_ = nullptr;
  ps_comm comm_{};
  Region buffers_;
  int64_t stride_ = 0, timeout_ns_ = 0;
  uint32_t next_ = 0;
  bool has_ended_ = false;
  Heartbeat heartbeat_;
};

}  // namespace ps

#endif
