// The table of kernels that each instruction level provides.
//
// A kernel computes a range of independent items (rows, tiles, tokens x heads) and never communicates with another
// thread: the op layer (core/src/ops) splits the range, so results do not depend on the number of threads.  Every
// kernel obeys the numerics contract of docs/explanation/numerics.md.  The kernel translation units, which are compiled
// for wide instructions, include this header.  It therefore includes only <stdint.h> and lists of names and defines no
// inline function: the linker might otherwise keep a copy with instructions that the machine lacks.
#ifndef PENSTOCK_BASE_KERNELS_H
#define PENSTOCK_BASE_KERNELS_H

#include <stdint.h>

#include "base/window_kernels.h"

namespace ps {

// A weight for kernels: packed bytes in a ps_layout, logical rows x cols.
struct WeightView {
  const uint8_t* data;
  int32_t layout;
  int64_t rows, cols;
};

// Activations rounded to integers, one scale per token: x = q * scale with one int8 row a token (planes 1), or x = (255
// * high + low) * scale with two, high before low (planes 2).  Columns are padded with zero to `stride`, a multiple of
// 64.  Rows form blocks of a size that suits the level's registers; a block of `rows` int8 rows that begins at row f is
// q [stride / 64][rows][64] at f * stride: no two rows share a cache line.
struct QuantizedRows {
  int8_t* q;
  float* scale;         // [m]
  int32_t* sums;        // [m * planes]: of each int8 row
  int16_t* group_sums;  // per block [stride / 64][rows][2]: of each 32 columns; only for 4-bit weights
  int64_t stride;
  int32_t planes;
};

struct LinearArgs {
  WeightView weight;  // [n, k]
  const float* bias;  // [n] or null
  const float* x;     // [m, k], row stride x_stride
  int64_t x_stride;
  QuantizedRows qx;  // for the integer schemes; bf16 uses only q
  float* y;          // [m, n] or [m, n / 2], row stride y_stride
  int64_t y_stride;
  int32_t m;
  int32_t gated;          // the weight is [gate; up], n a multiple of 32: y[j] = silu(gate[j]) * up[j], half as wide
  const float* residual;  // shaped like y, added last; or null
  int64_t residual_stride;
  uint8_t* panel;          // linear_panel_bytes of the calling thread
  int32_t short_prefetch;  // Kernels::short_prefetch
};

enum LinearScheme {
  LINEAR_F32,
  LINEAR_F16,
  LINEAR_BF16,
  LINEAR_W8A16,
  LINEAR_W8A8,
  LINEAR_W4A16,
  LINEAR_W4A8,
  LINEAR_W8A8_H32,  // activations are rotated before they are rounded
  LINEAR_W4A8_H32,
#define PS_BLOCKS(id, ...) LINEAR_##id,
#include "base/block_schemes.inc"
  NUM_LINEAR_SCHEMES
};

// Activations of one token for GGUF's block types: 32 columns rounded to int8 with their own scale, x = q * scale.
struct RoundedGroup {
  float scale, scaled_sum;  // scaled_sum: scale * sum, rounded
  int32_t sum;              // of q
  int16_t half_sums[2];     // of its first 16 and of its last 16
  int8_t q[32];
};

// One KV state (the pages of one layer).  Page layout, repeated for each KV head:
//   PS_KV_F32: K [head_dim][32 tokens], V [32 tokens][head_dim]
//   PS_KV_BF16: K [head_dim / 2, rounded up][32][2], V [16][head_dim][2]: pairs of dimensions, pairs of tokens
//   PS_KV_INT8: K [head_dim][32] i8, K scales [32] f32, V [32][head_dim] i8, V scales [32] f32
//   PS_KV_INT4: K [head_dim / 2, rounded up][32], K scales [32] f32, V [32][head_dim / 2, rounded up], V scales [32]
//     f32: a byte has two dimensions, the first in its low nibble; both are rotated (rotate_head) and rounded to odd
//     integers of -15 to 15
// If latent_dim is above 0, a page has K and no V: the first latent_dim dimensions of a key are the value.
struct KvView {
  uint8_t* data;
  int32_t layout;  // ps_kv_layout
  int32_t num_kv_heads, head_dim;
  int64_t page_bytes;
  int32_t latent_dim;
};

struct RaggedView {
  const int32_t* positions;       // [num_tokens]
  const int32_t* request_starts;  // [num_requests + 1]
  const int32_t* token_request;   // [num_tokens]: the request of each token
  const int32_t* page_table;      // [num_requests][page_table_width], of the op's page group
  int32_t num_tokens, num_requests, page_table_width;
};

struct KvAppendArgs {
  const float *k, *v;  // [t, num_kv_heads * head_dim]
  int64_t k_stride, v_stride;
  KvView kv;
  RaggedView batch;
};

struct LatentAppendArgs {  // each row is latent [t, latent_dim], then rope [t, head_dim - latent_dim]
  const float *latent, *rope;
  int64_t latent_stride, rope_stride;
  KvView kv;
  RaggedView batch;
};

constexpr int32_t kPartitionPages = 8;  // pages of a partition, at fixed boundaries: docs/explanation/numerics.md
constexpr int32_t kMaxHeadDim = 1024;

// The keys of a request that a query sees: all that `causal` and `window` let it see, those of the prefix, those from
// the end of the prefix to its own position, or those of the prefix and all up to its own position.
enum KeyRange { KEYS_ALL, KEYS_PREFIX, KEYS_REST, KEYS_SPAN };

struct AttentionArgs {
  const float* q;  // [t, num_heads * head_dim]
  int64_t q_stride;
  float* out;  // [t, num_heads * head_dim]
  int64_t out_stride;
  KvView kv;
  RaggedView batch;
  int32_t num_heads;
  float scale;
  float softcap;           // 0: off
  const float* alibi;      // [num_heads] slopes or null
  int32_t causal, window;  // window 0: unlimited; else keys nearer than window
  // Partial results of partitions, for attention_merge: [t, num_heads, num_parts, 16 + head_dim to 16], starting at
  // token first_token.  Null: `attention` merges them itself.
  float* partials;
  int32_t num_parts;
  int64_t first_token;
  // Above 1: partitions are assigned to ranks round-robin, and a rank writes num_parts results, one per num_ranks
  // partitions.  A page of another rank r is -2 - r in the page table. attention_merge reads the partials of all ranks:
  // rank_partials[rank].
  int32_t rank, num_ranks;
  const void* const* rank_partials;
  const float* sinks;  // [num_heads] or null: a score of each head without a value
  // Latent attention: q and out are [t, num_heads * latent_dim]; this is the rest of each head's query, [t, num_heads *
  // (head_dim - latent_dim)].
  const float* q_rope;
  int64_t q_rope_stride;
  const float* bias;  // [num_heads, 2 * bias_reach + 1] or null: by key position - query position, clamped to
                      // -bias_reach...bias_reach
  int64_t bias_reach;
  int64_t keys;           // KeyRange
  const int32_t* prefix;  // [t] the length of the request's prefix, unless keys is KEYS_ALL
  // Disentangled attention only; otherwise buckets is null.  Each request is whole in the step.  Before the scale, row
  // i of c2p and row j of p2c, both [t, num_heads, num_buckets] or null, add their column for the distance j - i.
  const float *c2p, *p2c;
  int64_t c2p_stride, p2c_stride, num_buckets;
  const float* buckets;  // [2 * bucket_reach + 1] column by distance, clamped to -bucket_reach...bucket_reach
  int64_t bucket_reach;
};

struct ShortConvArgs {
  const float* gate;  // [t, 2 * num_kv_heads * head_dim]
  int64_t gate_stride;
  float* out;  // as gate
  int64_t out_stride;
  KvView kv;  // keys are the lower half of the channels, values the upper half
  RaggedView batch;
  const float* weight;  // [channels, window]: the last column multiplies the token itself
  const float* bias;    // [channels] or null
  int32_t window;
};

constexpr int32_t kMaxDeltaDim = 512,
                  kMaxDeltaValues = 4096;  // limit per key head: of its width, and of the channels of its value heads

// The numbers of a key head in a recurrent state: a matrix [head_dim, value_dim] for each value head, the last window -
// 1 inputs of the convolution, oldest first, padding, and last the number of tokens that the state has seen.  For
// ssm_scan a block of heads counts as a key head: head_dim is state_dim, and the values are those of its heads.
constexpr int64_t state_elements(int64_t head_dim, int64_t values, int64_t window) {
  return (head_dim * values + (window - 1) * (2 * head_dim + values) + 1 + 15) / 16 * 16;
}

struct GatedDeltaArgs {
  const float *x, *a, *b;  // [t, channels], [t, value heads] twice
  int64_t x_stride, a_stride, b_stride;
  float* out;  // [t, value heads * value_dim]
  int64_t out_stride;
  uint8_t* state;
  int64_t page_bytes;
  RaggedView batch;
  const float* conv;             // [channels, window]: the last column multiplies the token itself
  const float *a_log, *dt_bias;  // [value heads]
  int32_t key_heads, heads_per_key, head_dim, value_dim, window;
  int32_t key_step, value_step;  // value head j of key head k has row k * key_step + j * value_step of out
};

struct SsmScanArgs {
  const float *x, *dt;  // [t, channels]: x of all heads, then b and c of each group; [t, heads]
  int64_t x_stride, dt_stride;
  float* out;  // [t, heads * head_dim]
  int64_t out_stride;
  uint8_t* state;
  int64_t page_bytes;
  RaggedView batch;
  const float *conv, *conv_bias;     // [channels, window]: the last column multiplies the token itself; [channels] or
                                     // null
  const float *a_log, *dt_bias, *d;  // [heads]
  int32_t heads, blocks, groups, state_dim, head_dim, window;  // blocks: of heads of the same group
  float dt_min, dt_max;
};

struct NormArgs {
  const float* x;  // [t, groups * dim]
  int64_t x_stride;
  const float* residual;  // null, or added to x before the norm
  int64_t residual_stride;
  float* sum;  // receives x + residual if residual is not null
  int64_t sum_stride;
  const float* weight;    // [dim]
  int64_t weight_stride;  // distance between the weights of groups; 0 if they share them
  const float* bias;      // layer_norm only; may be null
  float* y;
  int64_t y_stride;
  int64_t groups, dim;
  float eps;
};

struct RopeArgs {
  const float* x;  // [t, num_heads * head_dim]
  int64_t x_stride;
  const float* cos_sin;  // [t, 2 * half]: cosines, then sines
  int64_t cos_sin_stride;
  float* y;
  int64_t y_stride;
  int64_t num_heads, head_dim, half;  // the first 2 * half of each head are rotated, the rest copied
  int32_t interleaved;                // pairs (2i, 2i+1) instead of (i, i + half)
};

struct BinaryArgs {
  const float *a, *b;
  int64_t a_stride, b_stride;
  float* y;
  int64_t y_stride;
  int64_t cols;
};

struct UnaryArgs {
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t cols;
};

enum UnaryKind : int32_t {
#define PS_LANES(id, name) UNARY_##id,
#define PS_SCALAR(id, name) UNARY_##id,
#define PS_TEST(id, name) UNARY_##id,
#include "base/unary_kinds.inc"
  NUM_UNARY_KINDS
};
enum BinaryKind : int32_t {
#define PS_LANES(id, name) BINARY_##id,
#define PS_SCALAR(id, name) BINARY_##id,
#define PS_COMPARE(id, name) BINARY_##id,
#define PS_BITS(id, name) BINARY_##id,
#include "base/binary_kinds.inc"
  NUM_BINARY_KINDS
};

// Over the middle axis of [outer, n, inner].
struct SoftmaxArgs {
  const float* x;
  float* y;
  int64_t n, inner;
  int32_t log;
};
// To [outer, inner].
struct ReduceArgs {
  const float* x;
  float* y;
  int64_t n, inner;
  int32_t kind;  // ReduceKind
};
enum ReduceKind : int32_t {
  REDUCE_SUM,
  REDUCE_MEAN,
  REDUCE_MAX,
  REDUCE_MIN,
  REDUCE_PROD,
  REDUCE_L1,
  REDUCE_L2,
  REDUCE_SUM_SQUARE,
  REDUCE_LOG_SUM,
  REDUCE_LOG_SUM_EXP,
  NUM_REDUCE_KINDS
};
constexpr int64_t kInnerBlock = 64;  // elements of `inner`, if it is above 1, that form an item

struct PackArgs {
  int32_t layout;
  int64_t rows, cols, row_start, num_rows;  // of the whole weight; the range being packed
  int32_t src_dtype;
  const void* src;  // [num_rows, cols]
  uint8_t* dst;     // the whole weight
  // t16_i4g32 only; null: columns have equal weight, and scales are computed from the rows.
  const float *column_weights, *scales;  // [cols], [num_rows]
  // t16_i4g32: offsets are even, -126 to 0, so that the blocks of Q4_K have a place for them.
  bool even_offsets = false;
};

struct Kernels {
  const char* level;

