// Prints what a bundle computes, bit for bit, using only penstock.h: two machines, or two instruction levels, that keep
// the contract of docs/explanation/numerics.md print the same. tests/devices/test_aarch64.py compiles and runs it.
//
//   step_check BUNDLE TOKENS STEPS
//   step_check BUNDLE encode < TEXTS
//
// The first form prints a line for each step, for every KV layout: the tokens, a hash of all logits, the largest logit.
// The second prints a line for each text (four bytes of length, then UTF-8): its ids, and whether decoding restores it.
//
// The steps: a prompt in two chunks, the second together with the prompt of another request, then STEPS tokens of both:
// greedy for the first request, drawn with a seed for the other.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "penstock.h"

namespace {

using Ids = std::vector<int32_t>;

void check(ps_status status, const char* what) {
  if (status == PS_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, ps_error_message());
  std::exit(1);
}

template <typename T>
T sized() {  // fields that this program does not know are zero
  T value = {};
  value.struct_size = sizeof value;
  return value;
}

struct Request {
  Ids tokens;
  float temperature;
  int64_t done;  // number of tokens computed so far
};

struct Run {
  ps_program* program;
  ps_model_info info;
  int32_t width;  // pages of a request
  const char* layout;
};

// FNV-1a, 64 bit.
uint64_t hash_of(const float* values, int64_t count) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    hash = (hash ^ bits) * 0x100000001b3u;
  }
  return hash;
}

void print_step(const Run& run, const Ids& sampled) {
  const float* logits;
  int32_t rows, vocab;
  check(ps_program_logits(run.program, &logits, &rows, &vocab), "logits");
  float largest = logits[0];
  for (int64_t i = 0; i < int64_t(rows) * vocab; ++i) largest = logits[i] > largest ? logits[i] : largest;
  std::printf("%s %s %d rows %016llx %a:", run.info.scheme, run.layout, rows,
              static_cast<unsigned long long>(hash_of(logits, int64_t(rows) * vocab)), double(largest));
  for (int32_t id : sampled) std::printf(" %d", id);
  std::printf("\n");
}

// Computes `counts[i]` tokens of request i, with the logits of all; a request whose tokens are all computed gets its
// next.
// its next.
void step(const Run& run, std::vector<Request*> requests, const Ids& counts) {
  Ids tokens, positions, starts = {0}, pages, rows, top_k, ids;
  std::vector<float> temperature, top_p;
  std::vector<uint64_t> seed;
  std::vector<int64_t> counter;
  const int32_t num_requests = int32_t(requests.size());
  for (int32_t r = 0; r < num_requests; ++r) {
    Request& request = *requests[size_t(r)];
    for (int32_t i = 0; i < counts[size_t(r)]; ++i, ++request.done) {
      rows.push_back(int32_t(tokens.size()));
      tokens.push_back(request.tokens[size_t(request.done)]);
      positions.push_back(int32_t(request.done));
      temperature.push_back(request.temperature);
      top_k.push_back(request.temperature > 0 ? 50 : 0);
      top_p.push_back(request.temperature > 0 ? 0.9f : 1.f);
      seed.push_back(42);
      counter.push_back(0);
      counter.push_back(request.done + 1);
    }
    starts.push_back(int32_t(tokens.size()));
  }
  for (int32_t group = 0; group < run.info.num_page_groups; ++group)
    for (int32_t r = 0; r < num_requests; ++r)
      for (int32_t page = 0; page < run.width; ++page) pages.push_back(r * run.width + page);
  ids.resize(rows.size());
  const int32_t n = int32_t(rows.size());
  ps_batch batch = sized<ps_batch>();
  batch.num_tokens = batch.num_rows = n;
  batch.num_requests = num_requests;
  batch.page_table_width = run.width;
  batch.token_ids = tokens.data();
  batch.positions = positions.data();
  batch.request_starts = starts.data();
  batch.page_tables = pages.data();
  batch.output_rows = rows.data();
  ps_sampling sampling = sized<ps_sampling>();
  sampling.num_rows = n;
  sampling.temperature = temperature.data();
  sampling.top_k = top_k.data();
  sampling.top_p = top_p.data();
  sampling.seed = seed.data();
  sampling.counter = counter.data();
  ps_sampled sampled = sized<ps_sampled>();
  sampled.ids = ids.data();
  check(ps_program_step(run.program, &batch, &sampling, &sampled), "step");
  print_step(run, ids);
  for (int32_t r = 0; r < num_requests; ++r) {
    Request& request = *requests[size_t(r)];
    if (size_t(request.done) == request.tokens.size()) request.tokens.push_back(ids[size_t(starts[size_t(r) + 1] - 1)]);
  }
}

