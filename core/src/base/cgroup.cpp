// The number of threads worth starting: the affinity mask, limited by the CPU quota of the cgroups.
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/cpu.h"

namespace ps {
namespace {

bool read_line(const char* path, char* line, int size) {
  FILE* file = fopen(path, "re");
  if (!file) return false;
  const bool ok = fgets(line, size, file) != nullptr;
  fclose(file);
  return ok;
}

int32_t cpus_of(long long quota, long long period) {
  if (quota <= 0 || period <= 0) return INT32_MAX;
  const long long cpus = (quota + period - 1) / period;
  return cpus < 1 ? 1 : cpus > INT32_MAX ? INT32_MAX : static_cast<int32_t>(cpus);
}

int32_t quota_at(const char* folder) {
  char path[PATH_MAX + 32], line[128];
  long long quota = 0, period = 0;
  snprintf(path, sizeof(path), "%s/cpu.max", folder);
  if (read_line(path, line, sizeof(line))) {  // version 2; "max" means no quota
    return sscanf(line, "%lld %lld", &quota, &period) == 2 ? cpus_of(quota, period) : INT32_MAX;
  }
  snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", folder);
  if (!read_line(path, line, sizeof(line)) || sscanf(line, "%lld", &quota) != 1) return INT32_MAX;
  snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", folder);
  if (!read_line(path, line, sizeof(line)) || sscanf(line, "%lld", &period) != 1) return INT32_MAX;
  return cpus_of(quota, period);
}

// The smallest quota of `group` and its ancestors.
int32_t quota_up_from(const char* root, const char* group) {
  char folder[PATH_MAX];
  int32_t least = INT32_MAX;
  const int used = snprintf(folder, sizeof(folder), "%s%s", root, group);
  if (used < 0 || static_cast<size_t>(used) >= sizeof(folder)) return least;
  const size_t root_len = strlen(root);
  for (;;) {
    const int32_t here = quota_at(folder);
    if (here < least) least = here;
    char* slash = strrchr(folder, '/');
    if (strlen(folder) <= root_len || !slash || static_cast<size_t>(slash - folder) < root_len) return least;
    *slash = 0;
  }
}

int32_t cgroup_cpus() {
  int32_t least = INT32_MAX;
  FILE* file = fopen("/proc/self/cgroup", "re");
  if (!file) return least;
  char line[PATH_MAX + 64];
  while (fgets(line, sizeof(line), file)) {
    line[strcspn(line, "\n")] = 0;
    char* controllers = strchr(line, ':');
    char* group = controllers ? strchr(controllers + 1, ':') : nullptr;
    if (!group) continue;
    *group++ = 0;
    const bool v2 = controllers[1] == 0, v1 = strstr(controllers + 1, "cpu") && !strstr(controllers + 1, "cpuset");
    if (!v2 && !v1) continue;
    const char* const roots[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/cpu"};
    const int32_t here = quota_up_from(roots[v2 ? 0 : 1], strcmp(group, "/") == 0 ? "" : group);
    if (here < least) least = here;
  }
  fclose(file);
  return least;
}

}  // namespace

int32_t num_usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  const int count = CPU_COUNT(&set);
  return count < 1 ? 1 : count;
}

int32_t default_num_threads() {
  const int32_t cpus = num_usable_cpus(), quota = cgroup_cpus();
  return cpus < quota ? cpus : quota;
}

}  // namespace ps
