// Prefill, decode and streaming of one response.
#include "generate.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

namespace lite {
namespace {

constexpr int64_t kChunk = 512;      // prompt tokens per step
constexpr int32_t kStateWindow = 2;  // of a page group with recurrent states: one is read, one is written

int64_t pages_for(int64_t tokens) { return (tokens + PS_PAGE_TOKENS - 1) / PS_PAGE_TOKENS; }

int32_t kv_layout_of(const char* name) {
  if (strcmp(name, "f32") == 0) return PS_KV_F32;
  if (strcmp(name, "bf16") == 0) return PS_KV_BF16;
  if (strcmp(name, "int8") == 0) return PS_KV_INT8;
  if (strcmp(name, "int4") == 0) return PS_KV_INT4;
  return 0;  // the core's default
}

}  // namespace

volatile int interrupted = 0;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

Generator::~Generator() {
  ps_tokenizer_close(tokenizer_);
  ps_program_destroy(program_);
  ps_model_close(model_);
  ps_context_destroy(context_);
}

bool Generator::fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_, sizeof(error_), format, arguments);
  va_end(arguments);
  return false;
}

bool Generator::failed(const char* what) { return fail("%s%s%s", what, *what ? ": " : "", ps_error_message()); }

bool Generator::open(double start) {
  start_ = start;
  ps_context_options context{};
  context.struct_size = sizeof(context);
  context.num_threads = static_cast<int32_t>(options_.threads);
  if (ps_context_create(&context, &context_) != PS_OK) return failed("");
  for (int64_t i = 0; i < options_.ops.size; ++i) {
    if (ps_ops_load(options_.ops.data[i]) != PS_OK) return failed("--ops");
  }
  ps_model_options model{};
  model.struct_size = sizeof(model);
  model.verify = options_.verify;
  if (ps_model_open(options_.bundle, &model, &model_) != PS_OK) return failed("");
  info_.struct_size = sizeof(info_);
  if (ps_model_describe(model_, &info_) != PS_OK) return failed("");
  if (info_.kind != 0) return fail("BUNDLE: expected a language model for a PROMPT, got a general network (--input)");
  if (options_.huge && ps_model_load_huge(model_, context_) != PS_OK) return failed("--weights");
  for (int64_t i = 0; i < options_.stops.size; ++i) stops_.add(options_.stops.data[i]);
  if (info_.format_minor > info_.known_format_minor) {
    fprintf(stderr,
            "penstock-lite: header.minor: the file has format 1.%d, this version reads 1.%d: what is newer in it is "
            "not read\n",
            info_.format_minor, info_.known_format_minor);
  }
  choose_sampling();
  return open_tokenizer();
}

// With --ids no tokenizer is needed, but if there is one it knows the end tokens.
bool Generator::open_tokenizer() {
  const ps_status status = ps_tokenizer_open(model_, &tokenizer_);
  if (status != PS_OK) return options_.ids || fail("%s (--ids)", ps_error_message());
  const void* tables;
  if (ps_model_segment(model_, "tokenizer.bin", &tables, &tokenizer_bytes_) != PS_OK) return failed("");
  token_info_.struct_size = sizeof(token_info_);
  if (ps_tokenizer_describe(tokenizer_, &token_info_) != PS_OK) return failed("");
  if (!options_.ids && token_info_.num_tokens == 0)
    return fail("the bundle's tokenizer: %s: token ids in and out still work (--ids)", token_info_.unsupported);
  return true;
}

// Options override the bundle's defaults.  Naming a filter implies sampling, so it overrides a greedy default.
void Generator::choose_sampling() {
  const void* json;
  int64_t bytes;
  if (ps_model_segment(model_, "generation_config.json", &json, &bytes) != PS_OK) bytes = -1;
  const Defaults defaults = read_defaults(static_cast<const char*>(json), bytes);
  if (!*info_.tail) sampling_ = defaults;  // a graph that ends in token ids is sampled greedily
  const bool filters = options_.top_k >= 0 || options_.top_p >= 0;
  if (filters && sampling_.temperature == 0) sampling_.temperature = 1;
  if (options_.temperature >= 0) sampling_.temperature = options_.temperature;
  if (options_.top_k >= 0) sampling_.top_k = options_.top_k;
  if (options_.top_p >= 0) sampling_.top_p = options_.top_p;
  if (options_.max_tokens > 0) sampling_.max_tokens = options_.max_tokens;
  seed_ = options_.seed;
  if (!options_.has_seed && getrandom(&seed_, sizeof(seed_), 0) == static_cast<ssize_t>(sizeof(seed_))) seed_ >>= 1;
}

