// The ops, schemes and layouts in this build: all, or those that -DPENSTOCK_OPS_FROM found in bundles.  Kernels include
// this header, so it defines only constants of internal linkage.
#ifndef PENSTOCK_BASE_BUILD_H
#define PENSTOCK_BASE_BUILD_H

#include <stdint.h>

#ifdef PENSTOCK_OPS_FROM
#include "ops_from.h"  // written by core/tools/generate/bundle_ops.cpp
#endif

namespace ps {
namespace {

#ifdef PENSTOCK_OPS_FROM
// Whether `list` contains `name` between spaces.
constexpr bool is_listed(const char* list, const char* name) {
  for (; *list; ++list) {
    if (*list != ' ') continue;
    int n = 0;
    while (name[n] && list[1 + n] == name[n]) ++n;
    if (!name[n] && list[1 + n] == ' ') return true;
  }
  return false;
}
constexpr bool builds_op(const char* name) { return is_listed(PS_BUILD_OPS, name); }
constexpr bool builds_scheme(const char* name) { return is_listed(PS_BUILD_SCHEMES, name); }
constexpr bool builds_layout(int layout) { return uint64_t{PS_BUILD_LAYOUTS} >> layout & 1; }
constexpr bool builds_kv(int layout) { return PS_BUILD_KV_LAYOUTS >> layout & 1; }
constexpr bool kBuildsNetworks = PS_BUILD_NETWORKS;  // general networks
#else
constexpr bool builds_op(const char*) { return true; }
constexpr bool builds_scheme(const char*) { return true; }
constexpr bool builds_layout(int) { return true; }
constexpr bool builds_kv(int) { return true; }
constexpr bool kBuildsNetworks = true;
#endif
// The ops that the attention kernels compute; ops/op_ids.h checks that the list is complete.
constexpr const char* kAttentionOps[] = {"attention",          "sink_attention",    "latent_attention",
                                         "relative_attention", "context_attention", "disentangled_attention"};
constexpr bool builds_attention() {
  for (const char* name : kAttentionOps) {
    if (builds_op(name)) return true;
  }
  return false;
}
#ifdef PENSTOCK_NO_DEV
constexpr bool kBuildsDev = false;
#else
constexpr bool kBuildsDev = true;
#endif

}  // namespace
}  // namespace ps

#endif
