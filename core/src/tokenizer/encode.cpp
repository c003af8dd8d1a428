// Encoding: a text to token ids by added tokens, normalizer, word split, merges and special tokens.
#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int64_t kMaxGrowth = 16;  // of a text by the normalizer: steps could multiply
constexpr uint8_t kSpaceMark[] = {0xE2, 0x96, 0x81};  // U+2581, which Metaspace writes for a space
constexpr int64_t kSpaceMarkBytes = sizeof(kSpaceMark);

bool begins_with(Text text, int64_t at, const uint8_t* data, int64_t bytes) {
  return bytes <= text.bytes - at && memcmp(text.data + at, data, static_cast<size_t>(bytes)) == 0;
}

// Stops behind `most` bytes: the caller refuses what is longer.
bool replace(Text from, Text what, Text with, int64_t most, Bytes* out) {
  int64_t copied = 0;
  for (int64_t at = 0; what.bytes && at + what.bytes <= from.bytes && out->size() <= most;) {
    if (!begins_with(from, at, what.data, what.bytes)) {
      ++at;
      continue;
    }
    if (!push_bytes(out, from.data + copied, at - copied) || !push_bytes(out, with.data, with.bytes)) return false;
    copied = at += what.bytes;
  }
  return push_bytes(out, from.data + copied, from.bytes - copied);
}

class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, bool parse_special, TokenSink* out)
      : tokenizer_(tokenizer), parse_special_(parse_special), merger_(tokenizer), out_(out) {}

  ps_status run(Text text) {
    AddedSplit split(tokenizer_, false, parse_special_, text);
    for (Piece piece; split.next(&piece);) {
      if (piece.token != kNoToken) out_->add(piece.token);
      else if (piece.text.bytes) PS_TRY(normalize(piece.text, piece.text.data == text.data));
    }
    return PS_OK;
  }

 private:
  ps_status normalize(Text text, bool first) {
    const Table<TextStep>& steps = tokenizer_.tables.steps;
    const int64_t most = kMaxGrowth * (text.bytes + kMaxGrowth);
    Bytes* target = &normalized_[0];
    for (uint32_t i = 0; i < steps.count; ++i) {
      const TextStep step = steps.data[i];
      const Text what = slice(tokenizer_.tables.text, step.begin, step.bytes);
      const Text with = slice(tokenizer_.tables.text, step.with_begin, step.with_bytes);
      target->clear();
      bool ok = true;
      switch (step.kind) {
        case STEP_NFC:
          ok = push_nfc(text, target);
          break;
        case STEP_PREPEND:
          ok = !text.bytes || (push_bytes(target, what.data, what.bytes) && push_bytes(target, text.data, text.bytes));
          break;
        default:
          ok = replace(text, what, with, most, target);
      }
      if (!ok) return fail(PS_OUT_OF_MEMORY, "text: no memory to normalize %lld bytes", static_cast<long long>(text.bytes));
      if (target->size() > most) return fail(PS_UNSUPPORTED, "steps[%u]: the text grows more than %lld times", i, static_cast<long long>(kMaxGrowth));
      text = Text{target->data(), target->size()};
      target = target == &normalized_[0] ? &normalized_[1] : &normalized_[0];
    }
    AddedSplit split(tokenizer_, true, parse_special_, text);
    for (Piece piece; split.next(&piece);) {
      if (piece.token != kNoToken) out_->add(piece.token);
      else if (piece.text.bytes) PS_TRY(cut(piece.text, first && piece.text.data == text.data));
    }
    return PS_OK;
  }

  // Into words, which are merged one by one.
  ps_status cut(Text text, bool first) {
    const TokenizerHeader& header = tokenizer_.header;
    if (header.metaspace != METASPACE_NONE) return cut_at_spaces(text, first);
    if (header.flags & TOKENIZER_PREFIX_SPACE && text.data[0] != ' ') {
      words_.clear();
      if (!words_.push(' ') || !push_bytes(&words_, text.data, text.bytes)) return no_memory(text);
      text = Text{words_.data(), words_.size()};
    }
    for (int64_t at = 0; at < text.bytes;) {
      const int64_t end = end_of_word(static_cast<SplitPattern>(header.split), text, at);
      PS_TRY(merger_.run(Text{text.data + at, end - at}, out_));
      at = end;
    }
    return PS_OK;
  }

  ps_status cut_at_spaces(Text text, bool first) {
    const uint32_t scheme = tokenizer_.header.metaspace;
    const uint8_t space = ' ';
    words_.clear();
    const bool prepends = scheme == METASPACE_ALWAYS || (scheme == METASPACE_FIRST && first);
    if (prepends && text.data[0] != ' ' && !begins_with(text, 0, kSpaceMark, kSpaceMarkBytes) &&
        !push_bytes(&words_, kSpaceMark, kSpaceMarkBytes)) {
      return no_memory(text);
    }
    if (!replace(text, Text{&space, 1}, Text{kSpaceMark, kSpaceMarkBytes}, INT64_MAX, &words_)) return no_memory(text);
    const Text all{words_.data(), words_.size()};
    if (!(tokenizer_.header.flags & TOKENIZER_SPLIT_SPACES)) return merger_.run(all, out_);
    for (int64_t at = 0; at < all.bytes;) {
      int64_t end = at + 1;
      while (end < all.bytes && !begins_with(all, end, kSpaceMark, kSpaceMarkBytes)) ++end;
      PS_TRY(merger_.run(Text{all.data + at, end - at}, out_));
      at = end;
    }
    return PS_OK;
  }

  static ps_status no_memory(Text text) {
    return fail(PS_OUT_OF_MEMORY, "text: no memory for %lld bytes", static_cast<long long>(text.bytes));
  }

  const Tokenizer& tokenizer_;
  const bool parse_special_;
  Merger merger_;
  Bytes normalized_[2], words_;
  TokenSink* out_;
};

}  // namespace

ps_status encode_text(const Tokenizer& tokenizer, Text text, uint32_t flags, TokenSink* out) {
  if (text.bytes > kMaxTextBytes) {
    return fail(PS_INVALID_ARGUMENT, "bytes: expected at most %lld, found %lld", static_cast<long long>(kMaxTextBytes),
                static_cast<long long>(text.bytes));
  }
  const int64_t bad = find_ill_formed(text);
  if (bad >= 0) return fail(PS_INVALID_ARGUMENT, "text: expected UTF-8, found none at byte %lld", static_cast<long long>(bad));
  const bool around = flags & PS_ENCODE_ADD_SPECIAL;
  for (uint32_t i = 0; around && i < tokenizer.tables.prefix.count; ++i) out->add(tokenizer.tables.prefix.data[i]);
  Encoder encoder(tokenizer, flags & PS_ENCODE_PARSE_SPECIAL, out);
  PS_TRY(encoder.run(text));
  for (uint32_t i = 0; around && i < tokenizer.tables.suffix.count; ++i) out->add(tokenizer.tables.suffix.data[i]);
  return PS_OK;
}

}  // namespace ps
