#include "memory.h"

#include <sys/mman.h>

namespace ps {

#if defined(__SANITIZE_ADDRESS__)
// The heap has red zones, which mapped pages lack.
bool Region::allocate(int64_t bytes, bool) {
  release();
  if (bytes <= 0) return bytes == 0;
  void* data = nullptr;
  if (posix_memalign(&data, 4096, static_cast<size_t>(bytes)) != 0) return false;
  data_ = static_cast<uint8_t*>(memset(data, 0, static_cast<size_t>(bytes)));
  bytes_ = bytes;
  return true;
}

void Region::release() {
  free(data_);
  data_ = nullptr;
  bytes_ = 0;
}
#else
bool Region::allocate(int64_t bytes, bool huge) {
  release();
  if (bytes <= 0) return bytes == 0;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return false;
  if (huge) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // advice: ordinary pages do as well
  data_ = static_cast<uint8_t*>(data);
  bytes_ = bytes;
  return true;
}

void Region::release() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
  data_ = nullptr;
  bytes_ = 0;
}
#endif

}  // namespace ps
