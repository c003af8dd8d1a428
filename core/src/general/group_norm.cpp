// Ops of general networks: group_norm.
// Hot: runs in every step.
#include <math.h>

#include <algorithm>

#include "base/memory.h"
#include "general/window.h"

namespace ps {
namespace {

constexpr int32_t kWeight = argument_at(OP_GROUP_NORM, "Weight weight");
constexpr int32_t kBias = argument_at(OP_GROUP_NORM, "Weight bias");
constexpr int32_t kGroups = attr_at(OP_GROUP_NORM, "int groups");
constexpr int32_t kEps = attr_at(OP_GROUP_NORM, "float eps");

// Sums a channel over blocks of pixels, then the blocks in order, then the channels of a group.
constexpr int64_t kBlockPixels = 128;

struct Sizes { int64_t images, pixels, channels, blocks; };
Sizes sizes_of(const Call& c) {
  const Tensor& x = c.in[0];
  Sizes s{x.dims[0], x.rank == 4 ? x.dims[1] * x.dims[2] : x.dims[1], x.dims[x.rank - 1], 0};
  s.blocks = (s.pixels + kBlockPixels - 1) / kBlockPixels;
  return s;
}

// Shared scratch: sums [images][blocks][channels], then mean, scale and shift [images][3][channels].
float* sums_of(const Call& c) { return reinterpret_cast<float*>(c.scratch); }
float* rows_of(const Call& c) {
  const Sizes s = sizes_of(c);
  return sums_of(c) + s.images * s.blocks * s.channels;
}

int64_t block_items(const Call& c) {
  return c.in[0].dims[c.in[0].rank - 1] ? sizes_of(c).images * sizes_of(c).blocks : 0;
}
int64_t image_items(const Call& c) { return block_items(c) ? sizes_of(c).images : 0; }

struct Block { int64_t image, first, count; };
Block block_at(const Sizes& s, int64_t item) {
  const int64_t first = item % s.blocks * kBlockPixels;
  return Block{item / s.blocks, (item / s.blocks) * s.pixels + first, std::min(kBlockPixels, s.pixels - first)};
}

void run_sums(const Call& c, int64_t begin, int64_t end, bool squares) {
  const Sizes s = sizes_of(c);
  for (int64_t item = begin; item < end; ++item) {
    const Block b = block_at(s, item);
    const float* const mean = squares ? rows_of(c) + b.image * 3 * s.channels : nullptr;
    c.kernels->windows.column_sums(f32_data(c.in[0]) + b.first * s.channels, b.count, s.channels, mean,
                                   sums_of(c) + item * s.channels);
  }
}
void run_totals(const Call& c, int64_t begin, int64_t end, int32_t) { run_sums(c, begin, end, false); }
void run_squares(const Call& c, int64_t begin, int64_t end, int32_t) { run_sums(c, begin, end, true); }

// The mean of a group, from the sums of an image's blocks.
void group_means(const Call& c, const Sizes& s, int64_t image, float* means) {
  const int64_t groups = c.attrs[kGroups].i, width = s.channels / groups;
  const float* const sums = sums_of(c) + image * s.blocks * s.channels;
  for (int64_t g = 0; g < groups; ++g) {
    float total = 0;
    for (int64_t channel = g * width; channel < (g + 1) * width; ++channel) {
      float sum = 0;
      for (int64_t block = 0; block < s.blocks; ++block) sum += sums[block * s.channels + channel];
      total += sum;
    }
    const float mean = total / static_cast<float>(s.pixels * width);
    for (int64_t channel = g * width; channel < (g + 1) * width; ++channel) means[channel] = mean;
  }
}

void run_means(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sizes s = sizes_of(c);
  for (int64_t image = begin; image < end; ++image) group_means(c, s, image, rows_of(c) + image * 3 * s.channels);
}

void run_scales(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sizes s = sizes_of(c);
  const float eps = static_cast<float>(c.attrs[kEps].f);
  const float *const weight = f32_data(c.in[kWeight]), *const bias = f32_data(c.in[kBias]);
  for (int64_t image = begin; image < end; ++image) {
    float* const scale = rows_of(c) + (image * 3 + 1) * s.channels;
    group_means(c, s, image, scale);
    for (int64_t i = 0; i < s.channels; ++i) {
      scale[i] = 1 / sqrtf(scale[i] + eps) * weight[i];
      scale[s.channels + i] = bias[i];
    }
  }
}

void run_normalize(const Call& c, int64_t begin, int64_t end, int32_t) {
  const Sizes s = sizes_of(c);
  for (int64_t item = begin; item < end; ++item) {
    const Block b = block_at(s, item);
    const float* const rows = rows_of(c) + b.image * 3 * s.channels;
    c.kernels->windows.normalize_columns(f32_data(c.in[0]) + b.first * s.channels, b.count, s.channels, rows,
                                         rows + s.channels, rows + 2 * s.channels,
                                         f32_data(c.out[0]) + b.first * s.channels);
  }
}

constexpr Phase kGroupNorm[] = {
    {.split = SPLIT_ITEMS, .items = block_items, .run = run_totals, .reads_all = operands(0), .writes_scratch = true},
    {.split = SPLIT_ITEMS, .items = image_items, .run = run_means, .reads_scratch = true, .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = block_items,
     .run = run_squares,
     .reads_all = operands(0),
     .reads_scratch = true,
     .writes_scratch = true},
    {.split = SPLIT_ITEMS, .items = image_items, .run = run_scales, .reads_scratch = true, .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = block_items,
     .run = run_normalize,
     .reads_all = operands(0),
     .writes_outputs = true,
     .reads_scratch = true},
};

}  // namespace

ps_status infer_group_norm(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(expect_f32(in[0], "x", 3, 4));
  const int64_t channels = last_dim(in[0]), groups = attrs[kGroups].i;
  if (groups < 1 || channels % groups) {
    return fail(PS_INVALID_ARGUMENT, "groups: expected a divisor of %lld channels, got %lld",
                static_cast<long long>(channels), static_cast<long long>(groups));
  }
  PS_TRY(expect_vector(in[kWeight], "weight", channels));
  PS_TRY(expect_vector(in[kBias], "bias", channels));
  if (!(attrs[kEps].f >= 0 && attrs[kEps].f <= 1))
    return fail(PS_INVALID_ARGUMENT, "eps: expected 0 to 1, got %g", attrs[kEps].f);
  copy_type(in[0], out);
  return PS_OK;
}

Phases group_norm_phases(const Call&) { return Phases{kGroupNorm, 5}; }

ps_status group_norm_scratch(const Call& c, Scratch* out) {
  const Sizes s = sizes_of(c);
  if (checked_mul(s.images, s.blocks + 3, &out->shared) && checked_mul(out->shared, s.channels, &out->shared) &&
      checked_mul(out->shared, 4, &out->shared))
    return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "x: its sums do not fit in memory");
}

}  // namespace ps
