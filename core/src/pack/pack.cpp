// Packing and unpacking of weights, split over threads at tile boundaries.
// Hot: runs for every weight that is packed.
#include "pack/pack.h"

#include <math.h>

#include <atomic>

#include "base/memory.h"
#include "base/tiles.h"
#include "pack/gguf_blocks.h"
#include "ops/layout.h"

namespace ps {
namespace {

struct Job;
using TileWork = void (*)(Job* job, int64_t row_start, int64_t num_rows);

// Rows are split at tile boundaries, so that no two threads write to a tile.
struct Job {
  PackRange range;
  ps_context* context;
  TileWork work;
  const void* src;
  void* dst;
  int32_t src_dtype;
  const float* column_weights;
  const int8_t* q_in;
  const float* scales_in;
  const int8_t* groups_in;
  bool even_offsets;
  int8_t* q_out;
  float* scales_out;
  int8_t* groups_out;
  std::atomic<int64_t> next_tile{0};
  std::atomic<int64_t> bad_row{INT64_MAX};
};

void note_bad_row(Job* job, int64_t row) {
  int64_t seen = job->bad_row.load();
  while (row < seen && !job->bad_row.compare_exchange_weak(seen, row)) {
  }
}

void run_tiles(void* argument, int32_t) {
  Job* job = static_cast<Job*>(argument);
  const int64_t first = job->range.row_start, last = first + job->range.num_rows;
  for (;;) {
    const int64_t tile = first / kTileRows + job->next_tile.fetch_add(1);
    int64_t begin = tile * kTileRows, end = begin + kTileRows;
    if (begin < first) begin = first;
    if (end > last) end = last;
    if (begin >= last) return;
    job->work(job, begin, end - begin);
  }
}

ps_status run(Job* job) {
  if (job->range.num_rows == 0) return PS_OK;
  return job->context->pool.run(run_tiles, job);
}

bool is_finite_row(const void* row, int32_t dtype, int64_t cols) {
  uint32_t bad = 0;
  if (dtype == PS_F32) {
    const uint32_t* p = static_cast<const uint32_t*>(row);
    for (int64_t i = 0; i < cols; ++i) bad |= (p[i] & 0x7f800000u) == 0x7f800000u;
  } else {
    const uint16_t exponent = dtype == PS_F16 ? 0x7c00 : 0x7f80;
    const uint16_t* p = static_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < cols; ++i) bad |= (p[i] & exponent) == exponent;
  }
  return !bad;
}

void pack_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  const int64_t row_bytes = r.cols * (job->src_dtype == PS_F32 ? 4 : 2);
  const char* src = static_cast<const char*>(job->src) + (row_start - r.row_start) * row_bytes;
  if (r.layout == PS_T16_I8 || r.layout == PS_T16_I4G32) {  // NaN or infinity would give no valid scale
    for (int64_t i = 0; i < num_rows; ++i) {
      if (!is_finite_row(src + i * row_bytes, job->src_dtype, r.cols)) return note_bad_row(job, row_start + i);
    }
  }
  const float* const scales = job->scales_in ? job->scales_in + (row_start - r.row_start) : nullptr;
  job->context->kernels->pack(PackArgs{r.layout, r.rows, r.cols, row_start, num_rows, job->src_dtype, src,
                                       static_cast<uint8_t*>(job->dst), job->column_weights, scales,
                                       job->even_offsets});
}

void unpack_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  const WeightView view{static_cast<const uint8_t*>(job->src), r.layout, r.rows, r.cols};
  job->context->kernels->unpack(view, row_start, num_rows,
                                static_cast<float*>(job->dst) + (row_start - r.row_start) * r.cols);
}

int64_t num_groups(const PackRange& r) { return (r.cols + kGroupColumns - 1) / kGroupColumns; }

// The tile of a row; `lane` is the row within it.
template <typename Byte>
Byte* tile_of(const PackRange& r, Byte* data, int64_t row, int64_t* lane) {
  *lane = row % kTileRows;
  return data + row / kTileRows * (r.layout == PS_T16_I8 ? i8_tile_bytes(r.cols) : i4_tile_bytes(r.cols));
}

