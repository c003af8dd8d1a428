// The phases of route and combine: the choice of each token's experts, and the weighted sum of their results.
// Hot: runs in every step.
#include <math.h>

#include "base/memory.h"
#include "ops/ops.h"
#include "ops/top.h"

namespace ps {
namespace {

enum Score { SCORE_SOFTMAX, SCORE_SOFTMAX_OF_CHOSEN, SCORE_SIGMOID, NUM_SCORES };
constexpr const char* kScoreNames[NUM_SCORES] = {"softmax", "softmax_of_chosen", "sigmoid"};
enum GroupRule { GROUP_MAX, GROUP_BEST_TWO, NUM_GROUP_RULES };
constexpr const char* kGroupRuleNames[NUM_GROUP_RULES] = {"max", "best_two"};
constexpr int64_t kMaxExperts = 65536;
constexpr float kMinSum = 1e-20f;  // lower bound of a sum of weights that divides

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
int64_t rows(const Call& c) { return c.in[0].dims[0]; }

ps_status find_choice(const char* name, const char* const* choices, int32_t count, AttrValue* attr) {
  for (int32_t i = 0; i < count; ++i) {
    if (equal(attr->s, choices[i])) {
      attr->i = i;
      return PS_OK;
    }
  }
  return fail(PS_UNSUPPORTED, "%s: \"%.*s\" is not a rule that this version knows", name, PS_STR(attr->s));
}

ps_status expect_range(const char* name, int64_t found, int64_t min, int64_t max) {
  if (found >= min && found <= max) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "%s: expected %lld to %lld, got %lld", name, static_cast<long long>(min),
              static_cast<long long>(max), static_cast<long long>(found));
}

int64_t most_candidates(const Call& c) {
  const int64_t k = c.attrs[kRouteK].i, kept = c.attrs[kRouteKeptGroups].i;
  return k > kept ? k : kept;
}

// The scratch memory of a row: scores and choices [experts], the best of each group [groups], and the candidates.
struct RouteMemory {
  float *scores, *choice, *groups;
  Candidate* best;
};
RouteMemory memory_of(const Call& c, int32_t thread) {
  const int64_t experts = c.in[0].dims[1];
  float* const scores = reinterpret_cast<float*>(c.thread_scratch + thread * c.thread_scratch_bytes);
  float* const groups = scores + 2 * experts;
  return RouteMemory{scores, scores + experts, groups, reinterpret_cast<Candidate*>(groups + c.attrs[kRouteGroups].i)};
}

void score_row(const Call& c, const float* logits, int64_t experts, float* scores) {
  const Kernels& k = *c.kernels;
  if (c.attrs[kRouteScore].i == SCORE_SOFTMAX) {
    const float sum = k.exp_sum(logits, experts, k.max(logits, experts), 1.f, scores);
    for (int64_t i = 0; i < experts; ++i) scores[i] = scores[i] / sum;
  } else if (c.attrs[kRouteScore].i == SCORE_SIGMOID) {
    k.exp_sum(logits, experts, 0.f, -1.f, scores);
    for (int64_t i = 0; i < experts; ++i) scores[i] = 1.f / (1.f + scores[i]);
  } else {
    memcpy(scores, logits, static_cast<size_t>(experts) * sizeof(float));
  }
}

// Sets the scores of groups that are not selected to minus infinity.
void drop_groups(const Call& c, int64_t experts, const RouteMemory& m) {
  const int64_t groups = c.attrs[kRouteGroups].i, kept = c.attrs[kRouteKeptGroups].i, size = experts / groups;
  if (kept == groups) return;
  for (int64_t g = 0; g < groups; ++g) {
    Candidate best[2];
    const int64_t count = take_best(m.choice + g * size, size, c.attrs[kRouteGroupRule].i == GROUP_MAX ? 1 : 2, best);
    m.groups[g] = count == 2 ? best[0].value + best[1].value : best[0].value;
  }
  take_best(m.groups, groups, kept, m.best);
  for (int64_t g = 0; g < groups; ++g) {
    bool keep = false;
    for (int64_t i = 0; i < kept; ++i) keep |= m.best[i].id == g;
    for (int64_t i = 0; !keep && i < size; ++i) m.choice[g * size + i] = -INFINITY;
  }
}

void weigh(const Call& c, int64_t k, float* weights) {
  if (c.attrs[kRouteScore].i == SCORE_SOFTMAX_OF_CHOSEN) {
    const float sum = c.kernels->exp_sum(weights, k, c.kernels->max(weights, k), 1.f, weights);
    for (int64_t i = 0; i < k; ++i) weights[i] = weights[i] / sum;
  }
  float sum = 0.f;
  for (int64_t i = 0; i < k; ++i) sum = sum + weights[i];
  if (sum <= kMinSum) sum = kMinSum;
  const float factor = static_cast<float>(c.attrs[kRouteFactor].f);
  for (int64_t i = 0; i < k; ++i) {
    if (c.attrs[kRouteRenormalise].i) weights[i] = weights[i] / sum;
    weights[i] = weights[i] * factor;
  }
}

void run_route(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  const RouteMemory m = memory_of(c, thread);
  const int64_t experts = c.in[0].dims[1], k = c.attrs[kRouteK].i;
  const float* bias = f32(c.in[kRouteBias]);
  for (int64_t r = begin; r < end; ++r) {
    score_row(c, f32(c.in[0]) + r * c.in[0].row_stride, experts, m.scores);
    for (int64_t i = 0; i < experts; ++i) m.choice[i] = bias ? m.scores[i] + bias[i] : m.scores[i];
    drop_groups(c, experts, m);
    take_best(m.choice, experts, k, m.best);
    float* weights = f32(c.out[0]) + r * c.out[0].row_stride;
    int32_t* ids = reinterpret_cast<int32_t*>(c.out[1].data) + r * c.out[1].row_stride;
    for (int64_t i = 0; i < k; ++i) {
      ids[i] = m.best[i].id;
      weights[i] = m.scores[m.best[i].id];
    }
    weigh(c, k, weights);
  }
}

// Slots in ascending order: a token's sum does not depend on other tokens.
void run_combine(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t slots = c.in[0].dims[1], cols = c.in[0].dims[2];
  for (int64_t r = begin; r < end; ++r) {
    const float *x = f32(c.in[0]) + r * c.in[0].row_stride,
                *weights = f32(c.in[kCombineWeights]) + r * c.in[kCombineWeights].row_stride;
    float* y = f32(c.out[0]) + r * c.out[0].row_stride;
    for (int64_t i = 0; i < cols; ++i) y[i] = weights[0] * x[i];
    for (int64_t s = 1; s < slots; ++s) {
      for (int64_t i = 0; i < cols; ++i) y[i] = y[i] + weights[s] * x[s * cols + i];
    }
  }
}

constexpr Phase kRoute = {
    .split = SPLIT_ROWS, .items = rows, .run = run_route, .reads_rows = operands(0), .writes_outputs = true};
constexpr Phase kCombine = {.split = SPLIT_ROWS,
                            .items = rows,
                            .run = run_combine,
                            .reads_rows = operands(0, kCombineWeights),
                            .writes_outputs = true};

}  // namespace