  // begin, end: tiles of 16 output columns
  void (*linear[NUM_LINEAR_SCHEMES])(const LinearArgs&, int64_t begin, int64_t end);
  // begin, end: tokens. layout: that of the weight that will multiply the rows
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t cols, int64_t m, int32_t layout,
                        const QuantizedRows& out, int64_t begin, int64_t end);
  // Rotates a row: blocks of 32 times a Hadamard matrix and a quarter; columns after the last whole block are copied. y
  // may be x.
  void (*rotate_row)(const float* x, float* y, int64_t cols);
  // For GGUF's block types: each row is a sequence of RoundedGroup, rows are out.stride bytes apart, and the number of
  // groups is even: the last may be zero.  Uses only q and stride of `out`; cols is a multiple of 32.
  void (*quantize_groups)(const float* x, int64_t x_stride, int64_t cols, const QuantizedRows& out, int64_t begin,
                          int64_t end);
  int64_t (*linear_panel_bytes)(int32_t layout, int64_t cols, int64_t m, int32_t planes);
  // m rows of x rounded to bf16, columns padded with zero to a multiple of 32, bf16_bytes an element.  If the level has
  // a bf16 dot product, they are bf16 in blocks as in QuantizedRows, [cols / 32][rows][32]; otherwise the same values
  // as f32, row after row.  Uses only q and stride (in bytes) of `out`.
  void (*round_rows_bf16)(const float* x, int64_t x_stride, int64_t cols, int64_t m, const QuantizedRows& out,
                          int64_t begin, int64_t end);
  int64_t bf16_bytes;
  // Prefetch weights from memory a few lines ahead, not kilobytes: the best distance depends on the processor, not on
  // the instruction level.
  int32_t short_prefetch;

