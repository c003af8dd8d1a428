// CRC-32 with the processor's instructions, which keep up with a fast disk: carry-less multiplication on x86-64, CRC-32
// instructions on AArch64.  Other processors use sixteen tables and process sixteen bytes per step.
// Hot: runs for every checksum of a file.
#include "base/crc32.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <wmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace ps {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // bits reversed, as in the whole checksum

struct Table { uint32_t t[256]; };

constexpr Table make_table() {
  Table table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) ? kPolynomial ^ (c >> 1) : c >> 1;
    table.t[i] = c;
  }
  return table;
}

constexpr Table kTable = make_table();

// The register after `bytes` more bytes; `crc` is the register itself, not its complement.
uint32_t update_by_bytes(uint32_t crc, const uint8_t* p, int64_t bytes) {
  for (; bytes > 0; --bytes, ++p) crc = kTable.t[(crc ^ *p) & 255] ^ (crc >> 8);
  return crc;
}

// Built on first use, on processors without the instructions: as constants the tables would add 16 kB to the library.
uint32_t tables[16][256];
pthread_once_t tables_once = PTHREAD_ONCE_INIT;

void make_tables() {
  memcpy(tables[0], kTable.t, sizeof kTable.t);
  for (int j = 1; j < 16; ++j) {
    for (int i = 0; i < 256; ++i) tables[j][i] = kTable.t[tables[j - 1][i] & 255] ^ (tables[j - 1][i] >> 8);
  }
}

uint32_t word(uint32_t value, int table) {
  return tables[table + 3][value & 255] ^ tables[table + 2][(value >> 8) & 255] ^
         tables[table + 1][(value >> 16) & 255] ^ tables[table][value >> 24];
}

uint32_t update_by_tables(uint32_t crc, const uint8_t* p, int64_t bytes) {
  pthread_once(&tables_once, make_tables);
  for (; bytes >= 16; bytes -= 16, p += 16) {
    uint32_t w[4];
    memcpy(w, p, 16);
    crc = word(w[0] ^ crc, 12) ^ word(w[1], 8) ^ word(w[2], 4) ^ word(w[3], 0);
  }
  return update_by_bytes(crc, p, bytes);
}

#if defined(__x86_64__)
constexpr int64_t kFoldBytes = 64;

// x^n modulo the polynomial, shifted up one bit: a product of two reversed numbers is one bit too low.
constexpr uint64_t power(int n) {
  uint32_t c = 1u << 31;
  for (; n > 0; --n) c = (c & 1) ? kPolynomial ^ (c >> 1) : c >> 1;
  return static_cast<uint64_t>(c) << 1;
}

constexpr uint64_t kFar[2] = {power(512 + 32), power(512 - 32)};
constexpr uint64_t kNear[2] = {power(128 + 32), power(128 - 32)};

bool detect() {
  uint32_t a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 1));
}

// Advances `x` by the distance whose powers `by` holds, and adds `next`.
__attribute__((target("pclmul"))) inline __m128i fold(__m128i x, __m128i by, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), next);
}

__attribute__((target("pclmul"))) inline __m128i load(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

// V.  Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.  The tables
// reduce the last 16 bytes.
__attribute__((target("pclmul"))) uint32_t update_fast(uint32_t crc, const uint8_t* p, int64_t bytes) {
  if (bytes < kFoldBytes) return update_by_bytes(crc, p, bytes);
  const __m128i far = load(kFar), near = load(kNear);
  __m128i x0 = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i x1 = load(p + 16), x2 = load(p + 32), x3 = load(p + 48);
  for (p += kFoldBytes, bytes -= kFoldBytes; bytes >= kFoldBytes; p += kFoldBytes, bytes -= kFoldBytes) {
    x0 = fold(x0, far, load(p));
    x1 = fold(x1, far, load(p + 16));
    x2 = fold(x2, far, load(p + 32));
    x3 = fold(x3, far, load(p + 48));
  }
  x0 = fold(fold(fold(x0, near, x1), near, x2), near, x3);
  for (; bytes >= 16; p += 16, bytes -= 16) x0 = fold(x0, near, load(p));
  uint8_t left[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), x0);
  return update_by_bytes(update_by_bytes(0, left, 16), p, bytes);
}
#elif defined(__aarch64__) && defined(__linux__)
bool detect() {
  constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32
  return getauxval(AT_HWCAP) & kCrc32;
}

// In assembly, because compilers differ in how one function may use the extension.
uint32_t update_fast(uint32_t crc, const uint8_t* p, int64_t bytes) {
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t w;
    memcpy(&w, p, 8);
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(w));
  }
  return update_by_bytes(crc, p, bytes);
}
#else
bool detect() { return false; }
uint32_t update_fast(uint32_t crc, const uint8_t* p, int64_t bytes) { return update_by_tables(crc, p, bytes); }
#endif

bool is_fast() {
  static int cached = -1;  // cached, because cpuid traps in a virtual machine
  int support = __atomic_load_n(&cached, __ATOMIC_RELAXED);
  if (support < 0) {
    support = detect();
    __atomic_store_n(&cached, support, __ATOMIC_RELAXED);
  }
  return support > 0;
}

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, int64_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  return ~(is_fast() ? update_fast(~crc, p, bytes) : update_by_tables(~crc, p, bytes));
}

}  // namespace ps
