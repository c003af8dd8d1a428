// Opening the segment of a tokenizer: its header, and the ranges of its tables.
#include <initializer_list>

#include "tokenizer/tokenizer.h"

namespace ps {
namespace {

constexpr uint32_t kNumTables[] = {0, 15, 22};  // by version
constexpr int64_t kTablesBegin = sizeof(TokenizerHeader);

struct Source {
  const uint8_t* data;
  int64_t bytes;
  uint32_t num_tables;
  int64_t data_begin() const { return kTablesBegin + num_tables * 2 * int64_t{sizeof(uint32_t)}; }
};

template <typename T>
ps_status read_table(Source source, uint32_t index, const char* name, Table<T>* out) {
  if (index >= source.num_tables) {  // added in a later version
    *out = Table<T>{nullptr, 0};
    return PS_OK;
  }
  uint32_t place[2];  // in units of 4 bytes; elements
  memcpy(place, source.data + kTablesBegin + index * sizeof(place), sizeof(place));
  const int64_t begin = int64_t{place[0]} * 4, bytes = int64_t{place[1]} * static_cast<int64_t>(sizeof(T));
  if (begin < source.data_begin() || begin > source.bytes || bytes > source.bytes - begin) {
    return fail(PS_INVALID_FILE, "%s: expected a place within %lld bytes, got %u elements at byte %lld", name,
                static_cast<long long>(source.bytes), place[1], static_cast<long long>(begin));
  }
  *out = Table<T>{reinterpret_cast<const T*>(source.data + begin), place[1]};
  return PS_OK;
}

ps_status require_bytes(Source source, int64_t bytes) {
  if (source.bytes >= bytes) return PS_OK;
  return fail(PS_INVALID_FILE, "header: expected %lld bytes, got %lld", static_cast<long long>(bytes),
              static_cast<long long>(source.bytes));
}

ps_status read_header(Source& source, TokenizerHeader* h) {
  PS_TRY(require_bytes(source, kTablesBegin));
  memcpy(h, source.data, sizeof(*h));
  if (memcmp(h->magic, "PSTOKENS", sizeof(h->magic)) != 0) return fail(PS_INVALID_FILE, "magic: expected PSTOKENS");
  if (h->version == 0 || h->version > kTokenizerVersion)
    return fail(PS_UNSUPPORTED, "version: expected 1 to %u, got %u: export the model again", kTokenizerVersion,
                h->version);
  source.num_tables = kNumTables[h->version];
  if (h->num_tables != source.num_tables)
    return fail(PS_INVALID_FILE, "num_tables: expected %u, got %u", source.num_tables, h->num_tables);
  PS_TRY(require_bytes(source, source.data_begin()));
  if (h->kind >= NUM_TOKENIZER_KINDS)
    return fail(PS_UNSUPPORTED, "kind: expected 0 to %u, got %u", NUM_TOKENIZER_KINDS - 1, h->kind);
  if (h->flags & ~uint32_t{TOKENIZER_KNOWN_FLAGS})
    return fail(PS_UNSUPPORTED, "flags: found 0x%x, not all of them known", h->flags);
  if (h->split >= NUM_SPLITS) return fail(PS_UNSUPPORTED, "split: found %u, which is not known", h->split);
  if (h->metaspace >= NUM_METASPACES)
    return fail(PS_UNSUPPORTED, "metaspace: found %u, which is not known", h->metaspace);
  if (h->num_tokens > kMaxTokens || (h->kind == TOKENIZER_NONE) != (h->num_tokens == 0))
    return fail(PS_INVALID_FILE, "num_tokens: expected 1 to %u, got %u", kMaxTokens, h->num_tokens);
  for (const uint32_t id : {h->unknown, h->bos, h->pad}) {
    if (id != kNoToken && id >= kMaxTokens)
      return fail(PS_INVALID_FILE, "unknown, bos, pad: expected tokens, got %u", id);
  }
  return PS_OK;
}

ps_status read_tables(Source source, TokenizerTables* t) {
  PS_TRY(read_table(source, 0, "token_begins", &t->token_begins));
  PS_TRY(read_table(source, 1, "token_bytes", &t->token_bytes));
  PS_TRY(read_table(source, 2, "token_flags", &t->token_flags));
  PS_TRY(read_table(source, 3, "merge_begins", &t->merge_begins));
  PS_TRY(read_table(source, 4, "merges", &t->merges));
  PS_TRY(read_table(source, 5, "bytes", &t->bytes));
  PS_TRY(read_table(source, 6, "characters", &t->characters));
  PS_TRY(read_table(source, 7, "words", &t->words));
  PS_TRY(read_table(source, 8, "added", &t->added));
  PS_TRY(read_table(source, 9, "added_normalized", &t->added_normalized));
  PS_TRY(read_table(source, 10, "steps", &t->steps));
  PS_TRY(read_table(source, 11, "prefix", &t->prefix));
  PS_TRY(read_table(source, 12, "suffix", &t->suffix));
  PS_TRY(read_table(source, 13, "eos", &t->eos));
  PS_TRY(read_table(source, 14, "text", &t->text));
  PS_TRY(read_table(source, 15, "trie", &t->trie));
  PS_TRY(read_table(source, 16, "model", &t->model));
  PS_TRY(read_table(source, 17, "first_begins", &t->first_begins));
  PS_TRY(read_table(source, 18, "first_bytes", &t->first_bytes));
  PS_TRY(read_table(source, 19, "scores", &t->scores));
  PS_TRY(read_table(source, 20, "charsmap", &t->charsmap));
  return read_table(source, 21, "charsmap_text", &t->charsmap_text);
}

void find_firsts(const TokenizerTables& tables, const Table<Added>& added, uint32_t* firsts) {
  for (uint32_t i = 0; i < added.count; ++i) {
    const Text text = slice(tables.text, added.data[i].begin, added.data[i].bytes);
    if (text.bytes) firsts[text.data[0] / 32] |= 1u << (text.data[0] % 32);
  }
}

ps_status read_reason(const TokenizerTables& tables, Vec<char>* out) {
  if (find_ill_formed(Text{tables.text.data, tables.text.count}) >= 0)
    return fail(PS_INVALID_FILE, "text: expected UTF-8");
  if (!out->resize(int64_t{tables.text.count} + 1)) return fail(PS_OUT_OF_MEMORY, "text: out of memory");
  if (tables.text.count) memcpy(out->data(), tables.text.data, tables.text.count);
  return PS_OK;
}

}  // namespace

ps_status open_tokenizer(const uint8_t* data, int64_t bytes, Tokenizer* out) {
  Source source{data, bytes, 0};
  PS_TRY(read_header(source, &out->header));
  PS_TRY(read_tables(source, &out->tables));
  const TokenizerTables& t = out->tables;
  for (uint32_t i = 0; i < t.eos.count; ++i) {
    if (t.eos.data[i] < 0) return fail(PS_INVALID_FILE, "eos[%u]: expected 0 or more, got %d", i, t.eos.data[i]);
  }
  if (out->header.kind == TOKENIZER_NONE) return read_reason(t, &out->reason);
  if (!out->reason.resize(1)) return fail(PS_OUT_OF_MEMORY, "tokenizer: out of memory");
  PS_TRY(check_tables(*out));
  find_firsts(t, t.added, out->added_firsts[0]);
  find_firsts(t, t.added_normalized, out->added_firsts[1]);
  return PS_OK;
}

}  // namespace ps