void put_i8_row(const PackRange& r, uint8_t* tile, int64_t lane, const int8_t* q) {
  uint8_t* values = tile + kScaleBytes;
  for (int64_t k = 0; k < r.cols; ++k) values[byte_at(k, lane)] = static_cast<uint8_t>(q[k]);
}

void get_i8_row(const PackRange& r, const uint8_t* tile, int64_t lane, int8_t* q) {
  const uint8_t* values = tile + kScaleBytes;
  for (int64_t k = 0; k < r.cols; ++k) q[k] = static_cast<int8_t>(values[byte_at(k, lane)]);
}

// The tile memory of a pair of groups.
template <typename Byte>
Byte* pair_of(Byte* tile, int64_t group) {
  return tile + kScaleBytes + group / 2 * kPairBytes;
}

void put_i4_row(const PackRange& r, uint8_t* tile, int64_t lane, const int8_t* q, const int8_t* groups) {
  for (int64_t g = 0; g < num_groups(r); ++g) {
    memcpy(pair_of(tile, g) + parameters_at(g, lane), groups + 2 * g, 2);
    uint8_t* nibbles = pair_of(tile, g) + nibbles_at(g);
    for (int64_t b = 0; b < kGroupColumns / 2; ++b) {
      const int64_t low = g * kGroupColumns + b, high = low + kGroupColumns / 2;
      const int v_low = low < r.cols ? q[low] : 0, v_high = high < r.cols ? q[high] : 0;
      nibbles[byte_at(b, lane)] = static_cast<uint8_t>(v_low | v_high << 4);
    }
  }
}

void get_i4_row(const PackRange& r, const uint8_t* tile, int64_t lane, int8_t* q, int8_t* groups) {
  for (int64_t g = 0; g < num_groups(r); ++g) {
    memcpy(groups + 2 * g, pair_of(tile, g) + parameters_at(g, lane), 2);
    const uint8_t* nibbles = pair_of(tile, g) + nibbles_at(g);
    for (int64_t b = 0; b < kGroupColumns / 2; ++b) {
      const int64_t low = g * kGroupColumns + b, high = low + kGroupColumns / 2;
      const uint8_t byte = nibbles[byte_at(b, lane)];
      if (low < r.cols) q[low] = static_cast<int8_t>(byte & 15);
      if (high < r.cols) q[high] = static_cast<int8_t>(byte >> 4);
    }
  }
}

bool is_int4_row(const PackRange& r, const int8_t* q, const int8_t* groups) {
  bool good = true;
  for (int64_t k = 0; k < r.cols; ++k) {
    const int step = static_cast<uint8_t>(groups[k / kGroupColumns * 2]);
    const int8_t offset = groups[k / kGroupColumns * 2 + 1];
    const int value = step * q[k] + offset;
    good &= step >= 1 && step <= kMaxStep && q[k] >= 0 && q[k] <= kMaxNibble && value >= -128 && value <= 127;
  }
  return good;
}

void check_quantized_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  for (int64_t row = row_start; row < row_start + num_rows; ++row) {
    const int64_t i = row - r.row_start;
    const int8_t* q = job->q_in + i * r.cols;
    const bool good = r.layout == PS_T16_I8 || is_int4_row(r, q, job->groups_in + i * num_groups(r) * 2);
    if (!good || !isfinite(job->scales_in[i])) note_bad_row(job, row);
  }
}

void pack_quantized_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  for (int64_t row = row_start; row < row_start + num_rows; ++row) {
    const int64_t i = row - r.row_start;
    const int8_t* q = job->q_in + i * r.cols;
    int64_t lane;
    uint8_t* tile = tile_of(r, static_cast<uint8_t*>(job->dst), row, &lane);
    memcpy(tile + scale_at(lane), job->scales_in + i, 4);
    if (r.layout == PS_T16_I8) {
      put_i8_row(r, tile, lane, q);
    } else {
      put_i4_row(r, tile, lane, q, job->groups_in + i * num_groups(r) * 2);
    }
  }
}

