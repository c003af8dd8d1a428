// The C API for C++17: handles that close themselves, errors as exceptions.  Copy it beside your program.
#ifndef PENSTOCK_HPP
#define PENSTOCK_HPP

#include <penstock.h>

#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

// What a call refused; what() names the field.
struct Error : std::runtime_error {
  explicit Error(ps_status code) : std::runtime_error(ps_error_message()), status(code) {}
  ps_status status;
};
inline void check(ps_status status) {
  if (status != PS_OK) throw Error(status);
}

// A struct of the API that knows its own size.
template <typename T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

template <auto close>
struct Closer {
  template <typename T>
  void operator()(T* handle) const {
    close(handle);
  }
};
using Context = std::unique_ptr<ps_context, Closer<ps_context_destroy>>;
using Model = std::unique_ptr<ps_model, Closer<ps_model_close>>;
using Program = std::unique_ptr<ps_program, Closer<ps_program_destroy>>;
using TokenizerHandle = std::unique_ptr<ps_tokenizer, Closer<ps_tokenizer_close>>;

inline Context make_context(int num_threads = 0) {
  auto options = sized<ps_context_options>();
  options.num_threads = num_threads;
  ps_context* out = nullptr;
  check(ps_context_create(&options, &out));
  return Context(out);
}

inline Model open_model(const std::string& path) {
  auto options = sized<ps_model_options>();
  ps_model* out = nullptr;
  check(ps_model_open(path.c_str(), &options, &out));
  return Model(out);
}

inline ps_model_info describe(const Model& model) {
  auto info = sized<ps_model_info>();
  check(ps_model_describe(model.get(), &info));
  return info;
}

class Tokenizer {
 public:
  explicit Tokenizer(const Model& model) {
    ps_tokenizer* out = nullptr;
    check(ps_tokenizer_open(model.get(), &out));
    handle_.reset(out);
  }

  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids(text.size() + 8);
    for (;;) {
      int64_t count = 0;
      check(ps_tokenizer_encode(handle_.get(), text.data(), static_cast<int64_t>(text.size()), PS_ENCODE_ADD_SPECIAL, ids.data(),
                                static_cast<int64_t>(ids.size()), &count));
      const bool fits = count <= static_cast<int64_t>(ids.size());
      ids.resize(static_cast<size_t>(count));
      if (fits) return ids;
    }
  }

  bool is_end(int32_t token) const {
    auto info = sized<ps_tokenizer_info>();
    check(ps_tokenizer_describe(handle_.get(), &info));
    for (int32_t i = 0; i < info.num_eos_ids; ++i) {
      if (info.eos_ids[i] == token) return true;
    }
    return false;
  }

  // The text that `ids` add since the last call with the same `begin`; `last`: nothing follows.
  std::string decode(const std::vector<int32_t>& ids, int64_t* begin, bool last) const {
    const uint32_t flags = PS_DECODE_SKIP_SPECIAL | (last ? 0u : PS_DECODE_PARTIAL);
    std::string text(64, '\0');
    for (;;) {
      int64_t bytes = 0;
      check(ps_tokenizer_decode(handle_.get(), ids.data(), static_cast<int64_t>(ids.size()), flags, begin, text.data(),
                                static_cast<int64_t>(text.size()), &bytes));
      const bool fits = bytes <= static_cast<int64_t>(text.size());
      text.resize(static_cast<size_t>(bytes));
      if (fits) return text;
    }
  }

 private:
  TokenizerHandle handle_;
};

// One sequence of tokens over a program of its own.
class Sequence {
 public:
  Sequence(const Context& context, const Model& model, std::vector<int32_t> prompt, int32_t max_new)
      : num_groups_(describe(model).num_page_groups), tokens_(std::move(prompt)) {
    auto options = sized<ps_program_options>();
    num_pages_ = (static_cast<int32_t>(tokens_.size()) + max_new + PS_PAGE_TOKENS - 1) / PS_PAGE_TOKENS;
    options.max_tokens = static_cast<int32_t>(tokens_.size());
    options.max_requests = options.max_rows = 1;
    options.num_pages = num_pages_;
    ps_program* out = nullptr;
    check(ps_program_create(model.get(), context.get(), &options, &out));
    program_.reset(out);
    for (int32_t i = 0; i < num_groups_ * num_pages_; ++i) pages_.push_back(i % num_pages_);
  }

  // Runs what was not run yet and draws the next token, which is then the sequence's last.
  int32_t next(float temperature, uint64_t seed) {
    const auto count = static_cast<int32_t>(tokens_.size()) - num_done_;
    std::vector<int32_t> positions(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), num_done_);
    const int32_t starts[2] = {0, count}, last = count - 1, top_k = 0;
    const float top_p = 1;
    const int64_t counter[2] = {0, static_cast<int64_t>(tokens_.size())};
    auto batch = sized<ps_batch>();
    batch.num_tokens = count;
    batch.num_requests = batch.num_rows = 1;
    batch.page_table_width = num_pages_;
    batch.token_ids = tokens_.data() + num_done_;
    batch.positions = positions.data();
    batch.request_starts = starts;
    batch.page_tables = pages_.data();
    batch.output_rows = &last;
    auto sampling = sized<ps_sampling>();
    sampling.num_rows = 1;
    sampling.temperature = &temperature;
    sampling.top_k = &top_k;
    sampling.top_p = &top_p;
    sampling.seed = &seed;
    sampling.counter = counter;
    int32_t token = -1;
    auto sampled = sized<ps_sampled>();
    sampled.ids = &token;
    check(ps_program_step(program_.get(), &batch, &sampling, &sampled));
    num_done_ += count;
    tokens_.push_back(token);
    return token;
  }

 private:
  Program program_;
  int32_t num_groups_, num_pages_ = 0, num_done_ = 0;
  std::vector<int32_t> tokens_, pages_;
};

}  // namespace penstock

#endif
