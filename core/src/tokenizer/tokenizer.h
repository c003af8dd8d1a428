// A tokenizer compiled by export (docs/explanation/bundle-format.md), used without a copy.
//
// Opening checks every table, but other processes may still write to a mapped file afterwards.  Every value is
// therefore bounded again on use: a changed file yields wrong tokens, never an invalid access.
#ifndef PENSTOCK_TOKENIZER_H
#define PENSTOCK_TOKENIZER_H

#include "base/error.h"
#include "base/memory.h"
#include "tokenizer/unicode.h"

namespace ps {

constexpr uint32_t kTokenizerVersion = 2;  // 1 has fewer tables; the others are read as empty
constexpr uint32_t kNoToken = ~0u;
constexpr uint32_t kMaxTokens = 1u << 24;
constexpr uint32_t kMaxGrowth = 16;  // of a text by the normalizer, whose steps could multiply its length

enum TokenizerKind : uint32_t {
  TOKENIZER_NONE,        // not compiled: `text` gives the reason
  TOKENIZER_BYTES,       // byte-level BPE
  TOKENIZER_CHARACTERS,  // BPE of characters, with byte fallback
  TOKENIZER_WORD_PIECE,  // longest match first
  TOKENIZER_UNIGRAM,     // highest total score
  NUM_TOKENIZER_KINDS
};
enum SplitPattern : uint32_t {
  SPLIT_NONE,
  SPLIT_GPT2,
  SPLIT_LLAMA3,
  SPLIT_QWEN2,
  SPLIT_BERT,
  SPLIT_SPACES,
  NUM_SPLITS
};
enum Metaspace : uint32_t { METASPACE_NONE, METASPACE_ALWAYS, METASPACE_FIRST, METASPACE_NEVER, NUM_METASPACES };
enum TokenizerFlag : uint32_t {
  TOKENIZER_WHOLE_WORDS = 1,   // a word that is a token is not merged (ignore_merges)
  TOKENIZER_FUSE_UNKNOWN = 2,  // adjacent unknown characters become one unknown token
  TOKENIZER_PREFIX_SPACE = 4,  // prepend a space to a text that begins with none
  TOKENIZER_SPLIT_SPACES = 8,  // with Metaspace: words begin at spaces
  TOKENIZER_STRIP_SPACE = 16,  // decoding removes one space at the beginning
  TOKENIZER_FIRST_TEXTS = 32,  // the first token of a text decodes differently
  TOKENIZER_KNOWN_FLAGS = 63,
};
enum TokenFlag : uint8_t { TOKEN_SPECIAL = 1, TOKEN_BYTE = 2, TOKEN_ABSENT = 4, TOKEN_KNOWN_FLAGS = 7 };
enum AddedFlag : uint32_t {
  ADDED_SINGLE_WORD = 1,
  ADDED_LSTRIP = 2,
  ADDED_RSTRIP = 4,
  ADDED_SPECIAL = 8,
  ADDED_KNOWN_FLAGS = 15
};
enum NormalizerStep : uint32_t {
  STEP_NFC,
  STEP_PREPEND,
  STEP_REPLACE,
  STEP_NFD,
  STEP_LOWERCASE,
  STEP_CLEAN,          // removes control characters and makes white space spaces, as BERT does
  STEP_CHINESE,        // puts spaces around Chinese characters
  STEP_STRIP_ACCENTS,  // removes marks that take no space of their own
  STEP_STRIP_MARKS,    // removes all marks
  STEP_STRIP_LEFT,
  STEP_STRIP_RIGHT,
  STEP_CHARSMAP,        // replaces characters and clusters by SentencePiece's map
  STEP_NMT,             // removes control characters and turns others into spaces, like SentencePiece's nmt rules
  STEP_REPLACE_SPACES,  // replaces each run of two or more spaces
  STEP_NFKC,
  STEP_NFKD,
  NUM_STEPS
};

struct Merge {  // stored in the list of its left token
  uint32_t right, rank, token;
};
struct Character { uint32_t code_point, token; };
struct Added {  // its text lies in `text`
  uint32_t token, flags, begin, bytes;
};
struct TrieNode {                     // children: from `children` up to those of the next node, sorted by their bytes
  uint32_t children, byte_and_token;  // byte << 24 | token
};
struct Score {  // 64 bits, 32-bit aligned
  uint32_t halves[2];
};
struct TextStep {
  uint32_t kind, begin, bytes, with_begin, with_bytes;  // replaces one text with the other, or prepends the first
};

template <typename T>
struct Table {
  const T* data;
  uint32_t count;
};

// The header of the segment, followed by offsets and sizes of its tables in the order of TokenizerTables.
struct TokenizerHeader {
  char magic[8];  // "PSTOKENS"
  uint32_t version, kind, flags, split, metaspace, num_tokens, unknown, bos, pad, num_tables;
};

struct TokenizerTables {
  Table<uint32_t> token_begins;    // [num_tokens + 1] into token_bytes
  Table<uint8_t> token_bytes;      // the text of each token
  Table<uint8_t> token_flags;      // [num_tokens]
  Table<uint32_t> merge_begins;    // [num_tokens + 1] into merges
  Table<Merge> merges;             // sorted by right within a left token
  Table<uint32_t> bytes;           // [256] byte tokens: the alphabet, or the fallback; or empty
  Table<Character> characters;     // sorted
  Table<uint32_t> words;           // hash table of tokens by their bytes, size a power of two; or empty
  Table<Added> added;              // matched in the original text; sorted by their bytes
  Table<Added> added_normalized;   // matched in the normalized text
  Table<TextStep> steps;           // for the normalizer
  Table<uint32_t> prefix, suffix;  // special tokens around a text
  Table<int32_t> eos;              // tokens that end a text
  Table<uint8_t> text;
  Table<TrieNode> trie;   // of the model's tokens, with a sentinel at the end; the first is the root
  Table<uint32_t> model;  // WordPiece: maximum characters of a word; the node of the prefix inside words, or none
                          // Unigram: the score of an unknown character, as a Score
  Table<uint32_t> first_begins;  // [num_tokens + 1] into first_bytes
  Table<uint8_t> first_bytes;    // the text of each token at the beginning of a text
  Table<Score> scores;           // [num_tokens] or fewer: 0 for the others
  Table<uint32_t> charsmap;      // a double array, with offsets into charsmap_text
  Table<uint8_t> charsmap_text;  // null-terminated replacements
};

struct Tokenizer {
  TokenizerHeader header;  // a copy, like the offsets of the tables
  TokenizerTables tables;
  uint32_t added_firsts[2][8];  // bit sets: the first bytes of added tokens
  Vec<char> reason;             // why the tokenizer is not available; null-terminated
};

inline Text slice(const Table<uint8_t>& table, uint32_t begin, uint32_t bytes) {
  if (begin > table.count || bytes > table.count - begin) return Text{table.data, 0};
  return Text{table.data + begin, bytes};
}
inline Text text_between(const Table<uint32_t>& begins, const Table<uint8_t>& bytes, uint32_t token) {
  if (token + 1 >= begins.count) return Text{nullptr, 0};
  const uint32_t begin = begins.data[token], end = begins.data[token + 1];
  return end < begin ? Text{nullptr, 0} : slice(bytes, begin, end - begin);
}
inline Text token_text(const Tokenizer& t, uint32_t token) {
  return text_between(t.tables.token_begins, t.tables.token_bytes, token);
}
inline Text first_text(const Tokenizer& t, uint32_t token) {
  return text_between(t.tables.first_begins, t.tables.first_bytes, token);
}
uint32_t hash_word(Text word);

// Reads and checks a segment, which must outlive the tokenizer.
ps_status open_tokenizer(const uint8_t* data, int64_t bytes, Tokenizer* out);
ps_status check_tables(const Tokenizer& tokenizer);

// The destination of ids: those that do not fit are counted but not written.
struct TokenSink {
  int32_t* ids;
  int64_t capacity, count;
  void add(uint32_t token) {
    if (count < capacity) ids[count] = static_cast<int32_t>(token);
    ++count;
  }
};
// The destination of decoded text, likewise.
struct TextSink {
  char* text;
  int64_t capacity, bytes;
  void add(const uint8_t* data, int64_t size) {
    const int64_t room = capacity - bytes;
    if (room > 0) memcpy(text + bytes, data, static_cast<size_t>(size < room ? size : room));
    bytes += size;
  }
};

ps_status encode_text(const Tokenizer& tokenizer, Text text, uint32_t flags, TokenSink* out);
// Advances `begin` past the ids whose text has been written.
ps_status decode_tokens(const Tokenizer& tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags, int64_t* begin,
                        TextSink* out);

// ---- parts of encoding ------------------------------------------------------------------------------------

struct Piece {
  Text text;
  uint32_t token;  // an added token; kNoToken: text
};

// Splits a text at added tokens (AddedVocabulary of the `tokenizers` library, leftmost and longest first).
class AddedSplit {
 public:
  AddedSplit(const Tokenizer& tokenizer, bool normalized, bool parse_special, Text text);
  bool next(Piece* out);

