// SentencePiece's precompiled character map: a double array of Darts-clone, and the replacements that it points to.
// Hot: runs for every text.
#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr int64_t kMaxClusterBytes = 5;  // the longest cluster that is looked up whole, as in the `tokenizers` library
constexpr uint32_t kLeaf = 1u << 31, kHasLeaf = 1u << 8, kWideOffset = 1u << 9;

uint32_t offset_of(uint32_t unit) { return unit >> 10 << (unit & kWideOffset ? 8 : 0); }

// Finds the replacement of the shortest key that is a prefix of the text; false: none.
bool find_replacement(const TokenizerTables& t, Text text, Text* out) {
  if (!t.charsmap.count) return false;
  uint32_t place = offset_of(t.charsmap.data[0]);
  for (int64_t i = 0; i < text.bytes && text.data[i]; ++i) {
    place ^= text.data[i];
    if (place >= t.charsmap.count) return false;
    const uint32_t unit = t.charsmap.data[place];
    if ((unit & (kLeaf | 255)) != text.data[i]) return false;
    place ^= offset_of(unit);
    if (!(unit & kHasLeaf)) continue;
    if (place >= t.charsmap.count) return false;
    const uint32_t begin = t.charsmap.data[place] & ~kLeaf;
    if (begin >= t.charsmap_text.count) return false;
    const void* end = memchr(t.charsmap_text.data + begin, 0, t.charsmap_text.count - begin);
    const uint8_t* data = t.charsmap_text.data + begin;
    *out = Text{data, end ? static_cast<const uint8_t*>(end) - data : t.charsmap_text.count - begin};
    return true;
  }
  return false;
}

}  // namespace

bool push_mapped(const TokenizerTables& tables, Text text, int64_t most, Bytes* out) {
  Text with;
  for (int64_t at = 0; at < text.bytes && out->size() <= most;) {
    const int64_t end = end_of_cluster(text, at);
    if (end - at <= kMaxClusterBytes && find_replacement(tables, Text{text.data + at, end - at}, &with)) {
      if (!push_bytes(out, with.data, with.bytes)) return false;
      at = end;
      continue;
    }
    for (int64_t next = at; at < end; at = next) {
      next_character(text, &next);
      const Text character{text.data + at, next - at};
      if (!find_replacement(tables, character, &with)) with = character;
      if (!push_bytes(out, with.data, with.bytes)) return false;
    }
  }
  return true;
}

}  // namespace ps
