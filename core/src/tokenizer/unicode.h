// UTF-8, character classes, case and normalization forms, equal to those of the `tokenizers` library.
#ifndef PENSTOCK_TOKENIZER_UNICODE_H
#define PENSTOCK_TOKENIZER_UNICODE_H

#include <stdint.h>

#include "base/memory.h"

namespace ps {

using Bytes = Vec<uint8_t>;

// A slice of UTF-8.
struct Text {
  const uint8_t* data;
  int64_t bytes;
};

// \p{L}, \p{N}, \s and \w.
constexpr uint32_t kLetter = 1, kNumber = 2, kSpace = 4, kWord = 8;
uint32_t classes_of(uint32_t code_point);

// For BERT's normalizer: characters to remove (control characters), to replace with a space, and to surround with
// spaces (Chinese), and its punctuation; marks that take no space of their own, and all marks.
constexpr uint32_t kDropped = 1, kBlank = 2, kPunctuation = 4, kChinese = 8, kNonspacing = 16, kMark = 32;
uint32_t traits_of(uint32_t code_point);
constexpr uint32_t kCapitalDottedI = 0x130;  // the one capital letter whose lowercase is two code points
// Lowercases a letter; returns other code points unchanged, and an i for kCapitalDottedI.
uint32_t lower_of(uint32_t code_point);

// The length of the well-formed character at `at`, 1 to 4; 0 if there is none. *cut, if given, is set if the text ends
// within a possible character; *bad is the length of the ill-formed sequence by Unicode's table 3-8.
int32_t character_at(Text text, int64_t at, int32_t* bad = nullptr, bool* cut = nullptr);
// Position of the first ill-formed UTF-8; -1: none.
int64_t find_ill_formed(Text text);

// Reads the character at *at and advances *at.  Ill-formed UTF-8 is read byte by byte.
uint32_t next_character(Text text, int64_t* at);
// The character that ends before `at`, which is above 0.
uint32_t character_before(Text text, int64_t at);
bool push_character(Bytes* out, uint32_t code_point);
bool push_bytes(Bytes* out, const uint8_t* data, int64_t bytes);

// The end of the extended grapheme cluster (UAX #29) that begins at `at`; does not join regional indicators.
int64_t end_of_cluster(Text text, int64_t at);

// Normalization forms (UAX #15) as flags: D has neither, C composes, KD is compatible, KC is both.
constexpr uint32_t kComposed = 1, kCompatible = 2;
// Appends the text in a normalization form; false if memory runs out.
bool push_normalized(Text text, uint32_t form, Bytes* out);

}  // namespace ps

#endif
