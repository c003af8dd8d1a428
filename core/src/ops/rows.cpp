// The phases of ops whose output row i needs only row i of the inputs: norms, rotary positions, elementwise ops,
// gather.
// Hot: runs in every step.
#include "ops/ops.h"

namespace ps {
namespace {

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
const int32_t* i32(const Tensor& t) { return reinterpret_cast<const int32_t*>(t.data); }
int64_t rows(const Call& c) { return c.in[0].dims[0]; }
int64_t output_rows(const Call& c) { return c.out[0].dims[0]; }

NormArgs norm_args(const Call& c, const Tensor& weight) {
  NormArgs args{};
  const Tensor& x = c.in[0];
  args.x = f32(x);
  args.x_stride = x.row_stride;
  args.weight = f32(weight);
  args.weight_stride = weight.dims[1] == x.dims[x.rank - 1] ? 0 : x.dims[x.rank - 1];
  args.y = f32(c.out[0]);
  args.y_stride = c.out[0].row_stride;
  args.dim = x.dims[x.rank - 1];
  args.groups = x.rank == 3 ? x.dims[1] : 1;
  args.eps = static_cast<float>(c.attrs[kNormEps].f);
  return args;
}

void run_rms_norm(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->rms_norm(norm_args(c, c.in[kRmsNormWeight]), begin, end);
}

void run_add_rms_norm(const Call& c, int64_t begin, int64_t end, int32_t) {
  NormArgs args = norm_args(c, c.in[kAddRmsNormWeight]);
  args.residual = f32(c.in[kAddRmsNormResidual]);  // null if the linear before has already added it (passes/fuse.h)
  args.residual_stride = c.in[kAddRmsNormResidual].row_stride;
  args.sum = f32(c.out[1]);
  args.sum_stride = c.out[1].row_stride;
  c.kernels->rms_norm(args, begin, end);
}

void run_layer_norm(const Call& c, int64_t begin, int64_t end, int32_t) {
  NormArgs args = norm_args(c, c.in[kLayerNormWeight]);
  args.bias = f32(c.in[kLayerNormBias]);
  c.kernels->layer_norm(args, begin, end);
}

void run_rotary_embedding(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->rotary_embedding(i32(c.in[0]), f32(c.in[kRotaryInvFreq]), c.in[kRotaryInvFreq].dims[1],
                              static_cast<float>(c.attrs[kRotaryScaling].f), f32(c.out[0]), c.out[0].row_stride, begin,
                              end);
}

// Positions inside the prefix: a token after the prefix has the position of the prefix's last token. `behind`:
// positions after the prefix, from 1; 0 inside it.
void run_prefix_positions(const Call& c, int64_t begin, int64_t end, int32_t) {
  int32_t* out = reinterpret_cast<int32_t*>(c.out[0].data);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t position = i32(c.in[0])[i], prefix = i32(c.in[kPrefixPositionsPrefix])[i],
                  last = (prefix < 1 ? 1 : prefix) - 1;
    const int64_t inside = position < last ? position : last;
    out[i] = static_cast<int32_t>(c.attrs[kPrefixBehind].i ? position - inside : inside);
  }
}

void run_rope(const Call& c, int64_t begin, int64_t end, int32_t) {
  RopeArgs args{};
  args.x = f32(c.in[0]);
  args.x_stride = c.in[0].row_stride;
  args.cos_sin = f32(c.in[kRopeCosSin]);
  args.cos_sin_stride = c.in[kRopeCosSin].row_stride;
  args.y = f32(c.out[0]);
  args.y_stride = c.out[0].row_stride;
  args.num_heads = c.in[0].dims[1];
  args.head_dim = c.in[0].dims[2];
  args.half = c.in[kRopeCosSin].dims[1] / 2;
  args.interleaved = static_cast<int32_t>(c.attrs[kRopeInterleaved].i);
  c.kernels->rope(args, begin, end);
}

BinaryArgs binary_args(const Call& c) {
  return BinaryArgs{f32(c.in[0]),  f32(c.in[1]),        c.in[0].row_stride,    c.in[1].row_stride,
                    f32(c.out[0]), c.out[0].row_stride, row_elements(c.out[0])};
}
UnaryArgs unary_args(const Call& c) {
  return UnaryArgs{f32(c.in[0]), c.in[0].row_stride, f32(c.out[0]), c.out[0].row_stride, row_elements(c.out[0])};
}

void run_gelu(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->gelu(unary_args(c), static_cast<int32_t>(c.attrs[kGeluApproximate].i), begin, end);
}

void run_clamped_swiglu(const Call& c, int64_t begin, int64_t end, int32_t) {
  const float alpha = static_cast<float>(c.attrs[kClampedAlpha].f),
              limit = static_cast<float>(c.attrs[kClampedLimit].f);
  c.kernels->clamped_swiglu(unary_args(c), alpha, limit, begin, end);
}

void run_scale_channels(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (c.in[kScaleChannelsWeight].dims[1] == 1)
    return c.kernels->scale_all(unary_args(c), *f32(c.in[kScaleChannelsWeight]), begin, end);
  BinaryArgs args = binary_args(c);
  args.b_stride = 0;
  c.kernels->scale_channels(args, begin, end);
}

void run_match_rms(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->match_rms(binary_args(c), static_cast<float>(c.attrs[kMatchFloor].f), begin, end);
}

void run_gaussian_topk(const Call& c, int64_t begin, int64_t end, int32_t) {
  c.kernels->gaussian_topk(unary_args(c), static_cast<float>(c.attrs[kTopkDeviations].f), begin, end);
}

void run_gather_rows(const Call& c, int64_t begin, int64_t end, int32_t) {
  const size_t bytes = static_cast<size_t>(row_elements(c.out[0])) * sizeof(float);
  for (int64_t i = begin; i < end; ++i) {
    memcpy(f32(c.out[0]) + i * c.out[0].row_stride, f32(c.in[0]) + i32(c.in[kGatherRowsRows])[i] * c.in[0].row_stride,
           bytes);
  }
}

constexpr Phase row_phase(void (*run)(const Call&, int64_t, int64_t, int32_t), uint32_t reads_rows) {
  return Phase{.split = SPLIT_ROWS, .items = rows, .run = run, .reads_rows = reads_rows, .writes_outputs = true};
}
constexpr Phase kRmsNorm = row_phase(run_rms_norm, operands(0)),
                kAddRmsNorm = row_phase(run_add_rms_norm, operands(0, kAddRmsNormResidual)),
                kLayerNorm = row_phase(run_layer_norm, operands(0)),
                kRotary = row_phase(run_rotary_embedding, operands(0)),
                kPlaces = row_phase(run_prefix_positions, operands(0, kPrefixPositionsPrefix)),
                kRope = row_phase(run_rope, operands(0, kRopeCosSin)), kGelu = row_phase(run_gelu, operands(0)),
                kClampedSwiglu = row_phase(run_clamped_swiglu, operands(0)),
                kScaleChannels = row_phase(run_scale_channels, operands(0)),
                kMatchRms = row_phase(run_match_rms, operands(0, kMatchRmsTarget)),
                kGaussianTopk = row_phase(run_gaussian_topk, operands(0)),
                kGather = {.split = SPLIT_ROWS,
                           .items = output_rows,
                           .run = run_gather_rows,
                           .reads_rows = operands(kGatherRowsRows),
                           .reads_all = operands(0),
                           .writes_outputs = true};

}  // namespace

