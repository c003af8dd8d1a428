// Checks of the contents of a tokenizer's tables: every index is inside its table, and sorted tables are in order.  A
// mapped file may change later, so every access is bounded again by the value that it reads.
#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr uint32_t kMaxAddedBytes = 1024;  // of one added token: limits how far a search looks ahead
constexpr uint32_t kMaxSteps = 16, kMaxStepBytes = 16;
constexpr uint32_t kMaxTokenBytes = 4096;      // of the text of one token
constexpr uint32_t kMaxAround = 1024;          // special tokens around a text
constexpr uint32_t kMaxWordCharacters = 4096;  // of a word that WordPiece splits, which takes quadratic time

ps_status bad(const char* table, uint32_t index, const char* expected, uint32_t found) {
  return fail(PS_INVALID_FILE, "%s[%u]: expected %s, got %u", table, index, expected, found);
}

ps_status check_count(const char* table, uint32_t count, uint64_t expected) {
  if (count == expected) return PS_OK;
  return fail(PS_INVALID_FILE, "%s: expected %llu elements, got %u", table, static_cast<unsigned long long>(expected),
              count);
}

// Offsets from 0 to `end`, one more than there are tokens.
ps_status check_begins(const char* name, const Table<uint32_t>& begins, uint32_t num_tokens, uint32_t end) {
  PS_TRY(check_count(name, begins.count, uint64_t{num_tokens} + 1));
  if (begins.data[0] != 0) return bad(name, 0, "0", begins.data[0]);
  for (uint32_t i = 0; i < num_tokens; ++i) {
    if (begins.data[i + 1] < begins.data[i]) return bad(name, i + 1, "no less than the one before", begins.data[i + 1]);
  }
  if (begins.data[num_tokens] != end) return bad(name, num_tokens, "the number of elements", begins.data[num_tokens]);
  return PS_OK;
}

// One text for each token.
ps_status check_texts(const char* name, const Table<uint32_t>& begins, uint32_t num_tokens, uint32_t end) {
  PS_TRY(check_begins(name, begins, num_tokens, end));
  for (uint32_t i = 0; i < num_tokens; ++i) {
    const uint32_t bytes = begins.data[i + 1] - begins.data[i];
    if (bytes > kMaxTokenBytes) return bad(name, i, "a token of at most 4096 bytes", bytes);
  }
  return PS_OK;
}

ps_status check_ids(const char* name, const Table<uint32_t>& ids, uint32_t num_tokens, bool may_lack) {
  for (uint32_t i = 0; i < ids.count; ++i) {
    if (ids.data[i] >= num_tokens && !(may_lack && ids.data[i] == kNoToken))
      return bad(name, i, "a token", ids.data[i]);
  }
  return PS_OK;
}

ps_status check_merges(const TokenizerTables& t, uint32_t num_tokens) {
  for (uint32_t left = 0; left < num_tokens; ++left) {
    const uint32_t begin = t.merge_begins.data[left], end = t.merge_begins.data[left + 1];
    for (uint32_t i = begin; i < end && i < t.merges.count; ++i) {
      const Merge& merge = t.merges.data[i];
      if (merge.right >= num_tokens) return bad("merges", i, "a right token", merge.right);
      if (merge.token >= num_tokens) return bad("merges", i, "a token", merge.token);
      if (i > begin && merge.right <= t.merges.data[i - 1].right)
        return bad("merges", i, "right tokens that ascend", merge.right);
    }
  }
  return PS_OK;
}

ps_status check_characters(const TokenizerTables& t, uint32_t num_tokens) {
  for (uint32_t i = 0; i < t.characters.count; ++i) {
    const Character& c = t.characters.data[i];
    if (c.token >= num_tokens) return bad("characters", i, "a token", c.token);
    if (c.code_point > 0x10FFFF || (i && c.code_point <= t.characters.data[i - 1].code_point))
      return bad("characters", i, "code points that ascend", c.code_point);
  }
  return PS_OK;
}

