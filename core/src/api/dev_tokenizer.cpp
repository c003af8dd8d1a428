// The functions of penstock_dev.h for tokenizers.
#include "api/tokenizer.h"
#include "penstock_dev.h"

using namespace ps;

ps_status ps_tokenizer_open_data(const void* data, int64_t bytes, ps_tokenizer** out) {
  PS_TRY(require(data && out, "data, out"));
  *out = nullptr;
  if (bytes < 0) return fail(PS_INVALID_ARGUMENT, "bytes: expected 0 or more, got %lld", static_cast<long long>(bytes));
  if (reinterpret_cast<uintptr_t>(data) % 8)
    return fail(PS_INVALID_ARGUMENT, "data: expected at a multiple of 8 bytes");
  return make_tokenizer(data, bytes, nullptr, out);
}

ps_status ps_tokenizer_tokens(const ps_tokenizer* tokenizer, const uint32_t** begins, const uint8_t** text,
                              int64_t* text_bytes, const uint8_t** flags, int32_t* num_tokens) {
  PS_TRY(check_open(tokenizer));
  PS_TRY(require(begins && text && text_bytes && flags && num_tokens, "begins, text, text_bytes, flags, num_tokens"));
  static_assert(TOKEN_SPECIAL == 1, "as the header says");
  const Tokenizer& t = tokenizer->tokenizer;
  *begins = t.tables.token_begins.data;
  *text = t.tables.token_bytes.data;
  *text_bytes = t.tables.token_bytes.count;
  *flags = t.tables.token_flags.data;
  *num_tokens = static_cast<int32_t>(t.header.num_tokens);
  return PS_OK;
}
