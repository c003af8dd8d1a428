// Byte pair encoding of one word, with the merge order of the `tokenizers` library.
// Hot: runs for every text.
#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr int32_t kEnd = -1, kMerged = -2;

// Order of the heap: the lowest rank first, the leftmost among equals.
bool is_later(const MergeChoice& a, const MergeChoice& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.place > b.place;
}

}  // namespace

uint32_t hash_word(Text word) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (int64_t i = 0; i < word.bytes; ++i) hash = (hash ^ word.data[i]) * 16777619u;
  return hash;
}

const Merge* Merger::find(uint32_t left, uint32_t right) const {
  const TokenizerTables& t = tokenizer_.tables;
  if (left >= tokenizer_.header.num_tokens) return nullptr;
  uint32_t first = t.merge_begins.data[left];
  const uint32_t end = std::min(t.merge_begins.data[left + 1], t.merges.count);
  uint32_t last = end;
  while (first < last) {
    const uint32_t middle = first + (last - first) / 2;
    if (t.merges.data[middle].right < right) first = middle + 1;
    else last = middle;
  }
  return first < end && t.merges.data[first].right == right ? &t.merges.data[first] : nullptr;
}

bool Merger::push_part(uint32_t token) {
  const int64_t place = parts_.size();
  return place < INT32_MAX &&
         parts_.push(WordPart{token, static_cast<int32_t>(place) - 1, static_cast<int32_t>(place) + 1});
}

// With fused unknown tokens, an unknown character stays pending until the next known one and joins those before.
bool Merger::push_unknown(bool* pending) {
  const uint32_t unknown = tokenizer_.header.unknown;
  if (unknown == kNoToken) return true;  // unknown characters are dropped
  if (*pending && !(tokenizer_.header.flags & TOKENIZER_FUSE_UNKNOWN)) return push_part(unknown);
  *pending = true;
  return true;
}

bool Merger::push_parts(Text word) {
  const TokenizerTables& t = tokenizer_.tables;
  const bool characters = tokenizer_.header.kind == TOKENIZER_CHARACTERS;
  const uint32_t* bytes = t.bytes.count == 256 ? t.bytes.data : nullptr;
  bool pending = false;
  for (int64_t at = 0; at < word.bytes;) {
    const int64_t begin = at;
    uint32_t token = kNoToken;
    if (characters) {
      const uint32_t c = next_character(word, &at);
      const Character* end = t.characters.data + t.characters.count;
      const Character* character =
          std::lower_bound(t.characters.data, end, c, [](const Character& a, uint32_t b) { return a.code_point < b; });
      if (character != end && character->code_point == c) token = character->token;
    } else {
      token = bytes ? bytes[word.data[at]] : kNoToken;
      ++at;
    }
    if (token != kNoToken) {
      if (pending && !push_part(tokenizer_.header.unknown)) return false;
      pending = false;
      if (!push_part(token)) return false;
      continue;
    }
    bool fallback = characters && bytes;
    for (int64_t i = begin; fallback && i < at; ++i) fallback = bytes[word.data[i]] != kNoToken;
    if (!fallback) {
      if (!push_unknown(&pending)) return false;
      continue;
    }
    for (int64_t i = begin; i < at; ++i) {  // an unknown character stays pending meanwhile, as in the library
      if (!push_part(bytes[word.data[i]])) return false;
    }
  }
  return !pending || push_part(tokenizer_.header.unknown);
}

bool Merger::consider(int32_t place) {
  const int32_t next = parts_[place].next;
  const Merge* merge = find(parts_[place].token, parts_[next].token);
  if (!merge) return true;
  if (!heap_.push(MergeChoice{merge->rank, place, merge->token})) return false;
  std::push_heap(heap_.begin(), heap_.end(), is_later);
  return true;
}

bool Merger::merge() {
  const int32_t count = static_cast<int32_t>(parts_.size());
  heap_.clear();
  parts_[count - 1].next = kEnd;
  for (int32_t i = 0; i + 1 < count; ++i) {
    const Merge* merge = find(parts_[i].token, parts_[i + 1].token);
    if (merge && !heap_.push(MergeChoice{merge->rank, i, merge->token})) return false;
  }
  std::make_heap(heap_.begin(), heap_.end(), is_later);
  while (heap_.size()) {
    const MergeChoice best = heap_[0];
    std::pop_heap(heap_.begin(), heap_.end(), is_later);
    heap_.pop();
    WordPart& left = parts_[best.place];
    if (left.next < 0) continue;
    WordPart& right = parts_[left.next];
    const Merge* merge = find(left.token, right.token);
    if (!merge || merge->token != best.token) continue;  // changed since
    left.token = best.token;
    left.next = right.next;
    right.next = kMerged;
    if (left.next >= 0) parts_[left.next].previous = best.place;
    if (left.previous >= 0 && !consider(left.previous)) return false;
    if (left.next >= 0 && !consider(best.place)) return false;
  }
  return true;
}

ps_status Merger::run(Text word, TokenSink* out) {
  const Table<uint32_t>& words = tokenizer_.tables.words;
  if (words.count) {
    uint32_t slot = hash_word(word) & (words.count - 1);
    for (uint32_t probes = 0; probes < words.count && words.data[slot] != kNoToken;
         ++probes, slot = (slot + 1) & (words.count - 1)) {
      const Text token = token_text(tokenizer_, words.data[slot]);
      if (token.bytes != word.bytes || memcmp(token.data, word.data, static_cast<size_t>(word.bytes)) != 0) continue;
      out->add(words.data[slot]);
      return PS_OK;
    }
  }
  parts_.clear();
  if (!push_parts(word))
    return fail(PS_OUT_OF_MEMORY, "text: no memory for a word of %lld bytes", static_cast<long long>(word.bytes));
  if (!parts_.size()) return PS_OK;
  if (!merge())
    return fail(PS_OUT_OF_MEMORY, "text: no memory to merge a word of %lld bytes", static_cast<long long>(word.bytes));
  for (int32_t i = 0; i >= 0; i = parts_[i].next) out->add(parts_[i].token);
  return PS_OK;
}

}  // namespace ps
