// The steps of a normalizer, one after the other.
// Hot: runs for every text.
#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr uint32_t kDotAbove = 0x307;

bool push_lower(Text text, Bytes* out) {
  for (int64_t at = 0; at < text.bytes;) {
    const uint32_t c = next_character(text, &at);
    if (!push_character(out, lower_of(c))) return false;
    if (c == kCapitalDottedI && !push_character(out, kDotAbove)) return false;
  }
  return true;
}

bool push_clean(Text text, Bytes* out) {
  for (int64_t at = 0; at < text.bytes;) {
    const uint32_t c = next_character(text, &at), traits = traits_of(c);
    if (!(traits & kDropped) && !push_character(out, traits & kBlank ? ' ' : c)) return false;
  }
  return true;
}

bool push_chinese(Text text, Bytes* out) {
  for (int64_t at = 0; at < text.bytes;) {
    const uint32_t c = next_character(text, &at);
    const bool apart = traits_of(c) & kChinese;
    if ((apart && !out->push(' ')) || !push_character(out, c) || (apart && !out->push(' '))) return false;
  }
  return true;
}

// https://github.com/google/sentencepiece/blob/master/src/builder.cc, the rules nmt_nfkc.
bool push_nmt(Text text, Bytes* out) {
  for (int64_t at = 0; at < text.bytes;) {
    const uint32_t c = next_character(text, &at);
    if ((c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F) continue;
    const bool blank = c == 9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 || (c >= 0x200B && c <= 0x200F) ||
                       c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
    if (!push_character(out, blank ? ' ' : c)) return false;
  }
  return true;
}

bool push_replaced_spaces(Text text, Text with, Bytes* out) {
  for (int64_t at = 0, end; at < text.bytes; at = end) {
    for (end = at; end < text.bytes && text.data[end] == ' ';) ++end;
    if (end > at + 1) {
      if (!push_bytes(out, with.data, with.bytes)) return false;
    } else {
      end = at + 1;
      if (!out->push(text.data[at])) return false;
    }
  }
  return true;
}

bool push_without(Text text, uint32_t dropped, Bytes* out) {
  for (int64_t at = 0; at < text.bytes;) {
    const uint32_t c = next_character(text, &at);
    if (!(traits_of(c) & dropped) && !push_character(out, c)) return false;
  }
  return true;
}

// Removes white space at the beginning or the end of the text.
Text strip(Text text, bool left) {
  while (left && text.bytes) {
    int64_t next = 0;
    if (!(classes_of(next_character(text, &next)) & kSpace)) break;
    text = Text{text.data + next, text.bytes - next};
  }
  while (!left && text.bytes) {
    const uint32_t c = character_before(text, text.bytes);
    if (!(classes_of(c) & kSpace)) break;
    text.bytes -= std::min<int64_t>(text.bytes, c < 0x80 ? 1 : c < 0x800 ? 2 : 3);
  }
  return text;
}

}  // namespace

bool begins_with(Text text, int64_t at, Text what) {
  return what.bytes <= text.bytes - at && memcmp(text.data + at, what.data, static_cast<size_t>(what.bytes)) == 0;
}

bool push_replaced(Text from, Text what, Text with, int64_t most, Bytes* out) {
  int64_t copied = 0;
  for (int64_t at = 0; what.bytes && at + what.bytes <= from.bytes && out->size() <= most;) {
    if (!begins_with(from, at, what)) {
      ++at;
      continue;
    }
    if (!push_bytes(out, from.data + copied, at - copied) || !push_bytes(out, with.data, with.bytes)) return false;
    copied = at += what.bytes;
  }
  return push_bytes(out, from.data + copied, from.bytes - copied);
}

bool Normalizer::apply(const TextStep& step, Text text, int64_t most, Bytes* out) const {
  const Text what = slice(tokenizer_.tables.text, step.begin, step.bytes);
  const Text with = slice(tokenizer_.tables.text, step.with_begin, step.with_bytes);
  switch (step.kind) {
    case STEP_NFC: return push_normalized(text, kComposed, out);
    case STEP_PREPEND:
      return !text.bytes || (push_bytes(out, what.data, what.bytes) && push_bytes(out, text.data, text.bytes));
    case STEP_REPLACE: return push_replaced(text, what, with, most, out);
    case STEP_NFD: return push_normalized(text, 0, out);
    case STEP_LOWERCASE: return push_lower(text, out);
    case STEP_CLEAN: return push_clean(text, out);
    case STEP_CHINESE: return push_chinese(text, out);
    case STEP_STRIP_ACCENTS: return push_without(text, kNonspacing, out);
    case STEP_STRIP_MARKS: return push_without(text, kMark, out);
    case STEP_CHARSMAP: return push_mapped(tokenizer_.tables, text, most, out);
    case STEP_NFKC: return push_normalized(text, kComposed | kCompatible, out);
    case STEP_NFKD: return push_normalized(text, kCompatible, out);
    case STEP_NMT: return push_nmt(text, out);
    case STEP_REPLACE_SPACES: return push_replaced_spaces(text, what, out);
    default: {
      const Text kept = strip(text, step.kind == STEP_STRIP_LEFT);
      return push_bytes(out, kept.data, kept.bytes);
    }
  }
}

ps_status Normalizer::run(Text text, Text* out) {
  const Table<TextStep>& steps = tokenizer_.tables.steps;
  const int64_t most = kMaxGrowth * (text.bytes + kMaxGrowth);
  Bytes* target = &buffers_[0];
  for (uint32_t i = 0; i < steps.count; ++i) {
    target->clear();
    if (!apply(steps.data[i], text, most, target))
      return fail(PS_OUT_OF_MEMORY, "text: no memory to normalize %lld bytes", static_cast<long long>(text.bytes));
    if (target->size() > most)
      return fail(PS_UNSUPPORTED, "steps[%u]: the text grows more than %u times", i, kMaxGrowth);
    text = Text{target->data(), target->size()};
    target = target == &buffers_[0] ? &buffers_[1] : &buffers_[0];
  }
  *out = text;
  return PS_OK;
}

}  // namespace ps
