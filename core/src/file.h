// A bundle's bytes: the header, and the file mapped or read.
#ifndef PENSTOCK_FILE_H
#define PENSTOCK_FILE_H

#include "error.h"
#include "memory.h"

namespace ps {

constexpr uint16_t kFormatMajor = 1, kFormatMinor = 0;
constexpr uint64_t kKnownFeatures = 0;  // bits of required_features that this version understands
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
  const uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  ps_status load(int descriptor, bool map);
  const uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  bool mapped_ = false;
  Region copy_;
};

// The header, checked against the file's size; versions and features that are too new are refused by name.
ps_status read_header(const File& file, Header* out);

}  // namespace ps

#endif
