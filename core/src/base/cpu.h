// Instruction levels: those that are compiled in, those that this machine can run, and the one to use.
#ifndef PENSTOCK_BASE_CPU_H
#define PENSTOCK_BASE_CPU_H

#include "base/error.h"
#include "base/kernels.h"

namespace ps {

struct CpuLevel {
  const char* name;
  const Kernels* kernels;
  bool runnable;
};
constexpr int32_t kMaxCpuLevels = 5;
// Fills the levels that are compiled in, best first, and returns their number. `tiles`: request tile registers from the
// system, which the process then keeps; false: report them as missing.
int32_t cpu_levels(CpuLevel* out, bool tiles = true);

// Whether a dot product of 16 pairs of bf16 gives the bits that attention requires (docs/explanation/numerics.md): the
// odd product is added first, then the even one, and each sum is rounded.
bool dots_in_order(void (*dot)(const uint16_t* a, const uint16_t* b, float* acc));
// `name` null: PENSTOCK_CPU, or else the best runnable level.
ps_status choose_kernels(const char* name, const Kernels** out);
int32_t default_num_threads();  // the affinity mask, limited by the cgroup's quota
int32_t num_usable_cpus();      // only the affinity mask

}  // namespace ps

#endif