  // begin, end: tokens (rows of the first dimension)
  void (*embedding)(const WeightView& weight, const int32_t* ids, float* y, int64_t y_stride, int64_t begin,
                    int64_t end);
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*layer_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
  // y [t, 2 * half]: cos(position * inv_freq) * scaling, then sines; the product is first rounded to f32
  void (*rotary_embedding)(const int32_t* positions, const float* inv_freq, int64_t half, float scaling, float* y,
                           int64_t y_stride, int64_t begin, int64_t end);
#define PS_UNARY(id, name, ...) void (*name)(const UnaryArgs&, int64_t begin, int64_t end);
#define PS_BINARY(id, name, ...) void (*name)(const BinaryArgs&, int64_t begin, int64_t end);
#define PS_SCALED(id, name, ...) void (*name)(const UnaryArgs&, float scalar, int64_t begin, int64_t end);
#include "base/elementwise_ops.inc"
  void (*gelu)(const UnaryArgs&, int32_t tanh_form, int64_t begin, int64_t end);
  // cols: of y; x has a gate value and an up value for each
  void (*clamped_swiglu)(const UnaryArgs&, float alpha, float limit, int64_t begin, int64_t end);
  // y = x * b, where all rows share b; and x times one number
  void (*scale_channels)(const BinaryArgs&, int64_t begin, int64_t end);
  void (*scale_all)(const UnaryArgs&, float factor, int64_t begin, int64_t end);
  // y = a * rms(b) / sqrt(max(mean(a^2), floor))
  void (*match_rms)(const BinaryArgs&, float floor, int64_t begin, int64_t end);
  // y = max(x - (mean + deviations * standard deviation), 0)
  void (*gaussian_topk)(const UnaryArgs&, float deviations, int64_t begin, int64_t end);

