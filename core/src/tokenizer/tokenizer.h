// A tokenizer as export compiled it (docs/explanation/bundle-format.md), used in place.
//
// Opening checks every table.  Other processes may still write to a mapped file afterwards.  Each value is therefore
// bounded again where it is used: a changed file yields wrong tokens, never an invalid access.
#ifndef PENSTOCK_TOKENIZER_H
#define PENSTOCK_TOKENIZER_H

#include "base/error.h"
#include "base/memory.h"
#include "tokenizer/unicode.h"

namespace ps {

constexpr uint32_t kTokenizerVersion = 2;  // 1 has fewer tables, and is read as one whose others are empty
constexpr uint32_t kNoToken = ~0u;
constexpr uint32_t kMaxTokens = 1u << 24;
constexpr uint32_t kMaxGrowth = 16;  // of a text by the normalizer: steps could multiply

enum TokenizerKind : uint32_t {
  TOKENIZER_NONE,        // not compiled: `text` says why
  TOKENIZER_BYTES,       // byte-level BPE
  TOKENIZER_CHARACTERS,  // BPE of characters, bytes as the fallback
  TOKENIZER_WORD_PIECE,  // the longest token first
  TOKENIZER_UNIGRAM,     // the tokens with the highest sum of scores
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
  TOKENIZER_FUSE_UNKNOWN = 2,  // neighbouring unknown characters are one unknown token
  TOKENIZER_PREFIX_SPACE = 4,  // a space goes in front of a text that begins with none
  TOKENIZER_SPLIT_SPACES = 8,  // with Metaspace: words begin at spaces
  TOKENIZER_STRIP_SPACE = 16,  // decoding takes one space off the beginning
  TOKENIZER_FIRST_TEXTS = 32,  // the first token of a text decodes to another text than behind one
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
  STEP_CLEAN,          // drops control characters and makes white space spaces, as BERT does
  STEP_CHINESE,        // puts spaces around Chinese characters
  STEP_STRIP_ACCENTS,  // drops marks that take no space of their own
  STEP_STRIP_MARKS,    // drops all marks
  STEP_STRIP_LEFT,
  STEP_STRIP_RIGHT,
  STEP_CHARSMAP,        // replaces characters and clusters by a map of SentencePiece
  STEP_NMT,             // drops control characters and makes others spaces, as SentencePiece's nmt rules do
  STEP_REPLACE_SPACES,  // replaces each run of two spaces or more
  STEP_NFKC,
  STEP_NFKD,
  NUM_STEPS
};

struct Merge {  // of the left token whose list it is in
  uint32_t right, rank, token;
};
struct Character { uint32_t code_point, token; };
struct Added {  // its text lies in `text`
  uint32_t token, flags, begin, bytes;
};
struct TrieNode {  // its children lie from `children` up to those of the node behind it, ascending by their bytes
  uint32_t children, byte_and_token;  // byte << 24 | token
};
struct Score {  // of 64 bits, at a multiple of 32
  uint32_t halves[2];
};
struct TextStep {
  uint32_t kind, begin, bytes, with_begin, with_bytes;  // replaces one text by the other; prepends the first
};

template <typename T>
struct Table {
  const T* data;
  uint32_t count;
};

// The segment's first bytes; its tables are places and counts behind them, in the order of TokenizerTables.
struct TokenizerHeader {
  char magic[8];  // "PSTOKENS"
  uint32_t version, kind, flags, split, metaspace, num_tokens, unknown, bos, pad, num_tables;
};

struct TokenizerTables {
  Table<uint32_t> token_begins;    // [num_tokens + 1] into token_bytes
  Table<uint8_t> token_bytes;      // what a token decodes to
  Table<uint8_t> token_flags;      // [num_tokens]
  Table<uint32_t> merge_begins;    // [num_tokens + 1] into merges
  Table<Merge> merges;             // ascending by right within a left token
  Table<uint32_t> bytes;           // [256] tokens of bytes: the alphabet, or the fallback; or empty
  Table<Character> characters;     // ascending
  Table<uint32_t> words;           // hash table of tokens by their bytes, a power of two; or empty
  Table<Added> added;              // found in the text as it is; ascending by their bytes
  Table<Added> added_normalized;   // found in the normalized text
  Table<TextStep> steps;           // of the normalizer
  Table<uint32_t> prefix, suffix;  // special tokens around a text
  Table<int32_t> eos;              // tokens that end a text
  Table<uint8_t> text;
  Table<TrieNode> trie;   // of the model's tokens, one more than there are nodes; the first is the root
  Table<uint32_t> model;  // WordPiece: the most characters of a word; the node of the prefix inside words, or none
                          // Unigram: the score of an unknown character, as a Score
  Table<uint32_t> first_begins;  // [num_tokens + 1] into first_bytes
  Table<uint8_t> first_bytes;    // what a token decodes to as the first of a text
  Table<Score> scores;           // [num_tokens] or fewer: 0 for the others
  Table<uint32_t> charsmap;      // a double array, with places in charsmap_text
  Table<uint8_t> charsmap_text;  // replacements, each ended by a zero
};

struct Tokenizer {
  TokenizerHeader header;  // a copy, as are the places of the tables
  TokenizerTables tables;
  uint32_t added_firsts[2][8];  // bits: the first bytes of added tokens
  Vec<char> reason;             // why there is none; terminated
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

// Reads and checks a segment, which must outlive it.
ps_status open_tokenizer(const uint8_t* data, int64_t bytes, Tokenizer* out);
ps_status check_tables(const Tokenizer& tokenizer);

// The destination of ids: those that do not fit are only counted.
struct TokenSink {
  int32_t* ids;
  int64_t capacity, count;
  void add(uint32_t token) {
    if (count < capacity) ids[count] = static_cast<int32_t>(token);
    ++count;
  }
};
// Where the text of ids goes, likewise.
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
// `begin` is moved behind the ids whose text is given out.
ps_status decode_tokens(const Tokenizer& tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags, int64_t* begin,
                        TextSink* out);

// ---- parts of encoding ------------------------------------------------------------------------------------

struct Piece {
  Text text;
  uint32_t token;  // an added token; kNoToken: text
};

// Cuts a text at added tokens (AddedVocabulary of the `tokenizers` library, leftmost and longest first).
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
  int64_t scan_ = 0, done_ = 0;  // searched so far; given out so far
  int64_t spaces_begin_ = 0, spaces_end_ = 0;
  Piece waiting_{};
  bool has_waiting_ = false;
};

// The end of the word that begins at `at`.
int64_t end_of_word(SplitPattern pattern, Text text, int64_t at);

// The child of a node by a byte; 0, the root, which is no child: none.
uint32_t child_of(const Table<TrieNode>& trie, uint32_t node, uint8_t byte);
// kNoToken: the node ends no token.
uint32_t token_at(const Table<TrieNode>& trie, uint32_t node);

// Normalizes texts.  Memory is kept from text to text.
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
// Stops behind `most` bytes: the caller refuses what is longer.
bool push_replaced(Text from, Text what, Text with, int64_t most, Bytes* out);

// Appends the text with each character, and each cluster of less than six bytes, replaced as the map says.
bool push_mapped(const TokenizerTables& tables, Text text, int64_t most, Bytes* out);

// Words to the tokens with the highest sum of scores.  Memory is kept from word to word.
class Unigram {
 public:
  explicit Unigram(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  ps_status run(Text word, TokenSink* out);

 private:
  struct Node {  // of the best way to a place: its score, where its last token begins, and that token
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

// A word to the longest tokens from its beginning on; one unknown token where that fails.
void add_word_pieces(const Tokenizer& tokenizer, Text word, TokenSink* out);

struct WordPart {
  uint32_t token;
  int32_t previous, next;  // next kMerged: part of the symbol before
};
struct MergeChoice {
  uint32_t rank;
  int32_t place;
  uint32_t token;
};

// Words to tokens.  Memory is kept from word to word.
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
