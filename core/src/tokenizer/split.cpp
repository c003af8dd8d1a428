// The regular expressions that split a text into words, with their alternatives in order.
//
//   GPT-2:    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3:  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|...
//             ... ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   Qwen2:    Llama 3's with \p{N} for \p{N}{1,3}
// Hot: runs for every text.
#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr uint32_t kLongS = 0x17F;  // the one non-ASCII character whose case folds to a letter of a contraction

// The end of the contraction at `at`; `at` if there is none.
int64_t end_of_contraction(Text text, int64_t at, bool any_case) {
  if (text.data[at] != '\'' || at + 1 == text.bytes) return at;
  int64_t end = at + 1;
  const uint32_t lower = any_case ? 32 : 0;  // lowercases ASCII letters, and turns no other character into a letter
  uint32_t first = next_character(text, &end);
  if (first < 0x80) first |= lower;
  if (any_case && first == kLongS) first = 's';
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return end;
  if (end == text.bytes) return at;
  const uint32_t second = text.data[end] | lower;
  if ((first == 'r' || first == 'v') && second == 'e') return end + 1;
  return first == 'l' && second == 'l' ? end + 1 : at;
}

// The end of the characters at `at` with a class among `wanted` (0: with none), at most `most`.
int64_t end_of_class(Text text, int64_t at, uint32_t wanted, int64_t most) {
  for (int64_t next = at; most && at < text.bytes; --most, at = next) {
    const uint32_t found = classes_of(next_character(text, &next)) & (kLetter | kNumber | kSpace);
    if (wanted ? !(found & wanted) : found != 0) break;
  }
  return at;
}

bool is_newline(uint8_t byte) { return byte == '\r' || byte == '\n'; }

int64_t end_of_spaces(Text text, int64_t at, bool newlines) {
  int64_t end = at, last = at, newline = -1;  // last: beginning of the last character of the run
  for (int64_t next = at; next < text.bytes; end = next) {
    const int64_t begin = next;
    if (!(classes_of(next_character(text, &next)) & kSpace)) break;
    if (is_newline(text.data[begin])) newline = next;
    last = begin;
  }
  if (newlines && newline >= 0) return newline;  // \s*[\r\n]+
  return end == text.bytes || last == at ? end : last;
}

}  // namespace

int64_t end_of_word(SplitPattern pattern, Text text, int64_t at) {
  if (pattern == SPLIT_NONE) return text.bytes;
  const bool gpt2 = pattern == SPLIT_GPT2;
  const int64_t contraction = end_of_contraction(text, at, !gpt2);
  if (contraction > at) return contraction;
  int64_t next = at;
  const uint32_t first = next_character(text, &next);
  const uint32_t classes = classes_of(first) & (kLetter | kNumber | kSpace);
  if (classes & kLetter) return end_of_class(text, next, kLetter, INT64_MAX);
  const bool space = first == ' ';
  if (gpt2 ? space : !(classes & kNumber) && first != '\r' && first != '\n') {
    const int64_t end = end_of_class(text, next, kLetter, INT64_MAX);
    if (end > next) return end;
  }
  if (classes & kNumber) {
    return gpt2                      ? end_of_class(text, next, kNumber, INT64_MAX)
           : pattern == SPLIT_LLAMA3 ? end_of_class(text, next, kNumber, 2)
                                     : next;
  }
  if (gpt2 && space) {
    const int64_t end = end_of_class(text, next, kNumber, INT64_MAX);
    if (end > next) return end;
  }
  if (space || !classes) {
    int64_t end = end_of_class(text, next, 0, INT64_MAX);
    if (end > next || !classes) {
      while (!gpt2 && end < text.bytes && is_newline(text.data[end])) ++end;
      return end;
    }
  }
  return end_of_spaces(text, at, !gpt2);
}

}  // namespace ps
