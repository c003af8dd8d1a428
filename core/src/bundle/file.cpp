// Opening and reading a bundle, and its 64-byte header.
#include "bundle/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// Bundles are mapped and used without conversion, and sizes are 64 bit.
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Penstock runs only on little-endian machines: this compiler builds for a big-endian one"
#endif
#if __SIZEOF_POINTER__ != 8
#error "Penstock runs only on 64-bit machines: this compiler builds for addresses of other sizes"
#endif

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

File::~File() {
  if (mapped_) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
  if (descriptor_ >= 0) close(descriptor_);
}

ps_status File::open(const char* path, bool map) {
  descriptor_ = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not block here
  if (descriptor_ < 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  return load(map);
}

ps_status File::load(bool map) {
  if (fstat(descriptor_, &opened_) != 0) return fail(PS_IO_ERROR, "%s", strerror(errno));
  if (!S_ISREG(opened_.st_mode)) return fail(PS_IO_ERROR, "expected a regular file");
  if (opened_.st_size < kHeaderBytes) {
    return fail(PS_INVALID_FILE, "file: this is not a bundle: expected at least the header's 64 bytes, got %lld",
                static_cast<long long>(opened_.st_size));
  }
  bytes_ = opened_.st_size;
  if (map) {
    void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, descriptor_, 0);
    if (data == MAP_FAILED) return fail(PS_IO_ERROR, "mapping: %s", strerror(errno));
    data_ = static_cast<const uint8_t*>(data);
    mapped_ = true;
    madvise(data, static_cast<size_t>(bytes_),
            MADV_HUGEPAGE);  // advice: read uncached parts as huge pages
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
    return fail(PS_INVALID_FILE, "header.header_bytes: expected 64, got %u", out->header_bytes);
  for (int i = 48; i < kHeaderBytes; ++i) {
    if (h[i]) return fail(PS_INVALID_FILE, "header.padding: expected zero, got %u at byte %d", h[i], i);
  }
  if (out->file_bytes != static_cast<uint64_t>(file.bytes())) {
    return fail(PS_INVALID_FILE,
                "header.file_bytes: expected the file's size %lld, got %llu: it is truncated or has bytes to spare",
                static_cast<long long>(file.bytes()), static_cast<unsigned long long>(out->file_bytes));
  }
  if (out->metadata_offset != kHeaderBytes) {
    return fail(PS_INVALID_FILE, "header.metadata_offset: expected 64, got %llu",
                static_cast<unsigned long long>(out->metadata_offset));
  }
  if (out->metadata_bytes > kMaxMetadataBytes || out->metadata_bytes > out->file_bytes - kHeaderBytes) {
    return fail(PS_INVALID_FILE, "header.metadata_bytes: expected at most %lld and a range within the file, got %llu",
                static_cast<long long>(kMaxMetadataBytes), static_cast<unsigned long long>(out->metadata_bytes));
  }
  return PS_OK;
}

}  // namespace ps
