// UTF-8, character classes, case and normalization forms, equal to those of the `tokenizers` library.
#ifndef PENSTOCK_TOKENIZER_UNICODE_H
#define PENSTOCK_TOKENIZER_UNICODE_H

#include <stdint.h>

#include "base/memory.h"

namespace ps {

using Bytes = Vec<uint8_t>;

// A run of UTF-8.
struct Text {
  const uint8_t* data;
  int64_t bytes;
};

// \p{L}, \p{N}, \s and \w.
constexpr uint32_t kLetter = 1, kNumber = 2, kSpace = 4, kWord = 8;
uint32_t classes_of(uint32_t code_point);

// What BERT's normalizer drops (control characters), makes a space and surrounds with spaces (Chinese), and its
// punctuation; marks that take no space of their own, and all marks.
constexpr uint32_t kDropped = 1, kBlank = 2, kPunctuation = 4, kChinese = 8, kNonspacing = 16, kMark = 32;
uint32_t traits_of(uint32_t code_point);
constexpr uint32_t kCapitalDottedI = 0x130;  // the one capital letter whose small form is two code points
// The small letter of a capital one; other code points as they are, and kCapitalDottedI as an i.
uint32_t lower_of(uint32_t code_point);

// The bytes of the well-formed character at `at`: 1 to 4.  0: none begins there.  When the text ends within what could
// become one, *cut (where given) says so; *bad is the bytes of the ill-formed sequence, as Unicode's table 3-8 counts
// them.
int32_t character_at(Text text, int64_t at, int32_t* bad = nullptr, bool* cut = nullptr);
// Where the text is no UTF-8; -1: nowhere.
int64_t find_ill_formed(Text text);

// The character at *at, which moves behind it.  Of text that is no UTF-8 each byte is one.
uint32_t next_character(Text text, int64_t* at);
// The character that ends before `at`, above 0.
uint32_t character_before(Text text, int64_t at);
bool push_character(Bytes* out, uint32_t code_point);
bool push_bytes(Bytes* out, const uint8_t* data, int64_t bytes);

// The end of the extended grapheme cluster (UAX #29) that begins at `at`, but for those of regional indicators.
int64_t end_of_cluster(Text text, int64_t at);

// Normalization forms (UAX #15) are sums of these: D has neither, C composes, KD is compatible, KC is both.
constexpr uint32_t kComposed = 1, kCompatible = 2;
// Appends the text in a normalization form; false when memory runs out.
bool push_normalized(Text text, uint32_t form, Bytes* out);

}  // namespace ps

#endif
