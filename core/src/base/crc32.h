// The CRC-32 checksum of zlib and of bundles.
#ifndef PENSTOCK_BASE_CRC32_H
#define PENSTOCK_BASE_CRC32_H

#include <stdint.h>

namespace ps {

uint32_t crc32(uint32_t crc, const void* data, int64_t bytes);  // zlib's

}  // namespace ps

#endif