Phases rms_norm_phases(const Call&) { return Phases{&kRmsNorm, 1}; }
Phases add_rms_norm_phases(const Call&) { return Phases{&kAddRmsNorm, 1}; }
Phases layer_norm_phases(const Call&) { return Phases{&kLayerNorm, 1}; }
Phases rotary_embedding_phases(const Call&) { return Phases{&kRotary, 1}; }
Phases prefix_positions_phases(const Call&) { return Phases{&kPlaces, 1}; }
Phases rope_phases(const Call&) { return Phases{&kRope, 1}; }
Phases gelu_phases(const Call&) { return Phases{&kGelu, 1}; }
Phases clamped_swiglu_phases(const Call&) { return Phases{&kClampedSwiglu, 1}; }
Phases scale_channels_phases(const Call&) { return Phases{&kScaleChannels, 1}; }
Phases match_rms_phases(const Call&) { return Phases{&kMatchRms, 1}; }
Phases gaussian_topk_phases(const Call&) { return Phases{&kGaussianTopk, 1}; }
Phases gather_rows_phases(const Call&) { return Phases{&kGather, 1}; }

#define PS_ELEMENTWISE(name, args, reads)                                                                         \
  Phases name##_phases(const Call&) {                                                                             \
    static constexpr Phase phase = row_phase(                                                                     \
        [](const Call& c, int64_t begin, int64_t end, int32_t) { c.kernels->name(args(c), begin, end); }, reads); \
    return Phases{&phase, 1};                                                                                     \
  }
#define PS_UNARY(id, name, ...) PS_ELEMENTWISE(name, unary_args, operands(0))
#define PS_BINARY(id, name, ...) PS_ELEMENTWISE(name, binary_args, operands(0, 1))
#define PS_SCALED(id, name, ...)                                                                \
  Phases name##_phases(const Call&) {                                                           \
    static constexpr Phase phase = row_phase(                                                   \
        [](const Call& c, int64_t begin, int64_t end, int32_t) {                                \
          c.kernels->name(unary_args(c), static_cast<float>(c.attrs[kScaledBy].f), begin, end); \
        },                                                                                      \
        1);                                                                                     \
    return Phases{&phase, 1};                                                                   \
  }
#include "base/elementwise_ops.inc"

}  // namespace ps
