// The search for added tokens in a text.
// Hot: runs for every text.
#include "tokenizer/tokenizer.h"

namespace ps {

AddedSplit::AddedSplit(const Tokenizer& tokenizer, bool normalized, bool parse_special, Text text)
    : tokenizer_(tokenizer),
      table_(normalized ? tokenizer.tables.added_normalized : tokenizer.tables.added),
      firsts_(tokenizer.added_firsts[normalized]),
      parse_special_(parse_special),
      text_(text) {}

// Narrows the sorted tokens byte by byte to those that match the text so far.
const Added* AddedSplit::longest_at(int64_t at, int64_t* end) const {
  const Added* longest = nullptr;
  uint32_t low = 0, high = table_.count;
  const auto byte_of = [this](uint32_t index, uint32_t depth) {  // -1: the token ends here, and sorts first
    const Added& token = table_.data[index];
    const Text text = slice(tokenizer_.tables.text, token.begin, token.bytes);
    return depth < text.bytes ? static_cast<int32_t>(text.data[depth]) : -1;
  };
  const auto bound = [&](uint32_t depth, int32_t byte) {  // the first in [low, high) whose byte is at least `byte`
    uint32_t first = low, last = high;
    while (first < last) {
      const uint32_t middle = (first + last) / 2;
      if (byte_of(middle, depth) < byte) first = middle + 1;
      else last = middle;
    }
    return first;
  };
  for (uint32_t depth = 0; low < high && at + depth < text_.bytes; ++depth) {
    const int32_t byte = text_.data[at + depth];
    low = bound(depth, byte);
    high = bound(depth, byte + 1);
    if (low < high && byte_of(low, depth + 1) < 0) {
      longest = &table_.data[low];
      *end = at + depth + 1;
    }
  }
  return longest;
}

bool AddedSplit::accept(const Added& token, int64_t* begin, int64_t* end) {
  if (!parse_special_ && token.flags & ADDED_SPECIAL) return false;
  if (token.flags & ADDED_SINGLE_WORD) {
    int64_t behind = *end;
    if (*begin > 0 && classes_of(character_before(text_, *begin)) & kWord) return false;
    if (*end < text_.bytes && classes_of(next_character(text_, &behind)) & kWord) return false;
  }
  if (token.flags & ADDED_LSTRIP) {
    while (*begin > done_) {
      const uint32_t c = character_before(text_, *begin);
      if (!(classes_of(c) & kSpace)) break;
      *begin -= c < 0x80 ? 1 : c < 0x800 ? 2 : 3;
    }
    if (*begin < done_) *begin = done_;
  }
  if (token.flags & ADDED_RSTRIP) {
    if (*end < spaces_begin_ || *end > spaces_end_) {  // otherwise in the run of spaces found last
      spaces_begin_ = *end;
      for (int64_t at = *end; at < text_.bytes;) {
        if (!(classes_of(next_character(text_, &at)) & kSpace)) break;
        *end = at;
      }
      spaces_end_ = *end;
    }
    *end = spaces_end_;
  }
  return true;
}

bool AddedSplit::next(Piece* out) {
  if (has_waiting_) {
    has_waiting_ = false;
    *out = waiting_;
    return true;
  }
  while (table_.count && scan_ < text_.bytes) {
    const uint8_t first = text_.data[scan_];
    int64_t begin = scan_, end = 0;
    const Added* token = firsts_[first / 32] >> (first % 32) & 1 ? longest_at(scan_, &end) : nullptr;
    if (!token) {
      ++scan_;
      continue;
    }
    scan_ = end;
    if (!accept(*token, &begin, &end)) continue;
    const int64_t before = done_;
    done_ = end;
    const Piece piece{Text{text_.data + begin, end - begin}, token->token};
    if (begin <= before) {
      *out = piece;
      return true;
    }
    waiting_ = piece;
    has_waiting_ = true;
    *out = Piece{Text{text_.data + before, begin - before}, kNoToken};
    return true;
  }
  if (done_ == text_.bytes) return false;
  *out = Piece{Text{text_.data + done_, text_.bytes - done_}, kNoToken};
  done_ = text_.bytes;
  return true;
}

}  // namespace ps
