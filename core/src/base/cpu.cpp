// Detection of instruction levels, and selection of the kernel table.
#include "base/cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace ps {
#if defined(PENSTOCK_PLANTED)
const Kernels* planted_kernels(
    const Kernels* kernels);  // core/tools/check/planted.cpp: injected faults that check the tests themselves
#endif
#if defined(__x86_64__)
// core/kernels/levels/avx512_bf16.cpp: the bare instruction, acc [16] += a [16][2] . b [16][2].
void dot_pairs(const uint16_t* a, const uint16_t* b, float* acc);
#endif
namespace {

#if defined(__x86_64__)
uint64_t enabled_state() {  // xgetbv(0): which registers the operating system saves
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// A process must request tile registers.  The system refuses if a thread's signal stack is too small for them.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
  return false;
#endif
}

struct X86 { bool avx2, avx512, bf16, amd, zen4, tiles; };

X86 detect() {
  X86 found{false, false, false, false, false, false};
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const uint32_t family = (a >> 8 & 15) + (a >> 20 & 255);
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !avx) return found;
  const uint64_t state = enabled_state();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = (state & 0x6) == 0x6 && fma && f16c && (b & (1u << 5));
  const uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
  const bool vnni = c & (1u << 11);
  const uint32_t amx = (1u << 22) | (1u << 24) | (1u << 25);  // bf16, tiles, int8
  found.tiles = (state & 0x60000) == 0x60000 && (d & amx) == amx;
  found.avx512 = found.avx2 && (state & 0xE6) == 0xE6 && (b & f_dq_bw_vl) == f_dq_bw_vl && vnni;
  found.bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
  char vendor[13] = "";
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    memcpy(vendor, &b, 4);
    memcpy(vendor + 4, &d, 4);
    memcpy(vendor + 8, &c, 4);
  }
  found.amd = strcmp(vendor, "AuthenticAMD") == 0;
  found.zen4 = found.avx512 && found.amd && family == 0x19;  // Zen 3 has this family too, but not AVX-512
  return found;
}
#endif

void add_level(CpuLevel* out, int32_t* count, const char* name, const Kernels* kernels, bool runnable) {
#if defined(PENSTOCK_PLANTED)
  if (kernels) kernels = planted_kernels(kernels);
#endif
  if (kernels) out[(*count)++] = CpuLevel{name, kernels, runnable};
}

float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

// The operands have magnitudes from 2^-8 to 2^7 with random fractions and signs, so that another order of additions or
// another rounding changes most lanes.
bool dots_in_order(void (*dot)(const uint16_t* a, const uint16_t* b, float* acc)) {
  uint32_t state = 1;
  const auto draw = [&] { return state = state * 1664525u + 1013904223u; };
  for (int round = 0; round < 16; ++round) {
    uint16_t a[32], b[32];
    float acc[16], wanted[16];
    for (int i = 0; i < 32; ++i) {
      a[i] = static_cast<uint16_t>((draw() >> 16 & 0x87ff) | 0x3c00);
      b[i] = static_cast<uint16_t>((draw() >> 16 & 0x87ff) | 0x3c00);
    }
    for (int i = 0; i < 16; ++i) {
      acc[i] = static_cast<float>(static_cast<int32_t>(draw())) * 0x1p-24f;
      wanted[i] = fmaf(from_bf16(a[2 * i]), from_bf16(b[2 * i]),
                       fmaf(from_bf16(a[2 * i + 1]), from_bf16(b[2 * i + 1]), acc[i]));
    }
    dot(a, b, acc);
    if (memcmp(acc, wanted, sizeof(acc)) != 0) return false;  // NOLINT(bugprone-suspicious-memory-comparison): the bits
  }
  return true;
}

int32_t cpu_levels(CpuLevel* out, bool tiles) {
  int32_t count = 0;
#if defined(__x86_64__)
  const X86 machine = detect();
  // On Intel processors with the instruction, two fused multiply-adds give the same in half the time.
  const bool dots = machine.avx512 && machine.bf16 && machine.amd && kernels_avx512_bf16 && dots_in_order(dot_pairs);
  const Kernels* const with_dots = machine.zen4 ? kernels_avx512_short_prefetch : kernels_avx512_bf16;
  const bool amx = kernels_amx && machine.avx512 && machine.bf16 && machine.tiles;
  add_level(out, &count, "amx", kernels_amx, amx && tiles && may_use_tiles());
  add_level(out, &count, "avx512", dots ? with_dots : kernels_avx512, machine.avx512);
  add_level(out, &count, "avx2", kernels_avx2, machine.avx2);
#endif
#if !defined(__x86_64__)
  (void)tiles;
#endif
#if defined(__aarch64__)
  // The kernel reports only features that all cores have, on big.LITTLE machines too.
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  add_level(out, &count, "neon_dot", kernels_neon_dot, (getauxval(AT_HWCAP) & kDotProducts) != 0);
  add_level(out, &count, "neon", kernels_neon, true);
#endif
  add_level(out, &count, "generic", kernels_generic, true);
  return count;
}

ps_status choose_kernels(const char* name, const Kernels** out) {
  const char* source = "cpu_level";
  if (!name || !*name) {
    name = getenv("PENSTOCK_CPU");
    source = "PENSTOCK_CPU";
  }
  const bool any = !name || !*name;
  CpuLevel levels[kMaxCpuLevels];
  const int32_t count = cpu_levels(levels, any || strcmp(name, "amx") == 0);
  char names[128] = "";
  for (int32_t i = 0; i < count; ++i) {
    const bool chosen = any ? levels[i].runnable : strcmp(name, levels[i].name) == 0;
    if (chosen && !levels[i].runnable) {
      return fail(PS_UNSUPPORTED, "%s: this machine lacks the instructions of level \"%s\"", source, name);
    }
    if (chosen) {
      *out = levels[i].kernels;
      return PS_OK;
    }
    const size_t used = strlen(names);
    snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "", levels[i].name);
  }
  if (any) return fail(PS_UNSUPPORTED, "cpu_level: this machine runs none of the levels of this build, %s", names);
  return fail(PS_INVALID_ARGUMENT, "%s: expected one of %s, got \"%s\"", source, names, name);
}

}  // namespace ps