ps_status infer_route(const Spec* in, AttrValue* attrs, Spec* out) {
  const Spec& x = in[0];
  if (x.dtype != PS_F32 || x.rank != 2)
    return fail(PS_INVALID_ARGUMENT, "logits: expected f32 with 2 dims, got %s", describe(x).text);
  const int64_t experts = x.dims[1].offset, groups = attrs[kRouteGroups].i;
  PS_TRY(expect_range("logits: number of experts", experts, 1, kMaxExperts));
  PS_TRY(find_choice("score", kScoreNames, NUM_SCORES, &attrs[kRouteScore]));
  PS_TRY(find_choice("group_rule", kGroupRuleNames, NUM_GROUP_RULES, &attrs[kRouteGroupRule]));
  PS_TRY(expect_range("groups", groups, 1, experts));
  if (experts % groups) {
    return fail(PS_INVALID_ARGUMENT, "groups: expected a divisor of the %lld experts, got %lld",
                static_cast<long long>(experts), static_cast<long long>(groups));
  }
  PS_TRY(expect_range("kept_groups", attrs[kRouteKeptGroups].i, 1, groups));
  PS_TRY(expect_range("k", attrs[kRouteK].i, 1, attrs[kRouteKeptGroups].i * (experts / groups)));
  const Spec& bias = in[kRouteBias];
  if (bias.kind != OPERAND_NONE &&
      (bias.layout != PS_ROWS_F32 || bias.dims[0].offset != 1 || bias.dims[1].offset != experts)) {
    return fail(PS_INVALID_ARGUMENT, "bias: expected a rows_f32 weight [1, %lld]", static_cast<long long>(experts));
  }
  const Dim k = constant(attrs[kRouteK].i);
  out[0] = Spec{OPERAND_VALUE, PS_F32, 2, {x.dims[0], k}, 0, -1, constant(0)};
  out[1] = Spec{OPERAND_VALUE, PS_I32, 2, {x.dims[0], k}, 0, -1, constant(experts)};
  return PS_OK;
}

Phases route_phases(const Call&) { return Phases{&kRoute, 1}; }
Phases combine_phases(const Call&) { return Phases{&kCombine, 1}; }

ps_status route_scratch(const Call& c, Scratch* out) {
  const int64_t floats = 2 * c.in[0].dims[1] + c.attrs[kRouteGroups].i;  // each factor is bounded
  out->per_thread = round_up(floats * 4 + most_candidates(c) * static_cast<int64_t>(sizeof(Candidate)), 64);
  return PS_OK;
}

}  // namespace ps
