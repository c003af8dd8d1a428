// Ids of the ops in the table, and the positions of their arguments and attributes.
#ifndef PENSTOCK_OPS_OP_IDS_H
#define PENSTOCK_OPS_OP_IDS_H

#include <stdint.h>

#include "base/build.h"

namespace ps {

// Rows of the table.  Node::op is one of these, or at least NUM_OPS for a custom op, in the order of loading.
enum OpId : int32_t {
#define PS_OP(id, name, ...) OP_##id,
#include "ops/op_list.inc"
  NUM_OPS
};

constexpr const char* kSchemas[NUM_OPS] = {
#define PS_OP(id, name, version, schema, ...) schema,
#include "ops/op_list.inc"
};

constexpr const char* kOpNames[NUM_OPS] = {
#define PS_OP(id, name, ...) #name,
#include "ops/op_list.inc"
};

constexpr bool same_text(const char* a, const char* b) {
  for (; *a && *a == *b; ++a) ++b;
  return *a == *b;
}

int32_t not_in_the_schema();  // undefined: a wrong name below does not compile

// The index of `declaration` ("int window") among an op's attributes, or among its arguments; -1: not found.
constexpr int32_t find_in_schema(OpId op, bool attribute, const char* declaration) {
  const char* p = kSchemas[op] + 1;  // after "("
  bool attributes = false;
  for (int32_t index = 0; *p && *p != ')'; ++index) {
    if (*p == '*') p += 3, attributes = true, index = 0;  // "*, "
    int32_t n = 0;
    while (declaration[n] && p[n] == declaration[n]) ++n;
    if (attributes == attribute && !declaration[n] && (p[n] == ',' || p[n] == ')')) return index;
    while (*p && *p != ',' && *p != ')') p += *p == '(' ? 4 : 1;  // "(a!)"
    if (*p == ',') p += 2;
  }
  return -1;
}
constexpr int32_t attr_at(OpId op, const char* declaration) {
  const int32_t index = find_in_schema(op, true, declaration);
  return index < 0 ? not_in_the_schema() : index;
}
constexpr int32_t argument_at(OpId op, const char* declaration) {
  const int32_t index = find_in_schema(op, false, declaration);
  return index < 0 ? not_in_the_schema() : index;
}

// A build for bundles without ranks omits the ops of ranks, which are those with the attribute `rank`.
constexpr bool is_of_ranks(OpId op) { return find_in_schema(op, true, "int rank") >= 0; }
constexpr bool builds_ranks() {
  for (int32_t i = 0; i < NUM_OPS; ++i) {
    if (is_of_ranks(static_cast<OpId>(i)) && builds_op(kOpNames[i])) return true;
  }
  return false;
}
constexpr bool kBuildsRanks = builds_ranks();

// Attributes: indices into the AttrValue of a call.
constexpr int32_t kEmbeddingDim = attr_at(OP_EMBEDDING, "int dim");
constexpr int32_t kLinearOutFeatures = attr_at(OP_LINEAR, "int out_features");
constexpr int32_t kLinearScheme = attr_at(OP_LINEAR, "str scheme");
constexpr int32_t kNormEps = attr_at(OP_RMS_NORM, "float eps");
static_assert(kNormEps == attr_at(OP_ADD_RMS_NORM, "float eps") && kNormEps == attr_at(OP_LAYER_NORM, "float eps"), "");
constexpr int32_t kRotaryScaling = attr_at(OP_ROTARY_EMBEDDING, "float scaling");
constexpr int32_t kRopeInterleaved = attr_at(OP_ROPE, "bool interleaved");
constexpr int32_t kKvAppendGroup = attr_at(OP_KV_APPEND, "int group");
constexpr int32_t kAttentionScale = attr_at(OP_ATTENTION, "float scale");
constexpr int32_t kAttentionGroup = attr_at(OP_ATTENTION, "int group");
constexpr int32_t kAttentionCausal = attr_at(OP_ATTENTION, "bool causal");
constexpr int32_t kAttentionWindow = attr_at(OP_ATTENTION, "int window");
constexpr int32_t kAttentionSoftcap = attr_at(OP_ATTENTION, "float softcap");
constexpr int32_t kScaledBy = attr_at(OP_SCALE, "float factor");
static_assert(kScaledBy == attr_at(OP_SOFTCAP, "float cap") && kScaledBy == attr_at(OP_CLAMP, "float limit"), "");
constexpr int32_t kShortConvGroup = attr_at(OP_SHORT_CONV, "int group");
constexpr int32_t kShortConvWindow = attr_at(OP_SHORT_CONV, "int window");
constexpr int32_t kGeluApproximate = attr_at(OP_GELU, "str approximate");
constexpr int32_t kAllGatherStarts = attr_at(OP_ALL_GATHER, "str starts");
constexpr int32_t kAllGatherRank = attr_at(OP_ALL_GATHER, "int rank");
constexpr int32_t kRoundedStarts = attr_at(OP_ALL_GATHER_ROUNDED, "str starts");
constexpr int32_t kRoundedRank = attr_at(OP_ALL_GATHER_ROUNDED, "int rank");
constexpr int32_t kRoundedBits = attr_at(OP_ALL_GATHER_ROUNDED, "int bits");
static_assert(kRoundedStarts == kAllGatherStarts && kRoundedRank == kAllGatherRank, "");
constexpr int32_t kShardedDim = attr_at(OP_SHARDED_EMBEDDING, "int dim");
constexpr int32_t kShardedStarts = attr_at(OP_SHARDED_EMBEDDING, "str starts");
constexpr int32_t kShardedRank = attr_at(OP_SHARDED_EMBEDDING, "int rank");
constexpr int32_t kBroadcastRoot = attr_at(OP_BROADCAST, "int root");
constexpr int32_t kSendTarget = attr_at(OP_SEND, "int target");
constexpr int32_t kRecvWidth = attr_at(OP_RECV, "int width");
constexpr int32_t kRecvSource = attr_at(OP_RECV, "int source");
constexpr int32_t world_at(OpId op) { return attr_at(op, "int world"); }
constexpr int32_t rank_at(OpId op) { return attr_at(op, "int rank"); }
constexpr int32_t kTopkK = attr_at(OP_TOPK, "int k");
constexpr int32_t kRouteK = attr_at(OP_ROUTE, "int k");
constexpr int32_t kRouteScore = attr_at(OP_ROUTE, "str score");
constexpr int32_t kRouteRenormalise = attr_at(OP_ROUTE, "bool renormalise");
constexpr int32_t kRouteFactor = attr_at(OP_ROUTE, "float factor");
constexpr int32_t kRouteGroups = attr_at(OP_ROUTE, "int groups");
constexpr int32_t kRouteKeptGroups = attr_at(OP_ROUTE, "int kept_groups");
constexpr int32_t kRouteGroupRule = attr_at(OP_ROUTE, "str group_rule");
constexpr int32_t kClampedAlpha = attr_at(OP_CLAMPED_SWIGLU, "float alpha");
constexpr int32_t kClampedLimit = attr_at(OP_CLAMPED_SWIGLU, "float limit");
constexpr int32_t kMatchFloor = attr_at(OP_MATCH_RMS, "float floor");
constexpr int32_t kTopkDeviations = attr_at(OP_GAUSSIAN_TOPK, "float deviations");
constexpr int32_t kExpertNum = attr_at(OP_EXPERT_LINEAR, "int num_experts");
constexpr int32_t kExpertOutFeatures = attr_at(OP_EXPERT_LINEAR, "int out_features");
constexpr int32_t kExpertScheme = attr_at(OP_EXPERT_LINEAR, "str scheme");
constexpr int32_t kGatedDeltaGroup = attr_at(OP_GATED_DELTA, "int group");
constexpr int32_t kGatedDeltaKeyHeads = attr_at(OP_GATED_DELTA, "int key_heads");
constexpr int32_t kGatedDeltaHeadDim = attr_at(OP_GATED_DELTA, "int head_dim");
constexpr int32_t kSsmScanGroup = attr_at(OP_SSM_SCAN, "int group");
constexpr int32_t kSsmScanGroups = attr_at(OP_SSM_SCAN, "int groups");
constexpr int32_t kSsmScanBlocks = attr_at(OP_SSM_SCAN, "int blocks");
constexpr int32_t kSsmScanStateDim = attr_at(OP_SSM_SCAN, "int state_dim");
constexpr int32_t kSsmScanDtMin = attr_at(OP_SSM_SCAN, "float dt_min");
constexpr int32_t kSsmScanDtMax = attr_at(OP_SSM_SCAN, "float dt_max");
// head_linear is expert_linear with heads as experts; each has its own row of every token.
static_assert(kExpertNum == attr_at(OP_HEAD_LINEAR, "int num_heads") &&
                  kExpertOutFeatures == attr_at(OP_HEAD_LINEAR, "int out_features") &&
                  kExpertScheme == attr_at(OP_HEAD_LINEAR, "str scheme"),
              "");

// Arguments: indices into the operands of a call. request_starts and page_tables follow positions.  Arguments that are
// not listed are the op's first, 0.
constexpr int32_t kEmbeddingWeight = argument_at(OP_EMBEDDING, "Weight weight");
constexpr int32_t kLinearWeight = argument_at(OP_LINEAR, "Weight weight");
constexpr int32_t kLinearBias = argument_at(OP_LINEAR, "Weight? bias");
constexpr int32_t kRmsNormWeight = argument_at(OP_RMS_NORM, "Weight weight");
constexpr int32_t kAddRmsNormResidual = argument_at(OP_ADD_RMS_NORM, "Tensor residual");
constexpr int32_t kAddRmsNormWeight = argument_at(OP_ADD_RMS_NORM, "Weight weight");
constexpr int32_t kLayerNormWeight = argument_at(OP_LAYER_NORM, "Weight weight");
constexpr int32_t kLayerNormBias = argument_at(OP_LAYER_NORM, "Weight? bias");
constexpr int32_t kRotaryInvFreq = argument_at(OP_ROTARY_EMBEDDING, "Weight inv_freq");
constexpr int32_t kRopeCosSin = argument_at(OP_ROPE, "Tensor cos_sin");
constexpr int32_t kGatherRowsRows = argument_at(OP_GATHER_ROWS, "Tensor rows");
constexpr int32_t kShardedIds = argument_at(OP_SHARDED_EMBEDDING, "Tensor ids");
constexpr int32_t kShardedWeight = argument_at(OP_SHARDED_EMBEDDING, "Weight weight");
constexpr int32_t kRouteBias = argument_at(OP_ROUTE, "Weight? bias");
constexpr int32_t kExpertWeight = argument_at(OP_EXPERT_LINEAR, "Weight weight");
constexpr int32_t kExpertIds = argument_at(OP_EXPERT_LINEAR, "Tensor ids");     // absent in head_linear
constexpr int32_t kExpertBias = argument_at(OP_EXPERT_LINEAR, "Weight? bias");  // likewise
static_assert(kExpertWeight == argument_at(OP_HEAD_LINEAR, "Weight weight"), "");
constexpr int32_t kCombineWeights = argument_at(OP_COMBINE, "Tensor weights");
constexpr int32_t kScaleChannelsWeight = argument_at(OP_SCALE_CHANNELS, "Weight weight");
constexpr int32_t kMatchRmsTarget = argument_at(OP_MATCH_RMS, "Tensor target");
constexpr int32_t kPrefixPositionsPrefix = argument_at(OP_PREFIX_POSITIONS, "Tensor prefix");
// The weight of phases that share the tiles of a weight between threads (program/bind.cpp).
constexpr int32_t kTiledWeight = kLinearWeight;
static_assert(kTiledWeight == kExpertWeight, "");

constexpr int32_t kKvAppendK = argument_at(OP_KV_APPEND, "Tensor k");
constexpr int32_t kKvAppendV = argument_at(OP_KV_APPEND, "Tensor v");
constexpr int32_t kKvAppendState = argument_at(OP_KV_APPEND, "State(a!) state");
constexpr int32_t kKvAppendPositions = argument_at(OP_KV_APPEND, "Tensor positions");
constexpr int32_t kKvAppendPageTables = argument_at(OP_KV_APPEND, "Tensor page_tables");
constexpr int32_t kAttentionQ = argument_at(OP_ATTENTION, "Tensor q");
constexpr int32_t kAttentionState = argument_at(OP_ATTENTION, "State state");
constexpr int32_t kAttentionPositions = argument_at(OP_ATTENTION, "Tensor positions");
constexpr int32_t kAttentionPageTables = argument_at(OP_ATTENTION, "Tensor page_tables");
constexpr int32_t kAttentionAlibi = argument_at(OP_ATTENTION, "Weight? alibi");
constexpr int32_t kAttentionSinks = argument_at(OP_SINK_ATTENTION, "Weight sinks");  // absent in the other ops
static_assert(kAttentionAlibi == argument_at(OP_SINK_ATTENTION, "Weight? alibi"), "");
// context_attention has the arguments of attention first.
static_assert(kAttentionState == argument_at(OP_CONTEXT_ATTENTION, "State state") &&
                  kAttentionPositions == argument_at(OP_CONTEXT_ATTENTION, "Tensor positions") &&
                  kAttentionScale == attr_at(OP_CONTEXT_ATTENTION, "float scale") &&
                  kAttentionGroup == attr_at(OP_CONTEXT_ATTENTION, "int group") &&
                  kAttentionCausal == attr_at(OP_CONTEXT_ATTENTION, "bool causal") &&
                  kAttentionWindow == attr_at(OP_CONTEXT_ATTENTION, "int window") &&
                  kAttentionSoftcap == attr_at(OP_CONTEXT_ATTENTION, "float softcap"),
              "");
// So does sink_attention, with one more argument.
static_assert(kAttentionState == argument_at(OP_SINK_ATTENTION, "State state") &&
                  kAttentionPositions == argument_at(OP_SINK_ATTENTION, "Tensor positions") &&
                  kAttentionScale == attr_at(OP_SINK_ATTENTION, "float scale") &&
                  kAttentionGroup == attr_at(OP_SINK_ATTENTION, "int group") &&
                  kAttentionCausal == attr_at(OP_SINK_ATTENTION, "bool causal") &&
                  kAttentionWindow == attr_at(OP_SINK_ATTENTION, "int window") &&
                  kAttentionSoftcap == attr_at(OP_SINK_ATTENTION, "float softcap"),
              "");
// So does latent_attention.
constexpr int32_t kLatentAttentionRope = argument_at(OP_LATENT_ATTENTION, "Tensor q_rope");
static_assert(kAttentionState == argument_at(OP_LATENT_ATTENTION, "State state") &&
                  kAttentionPositions == argument_at(OP_LATENT_ATTENTION, "Tensor positions") &&
                  kAttentionScale == attr_at(OP_LATENT_ATTENTION, "float scale") &&
                  kAttentionGroup == attr_at(OP_LATENT_ATTENTION, "int group") &&
                  kAttentionCausal == attr_at(OP_LATENT_ATTENTION, "bool causal") &&
                  kAttentionWindow == attr_at(OP_LATENT_ATTENTION, "int window") &&
                  kAttentionSoftcap == attr_at(OP_LATENT_ATTENTION, "float softcap"),
              "");
// So does relative_attention, whose sinks are optional.
constexpr int32_t kRelativeAttentionBias =
    argument_at(OP_RELATIVE_ATTENTION, "Weight? bias");  // absent in the other ops
constexpr int32_t kRelativeAttentionPrefix = argument_at(OP_RELATIVE_ATTENTION, "Tensor? prefix");  // likewise
constexpr int32_t kRelativeAttentionKeys = attr_at(OP_RELATIVE_ATTENTION, "str keys");
static_assert(kAttentionAlibi == argument_at(OP_RELATIVE_ATTENTION, "Weight? alibi") &&
                  kAttentionSinks == argument_at(OP_RELATIVE_ATTENTION, "Weight? sinks") &&
                  kAttentionState == argument_at(OP_RELATIVE_ATTENTION, "State state") &&
                  kAttentionPositions == argument_at(OP_RELATIVE_ATTENTION, "Tensor positions") &&
                  kAttentionScale == attr_at(OP_RELATIVE_ATTENTION, "float scale") &&
                  kAttentionGroup == attr_at(OP_RELATIVE_ATTENTION, "int group") &&
                  kAttentionCausal == attr_at(OP_RELATIVE_ATTENTION, "bool causal") &&
                  kAttentionWindow == attr_at(OP_RELATIVE_ATTENTION, "int window") &&
                  kAttentionSoftcap == attr_at(OP_RELATIVE_ATTENTION, "float softcap"),
              "");
// So does disentangled_attention, with tensors in place of alibi.
constexpr int32_t kDisentangledC2p = argument_at(OP_DISENTANGLED_ATTENTION, "Tensor? c2p");
constexpr int32_t kDisentangledP2c = argument_at(OP_DISENTANGLED_ATTENTION, "Tensor? p2c");
constexpr int32_t kDisentangledBuckets = argument_at(OP_DISENTANGLED_ATTENTION, "Weight buckets");
static_assert(kAttentionState == argument_at(OP_DISENTANGLED_ATTENTION, "State state") &&
                  kAttentionPositions == argument_at(OP_DISENTANGLED_ATTENTION, "Tensor positions") &&
                  kAttentionScale == attr_at(OP_DISENTANGLED_ATTENTION, "float scale") &&
                  kAttentionGroup == attr_at(OP_DISENTANGLED_ATTENTION, "int group") &&
                  kAttentionCausal == attr_at(OP_DISENTANGLED_ATTENTION, "bool causal") &&
                  kAttentionWindow == attr_at(OP_DISENTANGLED_ATTENTION, "int window") &&
                  kAttentionSoftcap == attr_at(OP_DISENTANGLED_ATTENTION, "float softcap"),
              "");
constexpr bool is_attention(int32_t op) {
  return op == OP_ATTENTION || op == OP_CONTEXT_ATTENTION || op == OP_SINK_ATTENTION || op == OP_LATENT_ATTENTION ||
         op == OP_RELATIVE_ATTENTION || op == OP_DISENTANGLED_ATTENTION;
}
constexpr bool lists_attention() {  // whether kAttentionOps has exactly the ops of is_attention
  int32_t listed = 0;
  for (int32_t i = 0; i < NUM_OPS; ++i) {
    bool found = false;
    for (const char* name : kAttentionOps) found = found || same_text(name, kOpNames[i]);
    if (found != is_attention(i)) return false;
    listed += found;
  }
  return listed == static_cast<int32_t>(sizeof(kAttentionOps) / sizeof(*kAttentionOps));
}
static_assert(lists_attention(), "");
static_assert(kKvAppendState == argument_at(OP_LATENT_APPEND, "State(a!) state") &&
                  kKvAppendPositions == argument_at(OP_LATENT_APPEND, "Tensor positions") &&
                  kKvAppendGroup == attr_at(OP_LATENT_APPEND, "int group"),
              "");
constexpr int32_t kLatentAppendLatent = argument_at(OP_LATENT_APPEND, "Tensor latent");
constexpr int32_t kLatentAppendRope = argument_at(OP_LATENT_APPEND, "Tensor rope");
constexpr bool appends_to_pages(int32_t op) { return op == OP_KV_APPEND || op == OP_LATENT_APPEND; }
// short_conv has its arguments about pages where attention has them.
static_assert(kAttentionState == argument_at(OP_SHORT_CONV, "State state") &&
                  kAttentionPositions == argument_at(OP_SHORT_CONV, "Tensor positions"),
              "");
constexpr int32_t kShortConvGate = argument_at(OP_SHORT_CONV, "Tensor gate");
constexpr int32_t kShortConvWeight = argument_at(OP_SHORT_CONV, "Weight weight");
constexpr int32_t kShortConvBias = argument_at(OP_SHORT_CONV, "Weight? bias");
constexpr bool reads_pages(int32_t op) { return is_attention(op) || op == OP_SHORT_CONV; }
// A recurrent state: a token reads only the state before it, so a page group keeps two positions.
constexpr int32_t kStateWindow = 2;
constexpr int32_t kGatedDeltaX = argument_at(OP_GATED_DELTA, "Tensor x");
constexpr int32_t kGatedDeltaA = argument_at(OP_GATED_DELTA, "Tensor a");
constexpr int32_t kGatedDeltaB = argument_at(OP_GATED_DELTA, "Tensor b");
constexpr int32_t kGatedDeltaState = argument_at(OP_GATED_DELTA, "State(a!) state");
constexpr int32_t kGatedDeltaPositions = argument_at(OP_GATED_DELTA, "Tensor positions");
constexpr int32_t kGatedDeltaPageTables = argument_at(OP_GATED_DELTA, "Tensor page_tables");
constexpr int32_t kGatedDeltaConv = argument_at(OP_GATED_DELTA, "Weight conv");
constexpr int32_t kGatedDeltaALog = argument_at(OP_GATED_DELTA, "Weight a_log");
constexpr int32_t kGatedDeltaDtBias = argument_at(OP_GATED_DELTA, "Weight dt_bias");
constexpr int32_t kSsmScanX = argument_at(OP_SSM_SCAN, "Tensor x");
constexpr int32_t kSsmScanDt = argument_at(OP_SSM_SCAN, "Tensor dt");
constexpr int32_t kSsmScanState = argument_at(OP_SSM_SCAN, "State(a!) state");
constexpr int32_t kSsmScanPositions = argument_at(OP_SSM_SCAN, "Tensor positions");
constexpr int32_t kSsmScanPageTables = argument_at(OP_SSM_SCAN, "Tensor page_tables");
constexpr int32_t kSsmScanConv = argument_at(OP_SSM_SCAN, "Weight conv");
constexpr int32_t kSsmScanConvBias = argument_at(OP_SSM_SCAN, "Weight? conv_bias");
constexpr int32_t kSsmScanALog = argument_at(OP_SSM_SCAN, "Weight a_log");
constexpr int32_t kSsmScanDtBias = argument_at(OP_SSM_SCAN, "Weight dt_bias");
constexpr int32_t kSsmScanD = argument_at(OP_SSM_SCAN, "Weight d");
constexpr int32_t kPrefixState = argument_at(OP_PREFIX_LENGTHS, "State(a!) state");
constexpr int32_t kPrefixPositions = argument_at(OP_PREFIX_LENGTHS, "Tensor positions");
constexpr int32_t kPrefixPageTables = argument_at(OP_PREFIX_LENGTHS, "Tensor page_tables");
constexpr int32_t kPrefixGroup = attr_at(OP_PREFIX_LENGTHS, "int group");
constexpr int32_t kPrefixToken = attr_at(OP_PREFIX_LENGTHS, "int token");
constexpr int32_t kPrefixBehind = attr_at(OP_PREFIX_POSITIONS, "bool behind");
constexpr int32_t kPrefixElements = 16;  // of the state; only the first and the last are used
constexpr bool is_gated_delta(int32_t op) { return op == OP_GATED_DELTA || op == OP_GATED_DELTA_TILED; }
constexpr bool keeps_state(int32_t op) { return is_gated_delta(op) || op == OP_SSM_SCAN || op == OP_PREFIX_LENGTHS; }

}  // namespace ps

#endif
