// Copying a range of a bundle into private memory with all threads.  It is a separate file because the program that
// PENSTOCK_OPS_FROM builds reads bundles without the thread pool.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include <errno.h>

#include "bundle/file.h"

namespace ps {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // two huge pages: read, then dropped from the page cache

struct CopyJob {
  int descriptor;
  uint8_t* out;
  int64_t begin, end;
  std::atomic<int64_t> next{0};
  std::atomic<int> error{0};
};

// Each thread takes the next chunk, reads it and drops it from the page cache, so that memory never holds everything
// twice.  The kernel keeps pages that another process maps.
void run_copy(void* argument, int32_t) {
  CopyJob* job = static_cast<CopyJob*>(argument);
  while (job->error.load(std::memory_order_relaxed) == 0) {
    const int64_t offset = job->begin + job->next.fetch_add(kChunkBytes, std::memory_order_relaxed);
    if (offset >= job->end) return;
    const int64_t bytes = std::min(kChunkBytes, job->end - offset);
    const int error = read_all(job->descriptor, offset, bytes, job->out + (offset - job->begin));
    if (error != 0) job->error.store(error);
    posix_fadvise(job->descriptor, offset, bytes, POSIX_FADV_DONTNEED);
  }
}

}  // namespace

// If the file was rewritten in place with the same size meanwhile, the copy may mix two files.
ps_status File::check_unchanged() const {
  struct stat now;
  if (fstat(descriptor_, &now) != 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  if (now.st_size == opened_.st_size && now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec) {
    return PS_OK;
  }
  return fail(PS_INVALID_FILE, "file: it changed while it was read");
}

ps_status File::copy(int64_t begin, int64_t end, Pool* pool) {
  if (!mapped_ || copy_end_ > 0 || begin >= end) return PS_OK;
  if (!copy_.allocate(end - begin, true))
    return fail(PS_OUT_OF_MEMORY, "no memory for the weights' %lld bytes", static_cast<long long>(end - begin));
  // Mapped pages that this process has touched would stay in the cache; they can be mapped again later.
  const int64_t first =
      round_up(begin, system_page_bytes());  // segments begin at multiples of 4,096, pages may be larger
  if (first < end) madvise(const_cast<uint8_t*>(data_) + first, static_cast<size_t>(end - first), MADV_DONTNEED);
  CopyJob job;
  job.descriptor = descriptor_;
  job.out = copy_.data();
  job.begin = begin;
  job.end = end;
  ps_status status = pool->run(run_copy, &job);
  if (status == PS_OK && job.error.load() != 0) status = read_failed(job.error.load());
  if (status == PS_OK) status = check_unchanged();
  if (status != PS_OK) {
    copy_.release();
    return status;
  }
  posix_fadvise(descriptor_, begin, end - begin, POSIX_FADV_DONTNEED);  // also pages that two chunks share
  copy_begin_ = begin;
  copy_end_ = end;
  return PS_OK;
}

}  // namespace ps