bool Generator::read_ids(const char* text, int64_t bytes) {
  const char *p = text, *end = text + bytes;
  const auto skip = [&] {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r')) ++p;
  };
  const auto skip_one = [&](char expected) {
    skip();
    const bool is_next = p < end && *p == expected;
    p += is_next;
    return is_next;
  };
  const bool list = skip_one('[');
  for (bool comma = false;; comma = skip_one(',')) {
    skip();
    if (!comma && (p == end || *p == ']')) break;
    int64_t id = 0;
    const char* first = p;
    while (p < end && *p >= '0' && *p <= '9' && id <= INT32_MAX) id = 10 * id + (*p++ - '0');
    if (p == first) {
      const int shown = end - first < 20 ? static_cast<int>(end - first) : 20;  // standard input is not null-terminated
      return fail("--ids: PROMPT: expected token ids, as 1,2,3 or 1 2 3 or [1, 2, 3], got \"%.*s\"", shown, first);
    }
    if (id >= info_.vocab_size)
      return fail("--ids: PROMPT: expected ids below the vocabulary of %d, got %lld", info_.vocab_size,
                  static_cast<long long>(id));
    tokens_.push(static_cast<int32_t>(id));
  }
  if (list && !skip_one(']')) return fail("--ids: PROMPT: expected a ] at the end of the list, got none");
  skip();
  return p == end || fail("--ids: PROMPT: expected nothing behind the ids, got \"%.*s\"",
                          end - p < 20 ? static_cast<int>(end - p) : 20, p);
}

bool Generator::encode(const char* text, int64_t bytes) {
  if (options_.ids) {
    if (!read_ids(text, bytes)) return false;
  } else {
    int64_t count = 0;
    for (tokens_.reserve(bytes + 8);; tokens_.reserve(count)) {
      const ps_status status =
          ps_tokenizer_encode(tokenizer_, text, bytes, PS_ENCODE_ADD_SPECIAL | PS_ENCODE_PARSE_SPECIAL, tokens_.data,
                              tokens_.capacity, &count);
      if (status != PS_OK) return failed("PROMPT");
      if (count <= tokens_.capacity) break;
    }
    tokens_.size = count;
  }
  num_prompt_ = tokens_.size;
  if (num_prompt_ == 0) return fail("PROMPT: expected one token at least, got none");
  if (num_prompt_ >= info_.context_len) {
    return fail("PROMPT: %lld tokens, but the context holds %d with one for the answer",
                static_cast<long long>(num_prompt_), info_.context_len);
  }
  return true;
}

// A step of n tokens with a window of w reads at most (n + w - 2) / 32 + 2 pages; they are used round-robin.
int32_t Generator::pages_of_group(int32_t group, int64_t max_tokens) const {
  const int64_t window = info_.page_windows[group];
  const int64_t seen = pages_for(max_tokens + window) + 2;
  return static_cast<int32_t>(window && seen < num_pages_ ? seen : num_pages_);
}

