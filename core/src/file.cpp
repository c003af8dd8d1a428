#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ps {
namespace {

constexpr char kMagic[8] = {'P', 'E', 'N', 'S', 'T', 'O', 'C', 'K'};

template <typename T>
T field(const uint8_t* header, int at) {
  T value;
  memcpy(&value, header + at, sizeof(T));
  return value;
}

}  // namespace

File::~File() {
  if (mapped_) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
}

ps_status File::open(const char* path, bool map) {
  const int descriptor = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe never blocks here
  if (descriptor < 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  const ps_status status = load(descriptor, map);
  close(descriptor);
  return status;
}

ps_status File::load(int descriptor, bool map) {
  struct stat info;
  if (fstat(descriptor, &info) != 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  if (!S_ISREG(info.st_mode)) return fail(PS_IO_ERROR, "expected a regular file");
  if (info.st_size < kHeaderBytes) {
    return fail(PS_INVALID_FILE, "file: expected at least the header's 64 bytes, found %lld",
                static_cast<long long>(info.st_size));
  }
  bytes_ = info.st_size;
  if (map) {
    void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) return fail(PS_IO_ERROR, "mapping: %s", strerror(errno));
    data_ = static_cast<const uint8_t*>(data);
    mapped_ = true;
    return PS_OK;
  }
  if (!copy_.allocate(bytes_, true))
    return fail(PS_OUT_OF_MEMORY, "no memory for the file's %lld bytes", static_cast<long long>(bytes_));
  for (int64_t done = 0; done < bytes_;) {
    const ssize_t n = read(descriptor, copy_.data() + done, static_cast<size_t>(bytes_ - done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(PS_IO_ERROR, "reading: %s", strerror(errno));
    if (n == 0) return fail(PS_INVALID_FILE, "file: it shrank while it was read");
    done += n;
  }
  data_ = copy_.data();
  return PS_OK;
}

ps_status read_header(const File& file, Header* out) {
  const uint8_t* h = file.data();
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
