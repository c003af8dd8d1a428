// Attention with the partitions of the context split over ranks.  A rank writes the results of its partitions into its
// part of an exchange, and every rank merges all results in ascending order, as a single rank does
// (docs/explanation/ranks.md).  If the heads are split too, the ranks of a comm form several such groups, one after
// another, each with an equal number of heads.
// Hot: runs in every step.
#include <algorithm>
#include <array>
#include <utility>

#include "base/memory.h"
#include "paged/attention.h"
#include "exchange/exchange.h"

namespace ps {
namespace {

// Tokens are exchanged in blocks, which bounds the memory of an exchange.
constexpr int32_t kMaxBlocks = 4;
constexpr int64_t kBlockBytes = 4 << 20;

int64_t tokens(const Call& c) { return c.in[kAttentionQ].dims[0]; }
int64_t world(const Call& c) { return c.attrs[world_at(OP_CONTEXT_ATTENTION)].i; }
int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
// Returns the number of partitions that one rank has of the longest context.
int64_t num_parts(const Call& c) {
  return divide_up(divide_up(c.in[kAttentionPageTables].dims[2], kPartitionPages), world(c));
}

// Returns the bytes of the results that a rank writes for one token.  It saturates, because no comm is that large.
int64_t token_bytes(const Call& c) {
  int64_t bytes;
  const int64_t heads = row_elements(c.in[kAttentionQ]) / c.in[kAttentionState].dims[2],
                floats = 16 + round_up(c.in[kAttentionState].dims[2], 16);
  return checked_mul(heads * floats * 4, num_parts(c), &bytes) ? bytes : INT64_MAX;
}

int64_t tokens_together(const Call& c) {
  return std::max({kBlockBytes / token_bytes(c), divide_up(tokens(c), kMaxBlocks), int64_t{1}});
}

struct Block { int64_t begin, count; };
Block block_of(const Call& c, int64_t index) {
  const int64_t size = tokens_together(c), begin = std::min(index * size, tokens(c));
  return Block{begin, std::min(size, tokens(c) - begin)};
}

AttentionArgs args_of(const Call& c, const Block& block) {
  AttentionArgs args = attention_args(c);
  args.first_token = block.begin;
  args.num_parts = static_cast<int32_t>(num_parts(c));
  args.num_ranks = static_cast<int32_t>(world(c));
  args.rank = static_cast<int32_t>(c.attrs[rank_at(OP_CONTEXT_ATTENTION)].i);
  return args;
}

template <int32_t kIndex>
int64_t partial_items(const Call& c) {
  return block_of(c, kIndex).count * c.in[kAttentionState].dims[1];
}

template <int32_t kIndex>
void run_partials(const Call& c, int64_t begin, int64_t end, int32_t thread) {
  if (!c.exchange || c.exchange->status != PS_OK) return;  // others may still read what was sent before the failure
  const Block block = block_of(c, kIndex);
  AttentionArgs args = args_of(c, block);
  args.partials = static_cast<float*>(c.exchange->comm->part(c.exchange->comm->self));
  const int64_t first = block.begin * c.in[kAttentionState].dims[1];
  c.kernels->attention(args, first + begin, first + end, c.thread_scratch + thread * c.thread_scratch_bytes);
}

template <int32_t kIndex>
int64_t is_there(const Call& c) {
  return block_of(c, kIndex).count > 0;
}

template <int32_t kIndex>
void run_exchange(const Call& c, int64_t, int64_t, int32_t) {
  if (!c.exchange) return;
  const int64_t bytes = block_of(c, kIndex).count * token_bytes(c);
  for (int64_t r = 0; r < c.exchange->comm->world; ++r) c.exchange->bytes[r] = bytes;
  c.exchange->gather(c);
}

template <int32_t kIndex>
int64_t merged_tokens(const Call& c) {
  return block_of(c, kIndex).count;
}

template <int32_t kIndex>
void run_merge(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!c.exchange || c.exchange->status != PS_OK) return;
  const Block block = block_of(c, kIndex);
  AttentionArgs args = args_of(c, block);
  args.rank_partials = c.exchange->parts + (c.exchange->comm->rank - args.rank);
  c.kernels->attention_merge(args, block.begin + begin, block.begin + end);
}

template <int32_t... kIndex>
constexpr std::array<Phase, 3 * sizeof...(kIndex)> make_phases(std::integer_sequence<int32_t, kIndex...>) {
  std::array<Phase, 3 * sizeof...(kIndex)> out{};
  ((out[3 * kIndex] = Phase{.split = SPLIT_SHARES,
                            .items = partial_items<kIndex>,
                            .run = run_partials<kIndex>,
                            .reads_all = operands(kAttentionQ),
                            .writes_scratch = true,
                            .reads_state = true},
    out[3 * kIndex + 1] = Phase{.split = SPLIT_ITEMS,
                                .items = is_there<kIndex>,
                                .run = run_exchange<kIndex>,
                                .reads_scratch = true,
                                .writes_scratch = true},
    out[3 * kIndex + 2] = Phase{.split = SPLIT_ITEMS,
                                .items = merged_tokens<kIndex>,
                                .run = run_merge<kIndex>,
                                .writes_outputs = true,
                                .reads_scratch = true}),
   ...);
  return out;
}
constexpr std::array<Phase, 3 * kMaxBlocks> kPhases = make_phases(std::make_integer_sequence<int32_t, kMaxBlocks>{});

}  // namespace

// `c` has the maximum sizes of a step.
Phases context_attention_phases(const Call& c) {
  if (world(c) < 2) return attention_phases(c);
  // The maximum number of blocks of any step, which is not always that of the largest step: five tokens may take three
  // blocks, and four tokens four.
  const int64_t num_blocks = divide_up(tokens(c), std::max(kBlockBytes / token_bytes(c), int64_t{1}));
  return Phases{kPhases.data(), 3 * static_cast<int32_t>(std::min(num_blocks, int64_t{kMaxBlocks}))};
}

int64_t context_part_bytes(const Call& c) {
  int64_t bytes, all;
  if (!checked_mul(divide_up(tokens(c), kMaxBlocks), token_bytes(c), &bytes)) return INT64_MAX;
  if (!checked_mul(tokens(c), token_bytes(c), &all)) all = INT64_MAX;
  return std::max(bytes, std::min(all, kBlockBytes));
}

ps_status context_attention_scratch(const Call& c, Scratch* out) {
  PS_TRY(attention_scratch(c, out));
  if (world(c) > 1) out->shared = 0;
  return PS_OK;
}

ps_status infer_context_attention(const Spec* in, AttrValue* attrs, Spec* out) {
  PS_TRY(check_membership(attrs[world_at(OP_CONTEXT_ATTENTION)], attrs[rank_at(OP_CONTEXT_ATTENTION)]));
  return infer_attention(in, attrs, out);
}

}  // namespace ps