// Children come after their node and are sorted by their bytes, so a search ends, at the longest token.
ps_status check_trie(const TokenizerTables& t, uint32_t num_tokens) {
  const Table<TrieNode>& trie = t.trie;
  for (uint32_t i = 0; i < trie.count; ++i) {
    const uint32_t begin = trie.data[i].children, least = i ? trie.data[i - 1].children : 1;
    if (begin < least || (i == 0 && begin > 1) || begin >= std::max(trie.count, 2u))
      return bad("trie", i, "children that ascend within the table", begin);
    if (i + 1 < trie.count && begin <= i) return bad("trie", i, "children behind it", begin);
    const uint32_t token = token_at(trie, i);
    if (token != kNoToken && token >= num_tokens) return bad("trie", i, "a token", token);
  }
  for (uint32_t i = 0; i + 1 < trie.count; ++i) {
    const uint32_t end = std::min(trie.data[i + 1].children, trie.count);
    for (uint32_t j = trie.data[i].children; j + 1 < end; ++j) {
      if (trie.data[j].byte_and_token >> 24 >= trie.data[j + 1].byte_and_token >> 24)
        return bad("trie", j + 1, "bytes that ascend", j + 1);
    }
  }
  return PS_OK;
}

ps_status check_unigram(const Tokenizer& tokenizer) {
  PS_TRY(check_count("model", tokenizer.tables.model.count, 2));
  if (tokenizer.tables.scores.count > tokenizer.header.num_tokens)
    return bad("scores", tokenizer.header.num_tokens, "no more than tokens", tokenizer.tables.scores.count);
  if (tokenizer.header.unknown == kNoToken) return fail(PS_INVALID_FILE, "unknown: expected a token, got none");
  return PS_OK;
}

ps_status check_word_piece(const Tokenizer& tokenizer) {
  const TokenizerTables& t = tokenizer.tables;
  PS_TRY(check_count("model", t.model.count, 2));
  if (t.model.data[0] > kMaxWordCharacters) return bad("model", 0, "at most 4096 characters", t.model.data[0]);
  if (t.model.data[1] != kNoToken && t.model.data[1] >= t.trie.count)
    return bad("model", 1, "a node of the trie", t.model.data[1]);
  if (tokenizer.header.unknown == kNoToken) return fail(PS_INVALID_FILE, "unknown: expected a token, got none");
  return PS_OK;
}

// A power of two with free entries, so that a search ends.
ps_status check_words(const TokenizerTables& t, uint32_t num_tokens) {
  if (!t.words.count) return PS_OK;
  if (t.words.count & (t.words.count - 1))
    return fail(PS_INVALID_FILE, "words: expected a power of two, got %u", t.words.count);
  PS_TRY(check_ids("words", t.words, num_tokens, true));
  if (std::find(t.words.data, t.words.data + t.words.count, kNoToken) == t.words.data + t.words.count)
    return fail(PS_INVALID_FILE, "words: expected an empty place, got none");
  return PS_OK;
}

ps_status check_text(const char* table, uint32_t index, const TokenizerTables& t, uint32_t begin, uint32_t bytes) {
  if (begin > t.text.count || bytes > t.text.count - begin) return bad(table, index, "a place within the text", begin);
  if (find_ill_formed(slice(t.text, begin, bytes)) >= 0) return bad(table, index, "UTF-8", begin);
  return PS_OK;
}

