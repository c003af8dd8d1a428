// The bytes of a bundle: its header, and the file mapped, read, or mapped with one range copied.
#ifndef PENSTOCK_BUNDLE_FILE_H
#define PENSTOCK_BUNDLE_FILE_H

#include <sys/stat.h>

#include "base/error.h"
#include "base/memory.h"
#include "threads/pool.h"

namespace ps {

constexpr uint16_t kFormatMajor = 1, kFormatMinor = 1;
constexpr uint32_t kFeatureNetwork = 1;               // in required_features: the graph is a general network
constexpr uint64_t kKnownFeatures = kFeatureNetwork;  // the bits that this version understands
constexpr int64_t kHeaderBytes = 64, kPageBytes = 4096, kMaxMetadataBytes = int64_t{64} << 20;

struct Header {
  uint16_t major, minor;
  uint32_t header_bytes;
  uint64_t metadata_offset, metadata_bytes;
  uint32_t metadata_crc32, required_features;
  uint64_t file_bytes;
};

class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();
  ps_status open(const char* path, bool map);
  // The current size of the file: if it shrank since it was opened, that is an error here, not a SIGBUS.
  ps_status read(int64_t offset, int64_t bytes, uint8_t* out) const;
  // Copies bytes begin (page-aligned) to end into private memory of huge pages, read by the pool's threads; at() then
  // points into the copy.  Drops the range from the page cache.  Has no effect if the file was read into memory.
  ps_status copy(int64_t begin, int64_t end, Pool* pool);
  // The bytes at an offset, in the copy if it covers them.
  const uint8_t* at(int64_t offset) const {
    return offset >= copy_begin_ && offset < copy_end_ ? copy_.data() + (offset - copy_begin_) : data_ + offset;
  }
  const uint8_t* data() const { return data_; }  // the mapping, never the copy
  int64_t bytes() const { return bytes_; }
  const struct stat& as_opened() const { return opened_; }

 private:
  ps_status load(bool map);
  ps_status check_unchanged() const;
  const uint8_t* data_ = nullptr;
  int64_t bytes_ = 0, copy_begin_ = 0, copy_end_ = 0;
  int descriptor_ = -1;
  bool mapped_ = false;
  struct stat opened_{};  // when it was opened
  Region copy_;
};

// Reads the whole file: 0, -1 if it ends too soon, or an errno; reports the latter two.
int read_all(int descriptor, int64_t offset, int64_t bytes, uint8_t* out);
ps_status read_failed(int error);

// Checks the header against the file's size; refuses newer versions and unknown features by name.
ps_status read_header(const File& file, Header* out);

}  // namespace ps

#endif
