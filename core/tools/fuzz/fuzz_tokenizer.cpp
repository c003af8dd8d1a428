// Mutates the segments of tokenizers and opens them; those that open encode texts, and decode ids whole and in pieces.
// For any bytes, the core must return a status and a message, and the pieces must make up the whole: a crash, a hang or
// a sanitizer report is a failure.  Some segments change after they were opened, and each while it is opened, as a
// mapped file may.
//
//   fuzz_tokenizer ITERATIONS SEED SEGMENT...
//
// fuzz_tokenizer 1 SEED+NUMBER reproduces only mutant NUMBER.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "penstock.h"
#include "random.h"
#include "seeds.h"
#include "tokenizer/tokenizer.h"

namespace {

using Segment = std::vector<uint8_t>;

constexpr size_t kHead = 224;  // header and table offsets of the newest version
constexpr unsigned kHangSeconds = 20;
constexpr int64_t kReportEvery = 100000;
constexpr int kRaces = 3000;

struct Tally {
  int64_t opened = 0, encoded = 0, tokens = 0, refused[PS_INTERNAL + 1] = {};
  bool expect_message(ps_status status) {
    if (status == PS_OK) return true;
    if (status < 0 || status >= PS_INTERNAL || !*ps_error_message()) {
      fprintf(stderr, "status %d with the message \"%s\"\n", status, ps_error_message());
      return false;
    }
    ++refused[status];
    return true;
  }
};

void edit(Segment* s, Random* r, size_t begin, size_t end) {
  static const uint32_t values[] = {
      0, 1, 2, 255, 256, 257, 65535, 1u << 24, (1u << 24) + 1, INT32_MAX, 1u << 31, UINT32_MAX, UINT32_MAX - 1};
  if (end > s->size()) end = s->size();
  if (end < begin + 4) return;
  const size_t at = begin + r->below((end - begin) / 4) * 4;
  uint32_t value;
  memcpy(&value, s->data() + at, 4);
  if (r->below(2)) value += static_cast<uint32_t>(r->below(9)) - 4;
  else if (r->below(2)) value = static_cast<uint32_t>(r->below(600));
  else value = values[r->below(sizeof(values) / sizeof(values[0]))];
  memcpy(s->data() + at, &value, 4);
}

void flip(Segment* s, Random* r) {
  for (uint64_t i = 0, n = 1 + r->below(4); i < n && !s->empty(); ++i)
    (*s)[r->below(s->size())] ^= static_cast<uint8_t>(1u << r->below(8));
}

void mutate(Segment* s, Random* r) {
  for (uint64_t i = 0, n = r->below(4); i < n; ++i) {
    switch (r->below(8)) {
      case 0:
      case 1: edit(s, r, 8, kHead); break;
      case 2: flip(s, r); break;
      case 3: s->resize(r->below(2) ? r->below(s->size() + 1) : s->size() + r->below(64)); break;
      default: edit(s, r, kHead, s->size());
    }
  }
}

// Characters of every length, white space, pieces of tokens, and sometimes invalid UTF-8.
std::string text_of(const ps::Tokenizer& t, Random* r) {
  static const char* const parts[] = {" ",
                                      "  ",
                                      "\n",
                                      "\r\n",
                                      "'s",
                                      "'LL",
                                      "a",
                                      "aa",
                                      "word",
                                      "123",
                                      "e\xCC\x81",
                                      "\xEA\xB0\x80",
                                      "\xE1\x84\x80\xE1\x85\xA1",
                                      "\xE6\x97\xA5",
                                      "\xF0\x9F\x99\x82",
                                      "\xC2\xA0",
                                      "\xE2\x96\x81",
                                      "<s>",
                                      "<|end|>",
                                      "\xC5\xBF",
                                      "\xEF\xA4\x80"};
  std::string text;
  for (uint64_t i = 0, n = r->below(r->below(50) ? 24 : 600); i < n; ++i) {
    const ps::Text token = ps::token_text(t, static_cast<uint32_t>(r->below(t.header.num_tokens)));
    switch (r->below(8)) {
      case 0: text.push_back(static_cast<char>(r->below(128))); break;
      case 1:
        if (r->below(100) == 0) text.push_back(static_cast<char>(128 + r->below(128)));
        break;
      case 2:
      case 3:
        if (ps::find_ill_formed(token) < 0)
          text.append(reinterpret_cast<const char*>(token.data), static_cast<size_t>(token.bytes));
        break;
      default: text += parts[r->below(sizeof(parts) / sizeof(parts[0]))];
    }
  }
  return text;
}

bool decode(const ps::Tokenizer& t, const std::vector<int32_t>& ids, uint32_t flags, int64_t* begin, std::string* out,
            Tally* tally) {
  std::vector<char> small(ids.size());  // often too small, so that the call is repeated
  ps::TextSink sink{small.data(), static_cast<int64_t>(small.size()), 0};
  const int64_t before = *begin;
  ps_status status = ps::decode_tokens(t, ids.data(), static_cast<int64_t>(ids.size()), flags, begin, &sink);
  if (status != PS_OK) return tally->expect_message(status);
  if (sink.bytes > sink.capacity) {
    if (*begin != before) return false;
    small.resize(static_cast<size_t>(sink.bytes));
    sink = ps::TextSink{small.data(), sink.bytes, 0};
    status = ps::decode_tokens(t, ids.data(), static_cast<int64_t>(ids.size()), flags, begin, &sink);
    if (status != PS_OK) return tally->expect_message(status);
  }
  if (sink.bytes > sink.capacity) return false;
  out->append(small.data(), static_cast<size_t>(sink.bytes));
  return true;
}

bool check_decoding(const ps::Tokenizer& t, std::vector<int32_t> ids, Random* r, Tally* tally) {
  for (uint64_t i = r->below(6); i; --i) ids.push_back(r->index(int64_t{t.header.num_tokens} + 2));
  const uint32_t flags = r->below(2) ? PS_DECODE_SKIP_SPECIAL : 0;
  std::string whole, pieces;
  int64_t begin = 0;
  if (!decode(t, ids, flags, &begin, &whole, tally)) return false;
  if (ps::find_ill_formed(
          ps::Text{reinterpret_cast<const uint8_t*>(whole.data()), static_cast<int64_t>(whole.size())}) >= 0) {
    fprintf(stderr, "a text that is no UTF-8\n");
    return false;
  }
  begin = 0;
  for (size_t n = 1; n <= ids.size() && n < 100; ++n) {
    const std::vector<int32_t> some(ids.begin(), ids.begin() + static_cast<int64_t>(n));
    if (!decode(t, some, flags | PS_DECODE_PARTIAL, &begin, &pieces, tally)) return false;
  }
  if (!decode(t, ids, flags, &begin, &pieces, tally)) return false;
  if (whole == pieces) return true;
  fprintf(stderr, "pieces are not the whole: \"%s\", \"%s\"\n", pieces.c_str(), whole.c_str());
  return false;
}

bool encode(const ps::Tokenizer& t, Random* r, Tally* tally, std::vector<int32_t>* ids) {
  const std::string text = text_of(t, r);
  const std::vector<char> exact(text.begin(), text.end());  // without a terminator after it
  ids->assign(r->below(2) ? text.size() : r->below(8), -1);
  ps::TokenSink sink{ids->data(), static_cast<int64_t>(ids->size()), 0};
  const ps::Text view{reinterpret_cast<const uint8_t*>(exact.data()), static_cast<int64_t>(exact.size())};
  const ps_status status = ps::encode_text(t, view, static_cast<uint32_t>(r->below(4)), &sink);
  if (status != PS_OK) {
    ids->clear();
    return tally->expect_message(status);
  }
  ++tally->encoded;
  tally->tokens += sink.count;
  if (sink.count < static_cast<int64_t>(ids->size())) ids->resize(static_cast<size_t>(sink.count));
  return true;
}

bool try_mutant(Segment segment, Random* r, Tally* tally) {
  segment.shrink_to_fit();
  ps::Tokenizer t{};
  const ps_status status = ps::open_tokenizer(segment.data(), static_cast<int64_t>(segment.size()), &t);
  if (status != PS_OK) return tally->expect_message(status);
  if (t.header.kind == ps::TOKENIZER_NONE) return true;
  ++tally->opened;
  std::vector<int32_t> ids;
  for (int i = 0; i < 3; ++i) {
    if (!encode(t, r, tally, &ids)) return false;
    for (const int32_t id : ids) {
      if (id < 0 || id >= static_cast<int32_t>(t.header.num_tokens)) {
        fprintf(stderr, "the id %d of %u\n", id, t.header.num_tokens);
        return false;
      }
    }
    if (!check_decoding(t, ids, r, tally)) return false;
  }
  if (r->below(4)) return true;
  for (int i = 0; i < 20; ++i) edit(&segment, r, 0, segment.size());  // it is open already: only accesses matter
  if (!encode(t, r, tally, &ids)) return false;
  for (int32_t& id : ids) id = id < 0 ? 0 : id;
  std::string ignored;
  int64_t begin = 0;
  return decode(t, ids, 0, &begin, &ignored, tally);
}

// Opens a segment repeatedly while another thread makes its merges and added tokens point far beyond it and back.
void open_while_it_changes(Segment segment) {
  constexpr uint32_t kFar = 1u << 29;
  ps::Tokenizer sound{};
  if (ps::open_tokenizer(segment.data(), static_cast<int64_t>(segment.size()), &sound) != PS_OK) return;
  std::vector<volatile uint32_t*> places;
  const uint32_t middle = sound.header.num_tokens / 2;
  if (sound.header.num_tokens) {
    for (uint32_t i = middle; i <= middle + 1; ++i)
      places.push_back(const_cast<uint32_t*>(sound.tables.merge_begins.data) + i);
  }
  if (sound.tables.added.count) places.push_back(&const_cast<ps::Added*>(sound.tables.added.data)->begin);
  std::vector<uint32_t> kept;
  for (volatile uint32_t* place : places) kept.push_back(uint32_t{*place});
  std::atomic<bool> over{false};
  std::thread writer([&] {
    while (!over.load(std::memory_order_relaxed)) {
      for (size_t i = 0; i < places.size(); ++i) *places[i] = kFar + static_cast<uint32_t>(i);
      for (size_t i = 0; i < places.size(); ++i) *places[i] = kept[i];
    }
  });
  for (int i = 0; i < kRaces; ++i) {
    ps::Tokenizer t{};
    ps::open_tokenizer(segment.data(), static_cast<int64_t>(segment.size()), &t);  // any status is valid
  }
  over = true;
  writer.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: fuzz_tokenizer ITERATIONS SEED SEGMENT...\n");
    return 2;
  }
  const int64_t iterations = atoll(argv[1]);
  const uint64_t seed = strtoull(argv[2], nullptr, 10);
  std::vector<Segment> seeds;
  if (!read_seeds(argv + 3, argc - 3, kHead, "segment", &seeds)) return 2;
  for (const Segment& segment : seeds) open_while_it_changes(segment);
  Tally tally;
  for (int64_t i = 0; i < iterations; ++i) {
    Random random{(seed + static_cast<uint64_t>(i)) * 0xD1342543DE82EF95u};
    Segment segment = seeds[random.below(seeds.size())];
    mutate(&segment, &random);
    const itimerval limit{{0, 0}, {kHangSeconds, 0}};  // CPU time
    setitimer(ITIMER_PROF, &limit, nullptr);
    if (!try_mutant(segment, &random, &tally)) {
      fprintf(stderr, "mutant %lld of seed %llu failed\n", static_cast<long long>(i),
              static_cast<unsigned long long>(seed));
      return 1;
    }
    if ((i + 1) % kReportEvery == 0) fprintf(stderr, "%lld mutants\n", static_cast<long long>(i + 1));
  }
  printf("mutants %lld opened %lld encoded %lld tokens %lld invalid_argument %lld invalid_file %lld unsupported %lld\n",
         static_cast<long long>(iterations), static_cast<long long>(tally.opened),
         static_cast<long long>(tally.encoded), static_cast<long long>(tally.tokens),
         static_cast<long long>(tally.refused[PS_INVALID_ARGUMENT]),
         static_cast<long long>(tally.refused[PS_INVALID_FILE]), static_cast<long long>(tally.refused[PS_UNSUPPORTED]));
  return 0;
}