  // begin, end: tokens; a token writes only its own slot of its own page
  void (*kv_append)(const KvAppendArgs&, int64_t begin, int64_t end);
  // begin, end: items token * num_kv_heads + kv_head.  scratch: attention_scratch_bytes, one per thread
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  // The same in two passes. attention_part: items (token * num_kv_heads + kv_head) * num_parts + partition; partitions
  // that the token does not see are skipped. attention_merge: begin, end: tokens
  void (*attention_part)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  void (*attention_merge)(const AttentionArgs&, int64_t begin, int64_t end);
  int64_t (*attention_scratch_bytes)(int32_t num_heads, const KvView& kv);
  // begin, end: tokens
  void (*short_conv)(const ShortConvArgs&, int64_t begin, int64_t end);
  // begin, end: items request * key_heads + key head
  void (*gated_delta)(const GatedDeltaArgs&, int64_t begin, int64_t end);
  // begin, end: items request * blocks + block
  void (*ssm_scan)(const SsmScanArgs&, int64_t begin, int64_t end);
  // begin, end: tokens, as in kv_append. `attention` and the two after it accept such pages too.
  void (*latent_append)(const LatentAppendArgs&, int64_t begin, int64_t end);

  // For sampling; each in the order fixed by the numerics contract.
  int32_t (*argmax)(const float* x, int64_t n);  // the first of equals
  float (*max)(const float* x, int64_t n);
  // y[i] = exp((x[i] - shift) * factor); returns the sum in 16 lanes.  y may be null.
  float (*exp_sum)(const float* x, int64_t n, float shift, float factor, float* y);

