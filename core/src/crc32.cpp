// CRC-32 by sixteen tables: sixteen bytes a step, several times the speed of a byte at a time.
#include "crc32.h"

#include <string.h>

namespace ps {
namespace {

struct Tables {
  uint32_t t[16][256];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    tables.t[0][i] = c;
  }
  for (int j = 1; j < 16; ++j) {
    for (int i = 0; i < 256; ++i) {
      const uint32_t c = tables.t[j - 1][i];
      tables.t[j][i] = tables.t[0][c & 255] ^ (c >> 8);
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t word(uint32_t value, int table) {
  return kTables.t[table + 3][value & 255] ^ kTables.t[table + 2][(value >> 8) & 255] ^
         kTables.t[table + 1][(value >> 16) & 255] ^ kTables.t[table][value >> 24];
}

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, int64_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 16; bytes -= 16, p += 16) {
    uint32_t w[4];
    memcpy(w, p, 16);
    crc = word(w[0] ^ crc, 12) ^ word(w[1], 8) ^ word(w[2], 4) ^ word(w[3], 0);
  }
  for (; bytes > 0; --bytes, ++p) crc = kTables.t[0][(crc ^ *p) & 255] ^ (crc >> 8);
  return ~crc;
}

}  // namespace ps