bool Generator::prepare() {
  const int64_t room = info_.context_len - num_prompt_;
  max_new_ = sampling_.max_tokens < room ? sampling_.max_tokens : room;
  if (info_.prefix_token >= 0)
    return fail("MODEL: expected a network that is one decoder or one encoder, got one with a prefix");
  if (info_.bidirectional && options_.max_tokens <= 0) max_new_ = 1;
  if (info_.bidirectional && max_new_ > 1) {
    return fail("--max-tokens: expected 1, got %lld: the network's attention is not causal, so only the token after "
                "the prompt "
                "can be computed",
                static_cast<long long>(max_new_));
  }
  for (int32_t group = 0; options_.prompt_lookup && group < info_.num_page_groups; ++group) {
    if (info_.page_windows[group] != kStateWindow) continue;
    return fail(
        "--prompt-lookup: expected 0, got %lld: the network has layers with a recurrent state, which cannot go back "
        "behind a wrong guess",
        static_cast<long long>(options_.prompt_lookup));
  }
  const char* kv_cache = options_.kv_cache;
  if (strcmp(kv_cache, "auto") == 0) {
    const void* json;
    int64_t bytes;
    if (ps_model_segment(model_, "config.json", &json, &bytes) != PS_OK) bytes = -1;
    kv_cache = stored_kv_cache(static_cast<const char*>(json), bytes);
    if (!kv_cache) return fail("config.json: kv_cache: expected auto, f32, bf16, int8 or int4 (--kv-cache TYPE)");
  }
  const int64_t longest = num_prompt_ + max_new_;
  chunk_ = num_prompt_ < kChunk || info_.bidirectional ? num_prompt_ : kChunk;
  num_pages_ = pages_for(longest);
  ps_program_options options{};
  options.struct_size = sizeof(options);
  const int64_t rows = 1 + options_.prompt_lookup;
  options.max_tokens = static_cast<int32_t>(chunk_ > rows ? chunk_ : rows);
  options.max_requests = 1;
  options.max_rows = static_cast<int32_t>(rows);
  options.num_pages = info_.num_states ? static_cast<int32_t>(num_pages_) : 0;
  for (int32_t group = 0; group < info_.num_page_groups; ++group)
    group_pages_.push(pages_of_group(group, options.max_tokens));
  options.group_pages = info_.num_states ? group_pages_.data : nullptr;
  options.kv_layout = kv_layout_of(kv_cache);
  plan_.struct_size = sizeof(plan_);
  if (ps_program_plan(model_, context_, &options, &plan_) != PS_OK) return failed("--max-tokens, --kv-cache");
  if (ps_program_create(model_, context_, &options, &program_) != PS_OK) return failed("--max-tokens, --kv-cache");
  rows_.set(sampling_, seed_, num_prompt_);
  tokens_.reserve(longest);
  for (int64_t i = 0; i < longest; ++i) positions_.push(static_cast<int32_t>(i));
  for (int32_t group = 0; group < info_.num_page_groups; ++group) {
    for (int64_t i = 0; i < num_pages_; ++i) pages_.push(static_cast<int32_t>(i % group_pages_.data[group]));
  }
  timings_.load_s = now() - start_;
  return true;
}

// Runs tokens begin to begin + count and draws the token after each of the last num_rows.
bool Generator::step(int64_t begin, int64_t count, int32_t num_rows, int32_t* drawn) {
  const int32_t starts[2] = {0, static_cast<int32_t>(count)};
  int32_t outputs[kMaxRows];
  for (int32_t i = 0; i < num_rows; ++i) outputs[i] = static_cast<int32_t>(count) - num_rows + i;
  ps_batch batch{};
  batch.struct_size = sizeof(batch);
  batch.num_tokens = static_cast<int32_t>(count);
  batch.num_requests = 1;
  batch.num_rows = num_rows;
  batch.page_table_width = static_cast<int32_t>(num_pages_);
  batch.token_ids = tokens_.data + begin;
  batch.positions = positions_.data + begin;
  batch.request_starts = starts;
  batch.page_tables = pages_.data;
  batch.output_rows = outputs;
  if (num_rows == 0) return ps_program_run(program_, &batch) == PS_OK || failed("step");
  const ps_sampling sampling = rows_.sampling(tokens_.data, begin + count - num_rows + 1, num_rows);
  ps_sampled sampled{};
  sampled.struct_size = sizeof(sampled);
  sampled.ids = drawn;
  return ps_program_step(program_, &batch, &sampling, &sampled) == PS_OK || failed("step");
}

bool Generator::prefill(int32_t* token) {
  for (int64_t begin = 0; begin < num_prompt_ && !interrupted;) {
    const int64_t count = num_prompt_ - begin < chunk_ ? num_prompt_ - begin : chunk_;
    if (!step(begin, count, begin + count == num_prompt_, token)) return false;
    begin += count;
  }
  return true;
}