ps_status check_added(const char* name, const TokenizerTables& t, const Table<Added>& added, uint32_t num_tokens) {
  Text last{nullptr, 0};
  for (uint32_t i = 0; i < added.count; ++i) {
    const Added token = added.data[i];
    if (token.token >= num_tokens) return bad(name, i, "a token", token.token);
    if (token.flags & ~uint32_t{ADDED_KNOWN_FLAGS}) return bad(name, i, "flags that are known", token.flags);
    if (token.bytes == 0 || token.bytes > kMaxAddedBytes) return bad(name, i, "1 to 1024 bytes", token.bytes);
    PS_TRY(check_text(name, i, t, token.begin, token.bytes));
    const Text text = slice(t.text, token.begin, token.bytes);
    const int order = i ? memcmp(last.data, text.data, static_cast<size_t>(std::min(last.bytes, text.bytes))) : -1;
    if (order > 0 || (order == 0 && last.bytes >= text.bytes)) return bad(name, i, "tokens that ascend", token.token);
    last = text;
  }
  return PS_OK;
}

ps_status check_steps(const TokenizerTables& t) {
  if (t.steps.count > kMaxSteps)
    return fail(PS_INVALID_FILE, "steps: expected at most %u, got %u", kMaxSteps, t.steps.count);
  for (uint32_t i = 0; i < t.steps.count; ++i) {
    const TextStep& step = t.steps.data[i];
    if (step.kind >= NUM_STEPS)
      return fail(PS_UNSUPPORTED, "steps[%u]: found the kind %u, which is not known", i, step.kind);
    PS_TRY(check_text("steps", i, t, step.begin, step.bytes));
    PS_TRY(check_text("steps", i, t, step.with_begin, step.with_bytes));
    if (step.bytes > kMaxStepBytes || step.with_bytes > kMaxStepBytes)
      return bad("steps", i, "at most 16 bytes", step.bytes);
    if (step.kind == STEP_REPLACE && step.bytes == 0) return bad("steps", i, "what to replace", step.bytes);
  }
  return PS_OK;
}

}  // namespace

ps_status check_tables(const Tokenizer& tokenizer) {
  const TokenizerTables& t = tokenizer.tables;
  const uint32_t n = tokenizer.header.num_tokens;
  PS_TRY(check_texts("token_begins", t.token_begins, n, t.token_bytes.count));
  if (tokenizer.header.flags & TOKENIZER_FIRST_TEXTS)
    PS_TRY(check_texts("first_begins", t.first_begins, n, t.first_bytes.count));
  PS_TRY(check_count("token_flags", t.token_flags.count, n));
  for (uint32_t i = 0; i < n; ++i) {
    if (t.token_flags.data[i] & ~uint32_t{TOKEN_KNOWN_FLAGS})
      return bad("token_flags", i, "flags that are known", t.token_flags.data[i]);
  }
  PS_TRY(check_begins("merge_begins", t.merge_begins, n, t.merges.count));
  PS_TRY(check_merges(t, n));
  if (t.bytes.count || tokenizer.header.kind == TOKENIZER_BYTES) PS_TRY(check_count("bytes", t.bytes.count, 256));
  PS_TRY(check_ids("bytes", t.bytes, n, true));
  PS_TRY(check_characters(t, n));
  PS_TRY(check_trie(t, n));
  if (tokenizer.header.kind == TOKENIZER_WORD_PIECE) PS_TRY(check_word_piece(tokenizer));
  if (tokenizer.header.kind == TOKENIZER_UNIGRAM) PS_TRY(check_unigram(tokenizer));
  PS_TRY(check_words(t, n));
  PS_TRY(check_added("added", t, t.added, n));
  PS_TRY(check_added("added_normalized", t, t.added_normalized, n));
  PS_TRY(check_steps(t));
  if (t.prefix.count > kMaxAround) return bad("prefix", 0, "at most 1024 tokens", t.prefix.count);
  if (t.suffix.count > kMaxAround) return bad("suffix", 0, "at most 1024 tokens", t.suffix.count);
  PS_TRY(check_ids("prefix", t.prefix, n, false));
  PS_TRY(check_ids("suffix", t.suffix, n, false));
  const uint32_t special[] = {tokenizer.header.unknown, tokenizer.header.bos, tokenizer.header.pad};
  return check_ids("header", Table<uint32_t>{special, 3}, n, true);
}

}  // namespace ps
