// The functions of penstock_dev.h for instruction levels, machine limits and checksums.
#include <math.h>
#include <string.h>
#include <time.h>

#include "api/api.h"
#include "base/crc32.h"
#include "ops/layout.h"

namespace ps {
namespace {

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct ReadJob {
  const Kernels* kernels;
  uint8_t* data;
  int64_t bytes;
  int32_t num_threads;
  bool touch;
  std::atomic<uint64_t> sum{0};
};

void run_read(void* argument, int32_t thread) {
  ReadJob* job = static_cast<ReadJob*>(argument);
  int64_t begin, end;
  split(job->bytes / 64, thread, job->num_threads, &begin, &end);
  if (job->touch) {
    memset(job->data + begin * 64, 1, static_cast<size_t>(end - begin) * 64);
  } else {
    job->sum += job->kernels->read_bytes(job->data + begin * 64, (end - begin) * 64);
  }
}

struct PeakJob {
  const Kernels* kernels;
  int32_t dtype;
  double seconds;
  std::atomic<int64_t> operations{0};
};

void run_peak(void* argument, int32_t) {
  PeakJob* job = static_cast<PeakJob*>(argument);
  float sink = 0;
  const double end = seconds_now() + job->seconds;
  do {
    job->operations += job->kernels->peak(job->dtype, 10000, &sink);
  } while (seconds_now() < end);
}

}  // namespace
}  // namespace ps

using namespace ps;

uint32_t ps_crc32(uint32_t crc, const void* data, int64_t bytes) {
  return bytes > 0 ? ps::crc32(crc, data, bytes) : crc;
}

const char* ps_cpu_level_at(int32_t index, int32_t* runnable) {
  const FloatEnvironment environment;
  CpuLevel levels[kMaxCpuLevels];
  if (index < 0 || index >= cpu_levels(levels)) return nullptr;
  if (runnable) *runnable = levels[index].runnable;
  return levels[index].name;
}

ps_status ps_probe_bandwidth(ps_context* context, int64_t buffer_bytes, int32_t passes, double* bytes_per_second) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(bytes_per_second, "bytes_per_second"));
  if (buffer_bytes < 4096 || passes < 1) {
    return fail(PS_INVALID_ARGUMENT, "buffer_bytes, passes: expected at least 4096 and 1, got %lld and %d",
                static_cast<long long>(buffer_bytes), passes);
  }
  Region buffer;
  if (!buffer.allocate(buffer_bytes, true)) {
    return fail(PS_OUT_OF_MEMORY, "buffer_bytes: no memory for %lld bytes", static_cast<long long>(buffer_bytes));
  }
  ReadJob job;
  job.kernels = context->kernels;
  job.data = buffer.data();
  job.bytes = buffer_bytes;
  job.num_threads = context->pool.num_threads();
  job.touch = true;
  PS_TRY(context->pool.run(run_read, &job));
  job.touch = false;
  double best = HUGE_VAL;
  for (int32_t pass = 0; pass < passes; ++pass) {
    const double start = seconds_now();
    PS_TRY(context->pool.run(run_read, &job));
    const double took = seconds_now() - start;
    if (took < best) best = took;
  }
  const int64_t read = buffer_bytes / 64 * 64;
  *bytes_per_second = static_cast<double>(read) / best;
  return PS_OK;
}

ps_status ps_probe_compute(ps_context* context, int32_t dtype, double seconds, double* ops_per_second) {
  const FloatEnvironment environment;
  PS_TRY(check_open(context));
  PS_TRY(require(ops_per_second, "ops_per_second"));
  if (dtype != PS_F32 && dtype != PS_BF16 && dtype != PS_I8) {
    return fail(PS_INVALID_ARGUMENT, "dtype: expected f32, bf16 or i8, got %d", dtype);
  }
  if (!(seconds > 0 && seconds <= 60)) return fail(PS_INVALID_ARGUMENT, "seconds: expected up to 60, got %g", seconds);
  PeakJob job;
  job.kernels = context->kernels;
  job.dtype = dtype;
  job.seconds = seconds;
  const double start = seconds_now();
  PS_TRY(context->pool.run(run_peak, &job));
  *ops_per_second = static_cast<double>(job.operations.load()) / (seconds_now() - start);
  return PS_OK;
}

ps_status ps_probe_gather(const ps_comm* comm, int64_t bytes, int32_t count, int64_t* nanoseconds) {
  PS_TRY(require(comm && nanoseconds, "comm, nanoseconds"));
  if (bytes < 1 || bytes > comm->part_bytes)
    return fail(PS_INVALID_ARGUMENT, "bytes: expected 1 to %lld, got %lld", static_cast<long long>(comm->part_bytes),
                static_cast<long long>(bytes));
  Region own, whole;
  if (!own.allocate(bytes) || !whole.allocate(bytes * comm->world))
    return fail(PS_OUT_OF_MEMORY, "bytes: out of memory");
  int64_t sizes[PS_MAX_RANKS];
  const void* parts[PS_MAX_RANKS];
  for (int64_t& size : sizes) size = bytes;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t start = now_ns();
    memcpy(comm->part(comm->self), own.data(), static_cast<size_t>(bytes));
    PS_TRY(comm->all_gather(comm->self, static_cast<uint64_t>(i), sizes, parts));
    for (int32_t r = 0; r < comm->world; ++r) memcpy(whole.data() + r * bytes, parts[r], static_cast<size_t>(bytes));
    nanoseconds[i] = now_ns() - start;
  }
  return PS_OK;
}