bool Generator::is_end(int32_t token) const {
  if (options_.ignore_eos || options_.bench) return false;
  for (int32_t i = 0; i < token_info_.num_eos_ids; ++i) {
    if (token_info_.eos_ids[i] == token) return true;
  }
  return false;
}

// Appends the new tokens' text to the response; at the end also text that might have become something else.  A stop
// string ends the response.
bool Generator::emit_text(Finish* finish, bool ends, Emit emit, void* to) {
  if (options_.ids) return true;
  const uint32_t flags = PS_DECODE_SKIP_SPECIAL | (*finish ? 0 : PS_DECODE_PARTIAL);
  const int64_t count = num_new() - ends;  // an end token has no text
  int64_t bytes = 256;
  do {
    text_.reserve(bytes);
    if (ps_tokenizer_decode(tokenizer_, tokens_.data + num_prompt_, count, flags, &decoded_, text_.data, text_.capacity,
                            &bytes) != PS_OK)
      return failed("text");
  } while (bytes > text_.capacity);
  if (stops_.empty()) return bytes == 0 || emit(to, text_.data, bytes) || fail("%s", "");
  if (stops_.push(text_.data, bytes)) {
    *finish = FINISH_STOP;
  } else if (*finish) {
    stops_.flush();
  }
  if (stops_.bytes() && !emit(to, stops_.text(), stops_.bytes())) return fail("%s", "");
  stops_.taken();
  return true;
}

bool Generator::bench_prefill() {
  int32_t token;
  for (int i = 0; i < 3; ++i) {
    const double begin = now();
    if (!prefill(&token)) return false;
    const double took = now() - begin;
    if (i == 0 || took < timings_.warm_prefill_s) timings_.warm_prefill_s = took;
  }
  return true;
}

// Draws the next token and, with prompt lookup, as many more as were drafted correctly: a token drawn after a draft
// token counts only if that draft token is what was drawn.  So the tokens equal those of single steps.
bool Generator::next(int32_t* drawn, int64_t* count) {
  const int64_t room = max_new_ - num_new() - 1;
  const int64_t most = options_.prompt_lookup < room ? options_.prompt_lookup : room;
  int32_t* guess = tokens_.data + tokens_.size;  // room is reserved for the longest response
  const int64_t guessed = most > 0 ? draft_from(tokens_.data, tokens_.size, most, guess) : 0;
  *count = 1;
  if (guessed == 0) return step(tokens_.size - 1, 1, 1, drawn);
  // A step fails if any of its rows does, even one after a wrong draft token: then run again without the draft.
  if (!step(tokens_.size - 1, 1 + guessed, static_cast<int32_t>(1 + guessed), drawn))
    return step(tokens_.size - 1, 1, 1, drawn);
  while (*count <= guessed && drawn[*count - 1] == guess[*count - 1]) ++*count;
  num_guessed_ += guessed;
  num_accepted_ += *count - 1;
  return true;
}

// Draws one more token of the response and writes its text; FINISH_NONE: continue.
Finish Generator::take(int32_t token, Emit emit, void* to) {
  tokens_.push(token);
  const bool ends = is_end(token);
  Finish finish = ends ? FINISH_STOP : num_new() >= max_new_ ? FINISH_LENGTH : FINISH_NONE;
  if (!emit_text(&finish, ends, emit, to)) return FINISH_ERROR;
  if (num_new() == 1) {
    first_ = now();
    timings_.first_token_s = first_ - start_;
  } else if (finish) {
    timings_.decode_s = now() - first_;
  }
  return finish;
}

Finish Generator::run(Emit emit, void* to) {
  int32_t drawn[kMaxRows];
  int64_t count = 1;
  const double begin = now();
  if (!prefill(drawn)) return FINISH_ERROR;
  while (!interrupted) {
    for (int64_t i = 0; i < count; ++i) {
      const Finish finish = take(drawn[i], emit, to);
      if (num_new() == 1) timings_.prefill_s = first_ - begin;
      if (finish == FINISH_NONE) continue;
      return finish != FINISH_ERROR && options_.bench && !bench_prefill() ? FINISH_ERROR : finish;
    }
    if (!next(drawn, &count)) return FINISH_ERROR;
  }
  return FINISH_INTERRUPT;
}

}  // namespace lite
