// Placement of blocks by lifetime: largest first, each into the first gap.
#include <algorithm>

#include "program/plan.h"

namespace ps {
namespace {

// With more blocks than this, comparing all pairs takes too long.  No real network has as many, but a malicious file
// may.
constexpr int64_t kMaxCompared = 4096;

ps_status no_memory() { return fail(PS_OUT_OF_MEMORY, "plan: out of memory"); }

// The first gap below, between or above the blocks that are alive at the same time; `placed` is sorted by offset.
ps_status place(const Vec<Block>& placed, const char* limit, Block* block) {
  int64_t cursor = 0;
  for (const Block& other : placed) {
    if (other.first > block->last || other.last < block->first) continue;
    if (other.offset - cursor >= block->bytes) break;
    cursor = std::max(cursor, other.offset + other.bytes);
  }
  int64_t end;
  if (!checked_add(cursor, block->bytes, &end)) return too_large(limit);
  block->offset = cursor;
  return PS_OK;
}

// Places each block into the first gap that is free during its lifetime.  Compares all pairs.
ps_status place_in_gaps(Vec<Block>* blocks, const char* limit) {
  Vec<Block> placed;
  for (Block& block : *blocks) {
    PS_TRY(place(placed, limit, &block));
    if (!placed.push(block)) return no_memory();
    for (int64_t i = placed.size() - 1; i > 0 && placed[i - 1].offset > placed[i].offset; --i)
      std::swap(placed[i - 1], placed[i]);
  }
  return PS_OK;
}

// In order of time, reuses the memory of a block of the same size that is no longer alive, or appends. `blocks` is
// sorted by size.
ps_status place_by_size(Vec<Block>* blocks, const char* limit) {
  const int64_t count = blocks->size();
  Vec<int32_t> by_first, by_last, size_class, free_block, next_free;  // free blocks of a size are a list
  if (!by_first.resize(count) || !by_last.resize(count) || !size_class.resize(count) || !free_block.resize(count) ||
      !next_free.resize(count)) {
    return no_memory();
  }
  for (int64_t i = 0; i < count; ++i) {
    by_first[i] = by_last[i] = static_cast<int32_t>(i);
    size_class[i] = i == 0 ? 0 : size_class[i - 1] + ((*blocks)[i].bytes != (*blocks)[i - 1].bytes);
    free_block[i] = -1;
  }
  const auto sort_by = [&](Vec<int32_t>* order, int32_t Block::* time) {
    std::sort(order->begin(), order->end(), [&](int32_t a, int32_t b) {
      const int32_t x = (*blocks)[a].*time, y = (*blocks)[b].*time;
      return x != y ? x < y : a < b;
    });
  };
  sort_by(&by_first, &Block::first);
  sort_by(&by_last, &Block::last);
  int64_t ended = 0, end = 0;
  for (int32_t i : by_first) {
    Block& block = (*blocks)[i];
    for (; (*blocks)[by_last[ended]].last < block.first; ++ended) {
      const int32_t old = by_last[ended];
      next_free[old] = free_block[size_class[old]];
      free_block[size_class[old]] = old;
    }
    int32_t& reused = free_block[size_class[i]];
    block.offset = reused < 0 ? end : (*blocks)[reused].offset;
    if (reused >= 0) {
      reused = next_free[reused];
    } else if (!checked_add(end, block.bytes, &end)) {
      return too_large(limit);
    }
  }
  return PS_OK;
}

}  // namespace

ps_status too_large(const char* limit) {
  return fail(PS_INVALID_ARGUMENT, "%s: the program of these limits does not fit in memory", limit);
}

ps_status place_blocks(Vec<Block>* blocks, const char* limit, int64_t* bytes) {
  std::sort(blocks->begin(), blocks->end(),
            [](const Block& a, const Block& b) { return a.bytes != b.bytes ? a.bytes > b.bytes : a.value < b.value; });
  *bytes = 0;
  PS_TRY(blocks->size() <= kMaxCompared ? place_in_gaps(blocks, limit) : place_by_size(blocks, limit));
  for (const Block& block : *blocks) *bytes = std::max(*bytes, block.offset + block.bytes);
  return PS_OK;
}

}  // namespace ps
