// Shared parts of kernel_check: random data, comparison by bits, and the levels that this machine can run.
#ifndef PENSTOCK_KERNEL_CHECK_H
#define PENSTOCK_KERNEL_CHECK_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "base/cpu.h"
#include "base/kernels.h"
#include "penstock_dev.h"

namespace check {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

inline int failures = 0;

// False: every kernel with each kind of shape, but not each shape with each number of rows, which takes minutes under
// the sanitizers.
inline bool whole = true;

inline void fail(const std::string& what, const char* level, const std::string& how) {
  if (++failures <= 4000000) std::printf("FAIL %s [%s]: %s\n", what.c_str(), level, how.c_str());
}

// Blocks of the generic level have two rows, so a part takes one block, a rest, and both.  It is the slowest level.
inline bool leaves_out(const ps::Kernels* k, int64_t m, int64_t most) {
  return !whole && k == ps::kernels_generic && m > 3 && m != most;
}

inline std::vector<const ps::Kernels*> levels() {
  std::vector<const ps::Kernels*> found = {ps::kernels_generic};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (ps::kernels_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back(ps::kernels_avx2);
  if (ps::kernels_avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    found.push_back(ps::kernels_avx512);
  if (ps::kernels_avx512_bf16 && found.back() == ps::kernels_avx512 && __builtin_cpu_supports("avx512bf16"))
    found.push_back(ps::kernels_avx512_bf16);
  ps::CpuLevel known[ps::kMaxCpuLevels];  // requests the tile registers from the system
  for (int32_t i = 0, count = ps::cpu_levels(known); i < count; ++i)
    if (known[i].kernels == ps::kernels_amx && known[i].runnable) found.push_back(ps::kernels_amx);
#endif
  if (ps::kernels_neon) found.push_back(ps::kernels_neon);
#if defined(__aarch64__)
  if (ps::kernels_neon_dot && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) found.push_back(ps::kernels_neon_dot);
#endif
  return found;
}

struct Random {
  uint64_t state;
  uint64_t next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    uint64_t x = state ^ (state >> 29);
    return (x * 0xbf58476d1ce4e5b9ull) >> 32;
  }
  float uniform() { return float(next() & 0xffffff) / 16777216.f; }
  float normal() { return (uniform() + uniform() + uniform() + uniform() - 2.f) * 1.7f; }
  Floats normals(int64_t n, float scale = 1.f) {
    Floats v(static_cast<size_t>(n));  // no room behind them, where a read past the end would not be found
    for (float& value : v) value = normal() * scale;
    return v;
  }
};

inline bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)); }

inline void expect_same(const Floats& a, const Floats& b, const std::string& what, const char* level) {
  for (size_t i = 0; i < b.size(); ++i)
    if (!same_bits(a[i], b[i])) {
      char text[120];
      std::snprintf(text, sizeof text, "element %zu is %.9g, expected the bits of %.9g", i, double(a[i]), double(b[i]));
      return fail(what, level, text);
    }
}

inline void expect_same(const Bytes& a, const Bytes& b, const std::string& what, const char* level) {
  for (size_t i = 0; i < b.size(); ++i)
    if (a[i] != b[i]) return fail(what, level, "byte " + std::to_string(i) + " differs");
}

inline void expect_near(double a, double b, double tolerance, const std::string& what, const char* level) {
  if (std::fabs(a - b) <= tolerance || (std::isnan(a) && std::isnan(b))) return;
  char text[120];
  std::snprintf(text, sizeof text, "%.9g, expected %.9g within %.3g", a, b, tolerance);
  fail(what, level, text);
}

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }

// max|x| / 127, and x in units of it.
inline float int8_scale(const float* x, int64_t n) {
  float m = 0;
  for (int64_t i = 0; i < n; ++i) m = std::fmax(m, std::fabs(x[i]));
  return m / 127.f;
}

inline float int8_value(float x, float scale) {
  return scale > 0 ? std::fmax(-127.f, std::fmin(127.f, std::nearbyintf(x * (1.f / scale)))) : 0.f;
}

}  // namespace check

#endif