  // General networks. y[i] = kind(x[i]) for kinds over lanes; y may be x
  void (*map_unary)(int32_t kind, float alpha, float beta, const float* x, float* y, int64_t n);
  // y[i] = kind(a[i * a_step], b[i * b_step]), steps 0 or 1; y may be an operand with step 1
  void (*map_binary)(int32_t kind, const float* a, int64_t a_step, const float* b, int64_t b_step, float* y, int64_t n);
  // begin, end: items outer * blocks of kInnerBlock in inner
  void (*softmax)(const SoftmaxArgs&, int64_t begin, int64_t end);
  void (*reduce)(const ReduceArgs&, int64_t begin, int64_t end);
  WindowKernels windows;

  void (*pack)(const PackArgs&);
  // The exact values a kernel computes with: dst [num_rows, cols] f32
  void (*unpack)(const WeightView&, int64_t row_start, int64_t num_rows, float* dst);

  // Reads bytes with the widest loads and returns their sum, so that the compiler cannot remove the loads.
  uint64_t (*read_bytes)(const uint8_t* data, int64_t bytes);
  // Multiply-adds in registers: returns the number of operations; sink keeps the results alive.
  int64_t (*peak)(int32_t dtype, int64_t iterations, float* sink);
};

// Null where the level is not compiled in.
extern const Kernels* const kernels_generic;
extern const Kernels* const kernels_avx2;
extern const Kernels* const kernels_avx512;
extern const Kernels* const kernels_avx512_bf16;  // the same level, for machines with bf16 dot products
extern const Kernels* const
    kernels_avx512_short_prefetch;        // the same, for processors that prefer a short prefetch distance (Zen 4)
extern const Kernels* const kernels_amx;  // linears of integers and bf16 on tile registers, the rest as in
                                          // kernels_avx512
extern const Kernels* const kernels_neon;
extern const Kernels* const kernels_neon_dot;

}  // namespace ps

#endif