 private:
  const Added* longest_at(int64_t at, int64_t* end) const;
  bool accept(const Added& token, int64_t* begin, int64_t* end);
  const Tokenizer& tokenizer_;
  const Table<Added>& table_;
  const uint32_t* firsts_;
  bool parse_special_;
  Text text_;
  int64_t scan_ = 0, done_ = 0;  // searched so far; returned so far
  int64_t spaces_begin_ = 0, spaces_end_ = 0;
  Piece waiting_{};
  bool has_waiting_ = false;
};

// The end of the word that begins at `at`.
int64_t end_of_word(SplitPattern pattern, Text text, int64_t at);

// The child of a node by a byte; 0 (the root, never a child): none.
uint32_t child_of(const Table<TrieNode>& trie, uint32_t node, uint8_t byte);
// kNoToken: no token ends at the node.
uint32_t token_at(const Table<TrieNode>& trie, uint32_t node);

// Normalizes texts.  Keeps its memory between texts.
class Normalizer {
 public:
  explicit Normalizer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  ps_status run(Text text, Text* out);  // *out is valid until the next call

 private:
  bool apply(const TextStep& step, Text text, int64_t most, Bytes* out) const;
  const Tokenizer& tokenizer_;
  Bytes buffers_[2];
};
bool begins_with(Text text, int64_t at, Text what);
// Stops after `most` bytes: the caller refuses longer texts.
bool push_replaced(Text from, Text what, Text with, int64_t most, Bytes* out);

// Appends the text; replaces each character, and each cluster of less than six bytes, as the map says.
bool push_mapped(const TokenizerTables& tables, Text text, int64_t most, Bytes* out);

// Converts words to the tokens with the highest total score.  Keeps its memory between words.
class Unigram {
 public:
  explicit Unigram(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  ps_status run(Text word, TokenSink* out);

 private:
  struct Node {  // the best path to a position: its score, and where its last token begins
    double score;
    uint32_t begin, token;
  };
  void search(Text word);
  void reach(uint32_t begin, int64_t end, double score, uint32_t token);
  void add_unknown(Text part, TokenSink* out) const;
  const Tokenizer& tokenizer_;
  Vec<Node> nodes_;
  Vec<uint32_t> ends_;
};

// Converts a word by longest match from its beginning; one unknown token if that fails.
void add_word_pieces(const Tokenizer& tokenizer, Text word, TokenSink* out);

struct WordPart {
  uint32_t token;
  int32_t previous, next;  // kMerged: part of the symbol before
};
struct MergeChoice {
  uint32_t rank;
  int32_t place;
  uint32_t token;
};

// Converts words to tokens by merging.  Keeps its memory between words.
class Merger {
 public:
  explicit Merger(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  ps_status run(Text word, TokenSink* out);

 private:
  bool push_parts(Text word);
  bool push_part(uint32_t token);
  bool push_unknown(bool* pending);
  const Merge* find(uint32_t left, uint32_t right) const;
  bool consider(int32_t place);
  bool merge();
  const Tokenizer& tokenizer_;
  Vec<WordPart> parts_;
  Vec<MergeChoice> heap_;
};

}  // namespace ps

#endif
