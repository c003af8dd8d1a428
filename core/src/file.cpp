#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace ps {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // two huge pages: what a thread reads, then drops from the cache

constexpr char kMagic[8] = {'P', 'E', 'N', 'S', 'T', 'O', 'C', 'K'};

template <typename T>
T field(const uint8_t* header, int at) {
  T value;
  memcpy(&value, header + at, sizeof(T));
  return value;
}

// 0, -1 where the file ends too soon, or an error number.
int read_all(int descriptor, int64_t offset, int64_t bytes, uint8_t* out) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(descriptor, out + done, static_cast<size_t>(bytes - done), offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : -1;
    done += n;
  }
  return 0;
}

ps_status read_failed(int error) {
  if (error > 0) return fail(PS_IO_ERROR, "reading: %s", strerror(error));
  return fail(PS_INVALID_FILE, "file: it shrank while it was read");
}

struct CopyJob {
  int descriptor;
  uint8_t* out;
  int64_t begin, end;
  std::atomic<int64_t> next{0};
  std::atomic<int> error{0};
};

// Threads take the next chunk as they come; each drops the chunk that it has read, so that the cache never holds a second
// copy.  Pages that another process maps stay in the cache, as the kernel sees to.
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

File::~File() {
  if (mapped_) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
  if (descriptor_ >= 0) close(descriptor_);
}

ps_status File::open(const char* path, bool map) {
  descriptor_ = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe never blocks here
  if (descriptor_ < 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  return load(map);
}

ps_status File::load(bool map) {
  if (fstat(descriptor_, &opened_) != 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  if (!S_ISREG(opened_.st_mode)) return fail(PS_IO_ERROR, "expected a regular file");
  if (opened_.st_size < kHeaderBytes) {
    return fail(PS_INVALID_FILE, "file: expected at least the header's 64 bytes, found %lld",
                static_cast<long long>(opened_.st_size));
  }
  bytes_ = opened_.st_size;
  if (map) {
    void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor_, 0);
    if (data == MAP_FAILED) return fail(PS_IO_ERROR, "mapping: %s", strerror(errno));
    data_ = static_cast<const uint8_t*>(data);
    mapped_ = true;
    madvise(data, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // advice: what is not in the cache yet is read as huge pages
    return PS_OK;
  }
  if (!copy_.allocate(bytes_, true))
    return fail(PS_OUT_OF_MEMORY, "no memory for the file's %lld bytes", static_cast<long long>(bytes_));
  PS_TRY(read(0, bytes_, copy_.data()));
  data_ = copy_.data();
  return PS_OK;
}

ps_status File::read(int64_t offset, int64_t bytes, uint8_t* out) const {
  const int error = read_all(descriptor_, offset, bytes, out);
  return error ? read_failed(error) : PS_OK;
}

// A rewrite in place of the same size would leave a copy of two files' parts.
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
  // What this process has touched of the mapping would keep its pages in the cache; it can be mapped again any time.
  madvise(const_cast<uint8_t*>(data_) + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
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
  posix_fadvise(descriptor_, begin, end - begin, POSIX_FADV_DONTNEED);  // also what lay across two chunks
  copy_begin_ = begin;
  copy_end_ = end;
  return PS_OK;
}

ps_status read_header(const File& file, Header* out) {
  uint8_t h[kHeaderBytes];
  PS_TRY(file.read(0, kHeaderBytes, h));
  if (memcmp(h, kMagic, sizeof(kMagic)) != 0)
    return fail(PS_INVALID_FILE, "header.magic: expected PENSTOCK: this is not a bundle");
  *out = Header{field<uint16_t>(h, 8),  field<uint16_t>(h, 10), field<uint32_t>(h, 12), field<uint64_t>(h, 16),
                field<uint64_t>(h, 24), field<uint32_t>(h, 32), field<uint32_t>(h, 36), field<uint64_t>(h, 40)};
  if (out->major != kFormatMajor) {
    return fail(PS_UNSUPPORTED, "header.major: this version reads format %u, the file has format %u.%u", kFormatMajor,
                out->major, out->minor);
  }
  if (out->required_features & ~kKnownFeatures) {
    return fail(PS_UNSUPPORTED,
                "header.required_features: the file needs features 0x%llx that this version does not know",
                static_cast<unsigned long long>(out->required_features & ~kKnownFeatures));
  }
  if (out->header_bytes != kHeaderBytes)
    return fail(PS_INVALID_FILE, "header.header_bytes: expected 64, found %u", out->header_bytes);
  for (int i = 48; i < kHeaderBytes; ++i) {
    if (h[i]) return fail(PS_INVALID_FILE, "header.padding: expected zero, found %u at byte %d", h[i], i);
  }
  if (out->file_bytes != static_cast<uint64_t>(file.bytes())) {
    return fail(PS_INVALID_FILE,
                "header.file_bytes: expected the file's size %lld, found %llu: it is truncated or has bytes to spare",
                static_cast<long long>(file.bytes()), static_cast<unsigned long long>(out->file_bytes));
  }
  if (out->metadata_offset != kHeaderBytes) {
    return fail(PS_INVALID_FILE, "header.metadata_offset: expected 64, found %llu",
                static_cast<unsigned long long>(out->metadata_offset));
  }
  if (out->metadata_bytes > kMaxMetadataBytes || out->metadata_bytes > out->file_bytes - kHeaderBytes) {
    return fail(PS_INVALID_FILE, "header.metadata_bytes: expected at most %lld and a range within the file, found %llu",
                static_cast<long long>(kMaxMetadataBytes), static_cast<unsigned long long>(out->metadata_bytes));
  }
  return PS_OK;
}

}  // namespace ps
