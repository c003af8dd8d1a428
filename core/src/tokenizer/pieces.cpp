// Models that look their tokens up in a trie: WordPiece (BERT).
#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace ps {

// Each value is bounded, because the tables of a mapped file may change.
uint32_t child_of(const Table<TrieNode>& trie, uint32_t node, uint8_t byte) {
  if (node + 1 >= trie.count) return 0;
  uint32_t first = trie.data[node].children;
  const uint32_t end = std::min(trie.data[node + 1].children, trie.count - 1);
  uint32_t last = end;
  while (first < last) {
    const uint32_t middle = first + (last - first) / 2;
    if (trie.data[middle].byte_and_token >> 24 < byte) first = middle + 1;
    else last = middle;
  }
  return first < end && trie.data[first].byte_and_token >> 24 == byte ? first : 0;
}

uint32_t token_at(const Table<TrieNode>& trie, uint32_t node) {
  constexpr uint32_t kTokenBits = kMaxTokens - 1;
  const uint32_t token = node < trie.count ? trie.data[node].byte_and_token & kTokenBits : kTokenBits;
  return token == kTokenBits ? kNoToken : token;
}

void add_word_pieces(const Tokenizer& tokenizer, Text word, TokenSink* out) {
  const TokenizerTables& t = tokenizer.tables;
  const int64_t before = out->count;
  uint32_t num_left = t.model.data[0];
  for (int64_t at = 0; at < word.bytes; --num_left) {
    if (!num_left) return out->add(tokenizer.header.unknown);
    next_character(word, &at);
  }
  for (int64_t at = 0; at < word.bytes;) {
    uint32_t node = at ? t.model.data[1] : 0, token = kNoToken;
    int64_t end = at;
    for (int64_t i = at; i < word.bytes; ++i) {
      node = child_of(t.trie, node, word.data[i]);
      if (!node) break;
      const uint32_t found = token_at(t.trie, node);
      if (found >= tokenizer.header.num_tokens) continue;
      token = found;
      end = i + 1;
    }
    if (token == kNoToken) {
      out->count = before;
      return out->add(tokenizer.header.unknown);
    }
    out->add(token);
    at = end;
  }
}

}  // namespace ps
