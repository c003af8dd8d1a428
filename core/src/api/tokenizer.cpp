// The C API for tokenizers.
#include "api/tokenizer.h"

using namespace ps;

namespace {

constexpr char kSegment[] = "tokenizer.bin";

int32_t id_or_none(uint32_t token) { return token == kNoToken ? -1 : static_cast<int32_t>(token); }

ps_status require_compiled(const ps_tokenizer* tokenizer) {
  const Tokenizer& t = tokenizer->tokenizer;
  if (t.header.kind != TOKENIZER_NONE) return PS_OK;
  return fail(PS_UNSUPPORTED, "%s: token ids in and out still work", t.reason.data());
}

}  // namespace

ps_status ps_tokenizer_open(const ps_model* model, ps_tokenizer** out) {
  PS_TRY(ps::check_open(model));
  PS_TRY(require(out, "out"));
  *out = nullptr;
  const Segment* segment = find_segment(*model, kSegment);
  if (!segment)
    return fail(PS_UNSUPPORTED, "segment %s: the bundle has none: token ids in and out still work", kSegment);
  const ps_status status = make_tokenizer(model->file.data() + segment->offset, segment->bytes, model, out);
  return status == PS_OK ? PS_OK : prefix(status, "segment %s: ", kSegment);
}

ps_status ps::make_tokenizer(const void* data, int64_t bytes, const ps_model* model, ps_tokenizer** out) {
  ps_tokenizer* tokenizer = create_object<ps_tokenizer>();
  if (!tokenizer) return fail(PS_OUT_OF_MEMORY, "tokenizer: out of memory");
  if (model) tokenizer->model = hold(model);
  const ps_status status = open_tokenizer(static_cast<const uint8_t*>(data), bytes, &tokenizer->tokenizer);
  if (status != PS_OK) {
    destroy_object(tokenizer);
    return status;
  }
  return open_handle(tokenizer, HANDLE_TOKENIZER, out);
}

void ps_tokenizer_close(ps_tokenizer* tokenizer) { close_handle(tokenizer, HANDLE_TOKENIZER); }

ps_status ps_tokenizer_describe(const ps_tokenizer* tokenizer, ps_tokenizer_info* out) {
  PS_TRY(check_open(tokenizer));
  PS_TRY(require(out, "out"));
  static const char* const kinds[] = {"", "byte-level BPE", "BPE with byte fallback", "WordPiece", "Unigram"};
  const Tokenizer& t = tokenizer->tokenizer;
  ps_tokenizer_info info{};
  info.num_tokens = static_cast<int32_t>(t.header.num_tokens);
  info.bos_id = id_or_none(t.header.bos);
  info.pad_id = id_or_none(t.header.pad);
  info.unk_id = id_or_none(t.header.unknown);
  info.num_eos_ids = static_cast<int32_t>(t.tables.eos.count);
  info.eos_ids = t.tables.eos.data;
  info.kind = kinds[t.header.kind];
  info.unsupported = t.reason.data();
  return write_struct(info, out, "out");
}

ps_status ps_tokenizer_encode(const ps_tokenizer* tokenizer, const char* text, int64_t bytes, uint32_t flags,
                              int32_t* ids, int64_t capacity, int64_t* count) {
  PS_TRY(check_open(tokenizer));
  PS_TRY(require((text || bytes == 0) && (ids || capacity == 0) && count, "text, ids, count"));
  if (bytes < 0 || capacity < 0) return fail(PS_INVALID_ARGUMENT, "bytes, capacity: expected 0 or more, got less");
  if (flags & ~(PS_ENCODE_ADD_SPECIAL | PS_ENCODE_PARSE_SPECIAL))
    return fail(PS_INVALID_ARGUMENT, "flags: found 0x%x, not all of them known", flags);
  PS_TRY(require_compiled(tokenizer));
  TokenSink sink{ids, capacity, 0};
  PS_TRY(encode_text(tokenizer->tokenizer, Text{reinterpret_cast<const uint8_t*>(text), bytes}, flags, &sink));
  *count = sink.count;
  return PS_OK;
}

ps_status ps_tokenizer_decode(const ps_tokenizer* tokenizer, const int32_t* ids, int64_t num_ids, uint32_t flags,
                              int64_t* begin, char* text, int64_t capacity, int64_t* bytes) {
  PS_TRY(check_open(tokenizer));
  PS_TRY(require((ids || num_ids == 0) && (text || capacity == 0) && bytes, "ids, text, bytes"));
  if (num_ids < 0 || capacity < 0) return fail(PS_INVALID_ARGUMENT, "num_ids, capacity: expected 0 or more, got less");
  if (flags & ~(PS_DECODE_SKIP_SPECIAL | PS_DECODE_PARTIAL))
    return fail(PS_INVALID_ARGUMENT, "flags: found 0x%x, not all of them known", flags);
  int64_t from_start = 0;
  if (!begin) begin = &from_start;
  if (*begin < 0 || *begin > num_ids) {
    return fail(PS_INVALID_ARGUMENT, "begin: expected 0 to %lld, got %lld", static_cast<long long>(num_ids),
                static_cast<long long>(*begin));
  }
  PS_TRY(require_compiled(tokenizer));
  TextSink sink{text, capacity, 0};
  PS_TRY(decode_tokens(tokenizer->tokenizer, ids, num_ids, flags, begin, &sink));
  *bytes = sink.bytes;
  return PS_OK;
}
