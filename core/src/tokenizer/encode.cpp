// Encoding: text to token ids, through added tokens, normalizer, word split, merges and special tokens.
// Hot: runs for every text.
#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr uint8_t kSpaceMarkBytes[] = {0xE2, 0x96, 0x81};  // U+2581, which Metaspace uses for a space
constexpr Text kSpaceMark{kSpaceMarkBytes, sizeof(kSpaceMarkBytes)};

class Encoder {
 public:
  Encoder(const Tokenizer& tokenizer, bool parse_special, TokenSink* out)
      : tokenizer_(tokenizer),
        parse_special_(parse_special),
        normalizer_(tokenizer),
        merger_(tokenizer),
        unigram_(tokenizer),
        out_(out) {}

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
    PS_TRY(normalizer_.run(text, &text));
    AddedSplit split(tokenizer_, true, parse_special_, text);
    for (Piece piece; split.next(&piece);) {
      if (piece.token != kNoToken) out_->add(piece.token);
      else if (piece.text.bytes) PS_TRY(cut(piece.text, first && piece.text.data == text.data));
    }
    return PS_OK;
  }

  // Splits into words, which become tokens one by one.
  ps_status cut(Text text, bool first) {
    const TokenizerHeader& header = tokenizer_.header;
    if (header.split == SPLIT_BERT || header.split == SPLIT_SPACES) return cut_between_spaces(text, first);
    if (header.metaspace != METASPACE_NONE) return cut_at_space_marks(text, first);
    if (header.flags & TOKENIZER_PREFIX_SPACE && text.data[0] != ' ') {
      words_.clear();
      if (!words_.push(' ') || !push_bytes(&words_, text.data, text.bytes)) return no_memory(text);
      text = Text{words_.data(), words_.size()};
    }
    for (int64_t at = 0; at < text.bytes;) {
      const int64_t end = end_of_word(static_cast<SplitPattern>(header.split), text, at);
      PS_TRY(add_word(Text{text.data + at, end - at}));
      at = end;
    }
    return PS_OK;
  }

  // Words without white space; for BERT, each punctuation character is a word too.
  ps_status cut_between_spaces(Text text, bool first) {
    const bool bert = tokenizer_.header.split == SPLIT_BERT;
    int64_t begin = 0;
    for (int64_t at = 0; at < text.bytes;) {
      const int64_t place = at;
      const uint32_t c = next_character(text, &at);
      const bool space = classes_of(c) & kSpace, apart = bert && traits_of(c) & kPunctuation;
      if (!space && !apart) continue;
      if (begin < place) PS_TRY(cut_word(Text{text.data + begin, place - begin}, first && begin == 0));
      if (apart) PS_TRY(cut_word(Text{text.data + place, at - place}, first && place == 0));
      begin = at;
    }
    return begin < text.bytes ? cut_word(Text{text.data + begin, text.bytes - begin}, first && begin == 0) : PS_OK;
  }

  ps_status cut_word(Text word, bool first) {
    return tokenizer_.header.metaspace != METASPACE_NONE ? cut_at_space_marks(word, first) : add_word(word);
  }

  ps_status cut_at_space_marks(Text text, bool first) {
    const uint32_t scheme = tokenizer_.header.metaspace;
    const uint8_t space = ' ';
    words_.clear();
    const bool prepends = scheme == METASPACE_ALWAYS || (scheme == METASPACE_FIRST && first);
    if (prepends && text.data[0] != ' ' && !begins_with(text, 0, kSpaceMark) &&
        !push_bytes(&words_, kSpaceMark.data, kSpaceMark.bytes))
      return no_memory(text);
    if (!push_replaced(text, Text{&space, 1}, kSpaceMark, INT64_MAX, &words_)) return no_memory(text);
    const Text all{words_.data(), words_.size()};
    if (!(tokenizer_.header.flags & TOKENIZER_SPLIT_SPACES)) return add_word(all);
    for (int64_t at = 0; at < all.bytes;) {
      int64_t end = at + 1;
      while (end < all.bytes && !begins_with(all, end, kSpaceMark)) ++end;
      PS_TRY(add_word(Text{all.data + at, end - at}));
      at = end;
    }
    return PS_OK;
  }

  ps_status add_word(Text word) {
    if (tokenizer_.header.kind == TOKENIZER_UNIGRAM) return unigram_.run(word, out_);
    if (tokenizer_.header.kind != TOKENIZER_WORD_PIECE) return merger_.run(word, out_);
    add_word_pieces(tokenizer_, word, out_);
    return PS_OK;
  }

  static ps_status no_memory(Text text) {
    return fail(PS_OUT_OF_MEMORY, "text: no memory for %lld bytes", static_cast<long long>(text.bytes));
  }

  const Tokenizer& tokenizer_;
  const bool parse_special_;
  Normalizer normalizer_;
  Merger merger_;
  Unigram unigram_;
  Bytes words_;
  TokenSink* out_;
};

}  // namespace

ps_status encode_text(const Tokenizer& tokenizer, Text text, uint32_t flags, TokenSink* out) {
  if (text.bytes > kMaxTextBytes) {
    return fail(PS_INVALID_ARGUMENT, "bytes: expected at most %lld, got %lld", static_cast<long long>(kMaxTextBytes),
                static_cast<long long>(text.bytes));
  }
  const int64_t bad = find_ill_formed(text);
  if (bad >= 0)
    return fail(PS_INVALID_ARGUMENT, "text: expected UTF-8, got none at byte %lld", static_cast<long long>(bad));
  const bool around = flags & PS_ENCODE_ADD_SPECIAL;
  for (uint32_t i = 0; around && i < tokenizer.tables.prefix.count; ++i) out->add(tokenizer.tables.prefix.data[i]);
  Encoder encoder(tokenizer, flags & PS_ENCODE_PARSE_SPECIAL, out);
  PS_TRY(encoder.run(text));
  for (uint32_t i = 0; around && i < tokenizer.tables.suffix.count; ++i) out->add(tokenizer.tables.suffix.data[i]);
  return PS_OK;
}

}  // namespace ps
