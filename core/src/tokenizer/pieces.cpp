// Models that look up tokens in a trie: WordPiece (BERT) and Unigram (SentencePiece).
// Hot: runs for every text.
#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace ps {

// Every value is bounded, because the tables of a mapped file may change.
uint32_t child_of(const Table<TrieNode>& trie, uint32_t node, uint8_t byte) {
  if (uint64_t{node} + 1 >= trie.count) return 0;  // also if it is kNoToken
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

namespace {

double number_of(const uint32_t* halves) {
  double value;
  memcpy(&value, halves, sizeof(value));
  return value;
}

}  // namespace

void Unigram::reach(uint32_t begin, int64_t end, double score, uint32_t token) {
  Node& node = nodes_[end];
  if (node.begin == kNoToken || score > node.score) node = Node{score, begin, token};
}

// The Viterbi algorithm, forwards (https://arxiv.org/abs/1804.10959).
void Unigram::search(Text word) {
  const TokenizerTables& t = tokenizer_.tables;
  const double unknown_score = number_of(t.model.data);
  for (int64_t i = 0; i <= word.bytes; ++i) nodes_[i] = Node{0, kNoToken, kNoToken};
  for (int64_t at = 0, next = 0; at < word.bytes; at = next) {
    next_character(word, &next);
    const double score = nodes_[at].score;
    const uint32_t begin = static_cast<uint32_t>(at);
    bool known = false;
    uint32_t node = 0;
    for (int64_t i = at; i < word.bytes; ++i) {
      node = child_of(t.trie, node, word.data[i]);
      if (!node) break;
      const uint32_t token = token_at(t.trie, node);
      if (token >= tokenizer_.header.num_tokens) continue;
      reach(begin, i + 1, score + (token < t.scores.count ? number_of(t.scores.data[token].halves) : 0), token);
      known = known || i + 1 == next;
    }
    if (!known) reach(begin, next, score + unknown_score, tokenizer_.header.unknown);
  }
}

// Appends the token of the text, its byte tokens, or the unknown token.
void Unigram::add_unknown(Text part, TokenSink* out) const {
  const TokenizerTables& t = tokenizer_.tables;
  uint32_t node = 0;
  int64_t at = 0;
  while (at < part.bytes && (at == 0 || node)) node = child_of(t.trie, node, part.data[at++]);
  const uint32_t token = node ? token_at(t.trie, node) : kNoToken;
  if (token < tokenizer_.header.num_tokens) return out->add(token);
  const int64_t before = out->count;
  for (int64_t i = 0; i < part.bytes; ++i) {
    const uint32_t byte = t.bytes.count == 256 ? t.bytes.data[part.data[i]] : kNoToken;
    if (byte >= tokenizer_.header.num_tokens) {
      out->count = before;
      return out->add(tokenizer_.header.unknown);
    }
    out->add(byte);
  }
}

ps_status Unigram::run(Text word, TokenSink* out) {
  if (word.bytes >= int64_t{kNoToken} || !nodes_.resize(word.bytes + 1))
    return fail(PS_OUT_OF_MEMORY, "text: no memory for a word of %lld bytes", static_cast<long long>(word.bytes));
  search(word);
  ends_.clear();
  for (int64_t end = word.bytes; end > 0; end = nodes_[end].begin) {
    if (!ends_.push(static_cast<uint32_t>(end))) return fail(PS_OUT_OF_MEMORY, "text: no memory for its tokens");
    if (nodes_[end].begin >= end) break;  // only if the file has changed meanwhile
  }
  for (int64_t i = ends_.size() - 1; i >= 0; --i) {
    const Node node = nodes_[ends_[i]];
    if (node.token != tokenizer_.header.unknown) {
      out->add(node.token);
      continue;
    }
    while (i > 0 && nodes_[ends_[i - 1]].token == node.token) --i;  // adjacent unknown tokens become one
    add_unknown(Text{word.data + node.begin, ends_[i] - node.begin}, out);
  }
  return PS_OK;
}

}  // namespace ps
