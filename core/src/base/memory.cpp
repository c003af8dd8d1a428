// Anonymous mappings, with huge pages where the system has them.
#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace ps {
namespace {
[[maybe_unused]] constexpr int64_t kHugePageBytes = int64_t{2} << 20;
}

int64_t system_page_bytes() { return sysconf(_SC_PAGESIZE); }

#if defined(__SANITIZE_ADDRESS__)
// The heap gets red zones from AddressSanitizer; mapped pages do not.
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
  // Huge pages are aligned to their size: map one more and keep the aligned middle.
  const bool align = huge && bytes >= kHugePageBytes;
  int64_t kept = bytes, mapped = bytes;
  if (align && (!checked_align(bytes, system_page_bytes(), &kept) || !checked_add(kept, kHugePageBytes, &mapped)))
    return false;
  void* data = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return false;
  data_ = static_cast<uint8_t*>(data);
  if (align) {
    const int64_t before = -reinterpret_cast<intptr_t>(data) & (kHugePageBytes - 1);
    if (before) munmap(data_, static_cast<size_t>(before));
    data_ += before;
    if (kHugePageBytes > before) munmap(data_ + kept, static_cast<size_t>(kHugePageBytes - before));
    // This is only advice; ordinary pages work too.  Memory that does not fill a huge page gets ordinary ones, so no
    // more is used than was planned.
    madvise(data_, static_cast<size_t>(kept - kept % kHugePageBytes), MADV_HUGEPAGE);
  }
  bytes_ = bytes;
  mapped_bytes_ = kept;
  return true;
}

void Region::release() {
  if (data_) munmap(data_, static_cast<size_t>(mapped_bytes_));
  data_ = nullptr;
  bytes_ = mapped_bytes_ = 0;
}
#endif

}  // namespace ps