Ids encode(const ps_tokenizer* tokenizer, const std::string& text) {
  int64_t count = 0;
  check(ps_tokenizer_encode(tokenizer, text.data(), int64_t(text.size()), 0, nullptr, 0, &count), "encode");
  Ids ids(static_cast<size_t>(count), 0);
  check(ps_tokenizer_encode(tokenizer, text.data(), int64_t(text.size()), 0, ids.data(), count, &count), "encode");
  return ids;
}

std::string decode(const ps_tokenizer* tokenizer, const Ids& ids) {
  int64_t bytes = 0;
  check(ps_tokenizer_decode(tokenizer, ids.data(), int64_t(ids.size()), 0, nullptr, nullptr, 0, &bytes), "decode");
  std::string text(static_cast<size_t>(bytes), '\0');
  check(ps_tokenizer_decode(tokenizer, ids.data(), int64_t(ids.size()), 0, nullptr, &text[0], bytes, &bytes), "decode");
  return text;
}

void check_texts(const ps_tokenizer* tokenizer) {
  for (uint32_t bytes; std::fread(&bytes, 4, 1, stdin) == 1;) {
    std::string text(bytes, '\0');
    if (std::fread(&text[0], 1, bytes, stdin) != bytes) std::exit(1);
    const Ids ids = encode(tokenizer, text);
    std::printf("%s", decode(tokenizer, ids) == text ? "same:" : "other:");
    for (int32_t id : ids) std::printf(" %d", id);
    std::printf("\n");
  }
}

// A repeated text, and tokens that no text encodes to.
Ids prompt(const ps_tokenizer* tokenizer, int32_t vocab, size_t tokens) {
  const Ids text = encode(tokenizer, "def add(a, b):\n    \"\"\"Return the sum.\"\"\"\n    return a + b\n\n\n");
  Ids ids;
  uint32_t state = 1;
  while (ids.size() < tokens) {
    const size_t i = ids.size();
    state = state * 1664525u + 1013904223u;
    ids.push_back(i % 4 == 3 ? int32_t((state >> 8) % uint32_t(vocab)) : text[i % text.size()]);
  }
  return ids;
}

void check_layout(ps_model* model, ps_context* context, const Ids& tokens, int32_t steps, ps_kv_layout layout,
                  const char* name) {
  const int32_t n = int32_t(tokens.size()), first = n * 2 / 3, other = n / 2;
  Run run = {nullptr, sized<ps_model_info>(), (n + steps + PS_PAGE_TOKENS - 1) / PS_PAGE_TOKENS, name};
  check(ps_model_describe(model, &run.info), "describe");
  ps_program_options options = sized<ps_program_options>();
  options.max_tokens = options.max_rows = n + other;
  options.max_requests = 2;
  options.num_pages = 2 * run.width;
  options.kv_layout = layout;
  check(ps_program_create(model, context, &options, &run.program), "program");
  Request a = {tokens, 0.f, 0}, b = {Ids(tokens.rbegin(), tokens.rbegin() + other), 0.9f, 0};
  step(run, {&a}, {first});
  step(run, {&a, &b}, {n - first, other});
  for (int32_t i = 1; i < steps; ++i) step(run, {&a, &b}, {1, 1});
  ps_program_destroy(run.program);
}

}  // namespace

int main(int argc, char** argv) {
  const bool texts = argc == 3 && std::strcmp(argv[2], "encode") == 0;
  const int tokens = argc == 4 ? std::atoi(argv[2]) : 0, steps = argc == 4 ? std::atoi(argv[3]) : 0;
  if (!texts && (tokens < 3 || steps < 1)) {
    std::fprintf(stderr, "usage: %s BUNDLE TOKENS STEPS, from 3 and 1, or BUNDLE encode\n", argv[0]);
    return 2;
  }
  ps_context_options options = sized<ps_context_options>();
  options.num_threads = 2;
  const ps_model_options model_options = sized<ps_model_options>();
  ps_context* context;
  ps_model* model;
  ps_tokenizer* tokenizer;
  check(ps_context_create(&options, &context), "context");
  check(ps_model_open(argv[1], &model_options, &model), argv[1]);
  check(ps_tokenizer_open(model, &tokenizer), "tokenizer");
  std::fprintf(stderr, "level %s\n", ps_context_cpu_level(context));
  if (texts) {
    check_texts(tokenizer);
  } else {
    ps_model_info info = sized<ps_model_info>();
    check(ps_model_describe(model, &info), "describe");
    const Ids ids = prompt(tokenizer, info.vocab_size, size_t(tokens));
    check_layout(model, context, ids, steps, PS_KV_F32, "f32");
    check_layout(model, context, ids, steps, PS_KV_BF16, "bf16");
    check_layout(model, context, ids, steps, PS_KV_INT8, "int8");
    check_layout(model, context, ids, steps, PS_KV_INT4, "int4");
  }
  ps_tokenizer_close(tokenizer);
  ps_model_close(model);
  ps_context_destroy(context);
  return 0;
}