void unpack_quantized_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  for (int64_t row = row_start; row < row_start + num_rows; ++row) {
    const int64_t i = row - r.row_start;
    int8_t* q = job->q_out + i * r.cols;
    int64_t lane;
    const uint8_t* tile = tile_of(r, static_cast<const uint8_t*>(job->src), row, &lane);
    memcpy(job->scales_out + i, tile + scale_at(lane), 4);
    if (r.layout == PS_T16_I8) {
      get_i8_row(r, tile, lane, q);
    } else {
      get_i4_row(r, tile, lane, q, job->groups_out + i * num_groups(r) * 2);
    }
  }
}

void pack_blocks_tile(Job* job, int64_t row_start, int64_t num_rows) {
  const PackRange& r = job->range;
  const BlockFormat format = block_format(r.layout);
  const int64_t num_blocks = r.cols / format.columns, row_bytes = num_blocks * format.bytes;
  int64_t tile_bytes = 0;
  if (checked_bytes(r.layout, kTileRows, r.cols, &tile_bytes) != PS_OK) return;
  for (int64_t row = row_start; row < row_start + num_rows; ++row) {
    const uint8_t* src = static_cast<const uint8_t*>(job->src) + (row - r.row_start) * row_bytes;
    uint8_t* const tile = static_cast<uint8_t*>(job->dst) + row / kTileRows * tile_bytes;
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (!format.put(src + b * format.bytes, b, row % kTileRows, tile)) return note_bad_row(job, row);
    }
  }
}

void start_job(Job* job, ps_context* context, const PackRange& range, TileWork work) {
  job->range = range;
  job->context = context;
  job->work = work;
}

}  // namespace

ps_status pack(ps_context* context, const PackArgs& args) {
  Job job{};
  start_job(&job, context, PackRange{args.layout, args.rows, args.cols, args.row_start, args.num_rows}, pack_tile);
  job.src = args.src;
  job.dst = args.dst;
  job.src_dtype = args.src_dtype;
  job.column_weights = args.column_weights;
  job.scales_in = args.scales;
  job.even_offsets = args.even_offsets;
  PS_TRY(run(&job));
  const int64_t bad = job.bad_row.load();
  if (bad == INT64_MAX) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "src: row %lld holds NaN or infinity, which cannot be quantized",
              static_cast<long long>(bad));
}

ps_status unpack(ps_context* context, const PackRange& range, const uint8_t* src, float* dst) {
  Job job{};
  start_job(&job, context, range, unpack_tile);
  job.src = src;
  job.dst = dst;
  return run(&job);
}

ps_status pack_quantized(ps_context* context, const PackRange& range, const int8_t* q, const float* scales,
                         const int8_t* groups, uint8_t* dst) {
  Job job{};
  start_job(&job, context, range, check_quantized_tile);
  job.q_in = q;
  job.scales_in = scales;
  job.groups_in = groups;
  job.dst = dst;
  PS_TRY(run(&job));
  const int64_t bad = job.bad_row.load();
  if (bad != INT64_MAX) {
    return fail(PS_INVALID_ARGUMENT, "%s, got others in row %lld",
                range.layout == PS_T16_I8
                    ? "scales: expected finite ones"
                    : "q, scales, groups: expected nibbles, steps of 1 to 17, values step * q + offset of -128 to 127 "
                      "and finite scales",
                static_cast<long long>(bad));
  }
  job.next_tile = 0;
  job.work = pack_quantized_tile;
  return run(&job);
}

ps_status pack_blocks(ps_context* context, const PackRange& range, const uint8_t* src, uint8_t* dst) {
  Job job{};
  start_job(&job, context, range, pack_blocks_tile);
  job.src = src;
  job.dst = dst;
  PS_TRY(run(&job));
  const int64_t bad = job.bad_row.load();
  if (bad == INT64_MAX) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "src: row %lld has a scale that is NaN or infinity", static_cast<long long>(bad));
}

ps_status unpack_quantized(ps_context* context, const PackRange& range, const uint8_t* src, int8_t* q, float* scales,
                           int8_t* groups) {
  Job job{};
  start_job(&job, context, range, unpack_quantized_tile);
  job.src = src;
  job.q_out = q;
  job.scales_out = scales;
  job.groups_out = groups;
  return run(&job);
}

}  // namespace ps
