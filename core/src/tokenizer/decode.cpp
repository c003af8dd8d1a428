// Decoding: token ids to text, the whole text or only the part that later ids cannot change.
// Hot: runs for every text.
#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 28;
constexpr uint8_t kReplacement[] = {0xEF, 0xBF, 0xBD};  // U+FFFD

void add_replacement(TextSink* out) { out->add(kReplacement, sizeof(kReplacement)); }

// Appends bytes as UTF-8 and replaces each maximal ill-formed part with one U+FFFD.  Returns how many bytes at the end
// may still become a character; they are not written.
int64_t add_lossy(Text text, TextSink* out) {
  for (int64_t at = 0; at < text.bytes;) {
    int32_t bad = 1;
    bool cut = false;
    const int32_t length = character_at(text, at, &bad, &cut);
    if (cut) return text.bytes - at;
    if (length) out->add(text.data + at, length);
    else add_replacement(out);
    at += length ? length : bad;
  }
  return 0;
}

class Decoder {
 public:
  Decoder(const Tokenizer& tokenizer, bool skip_special, TextSink* out)
      : tokenizer_(tokenizer), skip_special_(skip_special), out_(out) {}

  // False: out of memory.
  bool add(int32_t id) {
    if (static_cast<uint32_t>(id) >= tokenizer_.header.num_tokens) return true;  // like an id without a token
    const uint8_t flags = tokenizer_.tables.token_flags.data[id];
    if (skip_special_ && flags & TOKEN_SPECIAL) return true;
    if (tokenizer_.header.flags & TOKENIZER_FIRST_TEXTS) {
      if (!(flags & TOKEN_ABSENT)) add_by_place(static_cast<uint32_t>(id));
      return true;
    }
    const Text text = token_text(tokenizer_, static_cast<uint32_t>(id));
    if (!text.bytes) return true;
    const bool characters = tokenizer_.header.kind != TOKENIZER_BYTES;
    if (characters && flags & TOKEN_BYTE) return push_bytes(&pending_, text.data, text.bytes);
    if (characters) {
      finish();
      add_text(text);
      return true;
    }
    if (!pending_.size()) {
      const int64_t num_held = add_lossy(text, out_);
      return push_bytes(&pending_, text.data + text.bytes - num_held, num_held);
    }
    if (!push_bytes(&pending_, text.data, text.bytes)) return false;
    const int64_t num_held = add_lossy(Text{pending_.data(), pending_.size()}, out_);
    memmove(pending_.data(), pending_.data() + pending_.size() - num_held, static_cast<size_t>(num_held));
    while (pending_.size() > num_held) pending_.pop();
    return true;
  }

  // Later ids cannot change what has been written.
  bool is_clean() const { return !pending_.size(); }
  bool has_begun() const { return begun_; }
  void follow() { begun_ = true; }

  // Writes the pending bytes unchanged.
  void finish() {
    if (!pending_.size()) return;
    const Text text{pending_.data(), pending_.size()};
    if (tokenizer_.header.kind == TOKENIZER_BYTES) {
      add_replacement(out_);  // one truncated character
    } else if (find_ill_formed(text) < 0) {
      add_text(text);
    } else {
      begun_ = true;
      for (int64_t i = 0; i < text.bytes; ++i) add_replacement(out_);
    }
    pending_.clear();
  }

 private:
  void add_by_place(uint32_t id) {
    const Text text = begun_ ? token_text(tokenizer_, id) : first_text(tokenizer_, id);
    begun_ = true;
    if (text.bytes && add_lossy(text, out_)) add_replacement(out_);
  }

  void add_text(Text text) {
    if (!begun_ && tokenizer_.header.flags & TOKENIZER_STRIP_SPACE && text.data[0] == ' ')
      text = Text{text.data + 1, text.bytes - 1};
    begun_ = true;
    if (add_lossy(text, out_)) add_replacement(out_);
  }

  const Tokenizer& tokenizer_;
  const bool skip_special_;
  bool begun_ = false;
  Bytes pending_;  // byte-level: part of a character; byte fallback: a run of byte tokens, which is text only as a
                   // whole
  TextSink* out_;
};

}  // namespace

ps_status decode_tokens(const Tokenizer& tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags, int64_t* begin,
                        TextSink* out) {
  Decoder decoder(tokenizer, flags & PS_DECODE_SKIP_SPECIAL, out);
  if (*begin > 0) decoder.follow();
  const bool strips = tokenizer.header.flags & (TOKENIZER_STRIP_SPACE | TOKENIZER_FIRST_TEXTS);
  int64_t settled = *begin, settled_bytes = 0;
  for (int64_t i = *begin; i < num_ids; ++i) {
    if (ids[i] < 0)
      return fail(PS_INVALID_ARGUMENT, "ids[%lld]: expected 0 or more, got %d", static_cast<long long>(i), ids[i]);
    if (!decoder.add(ids[i]))
      return fail(PS_OUT_OF_MEMORY, "ids: no memory for %lld of them", static_cast<long long>(num_ids));
    if (out->bytes > kMaxTextBytes) {
      return fail(PS_INVALID_ARGUMENT, "ids: expected a text of at most %lld bytes, got more",
                  static_cast<long long>(kMaxTextBytes));
    }
    if (decoder.is_clean() && (!strips || decoder.has_begun())) {
      settled = i + 1;
      settled_bytes = out->bytes;
    }
  }
  if (flags & PS_DECODE_PARTIAL) {
    out->bytes = settled_bytes;
  } else {
    decoder.finish();
    settled = num_ids;
  }
  if (out->bytes <= out->capacity) *begin = settled;
  return PS_OK;
}

}  // namespace ps
