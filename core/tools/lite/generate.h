// Generation of one response: open a bundle, run a prompt, and stream the sampled tokens.
#ifndef PENSTOCK_LITE_GENERATE_H
#define PENSTOCK_LITE_GENERATE_H

#include "array.h"
#include "defaults.h"
#include "options.h"
#include "penstock.h"
#include "rows.h"
#include "stops.h"

namespace lite {

struct Timings {
  double load_s = 0;          // from the start of main to the program being ready
  double first_token_s = 0;   // from the start of main
  double prefill_s = 0;       // of the prompt, including the first token
  double decode_s = 0;        // of the other tokens
  double warm_prefill_s = 0;  // with --bench: the prompt again, the best of three runs
};

enum Finish { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_INTERRUPT, FINISH_ERROR };

// Receives text as it becomes final; false ends the response.
using Emit = bool (*)(void* to, const char* text, int64_t bytes);

class Generator {
 public:
  explicit Generator(const Options& options) : options_(options) {}
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;
  ~Generator();
  // False: error() gives the reason. `start` is when the process began, in seconds of CLOCK_MONOTONIC.
  bool open(double start);
  bool encode(const char* text, int64_t bytes);  // a prompt, or its ids with --ids
  bool prepare();                                // allocates memory for the prompt and its response
  // Draws tokens until an end token, the maximum number, an interrupt or an error.
  Finish run(Emit emit, void* to);

  const char* error() const { return error_; }
  const Array<int32_t>& tokens() const { return tokens_; }  // prompt, then response
  int64_t num_prompt() const { return num_prompt_; }
  int64_t num_new() const { return tokens_.size - num_prompt_; }
  const ps_model_info& info() const { return info_; }
  // An upper bound of the bytes of a prompt that fits: tokens have a few bytes each, so 256 leave ample room.
  int64_t max_prompt_bytes() const { return int64_t{256} * info_.context_len; }
  int64_t weight_bytes() const { return plan_.weight_bytes; }
  int64_t tokenizer_bytes() const { return tokenizer_bytes_; }  // of the tables that a tokenizer uses in place
  int64_t plan_bytes() const { return plan_.total_bytes + tokenizer_bytes_; }
  const Timings& timings() const { return timings_; }
  uint64_t seed() const { return seed_; }
  int64_t num_guessed() const { return num_guessed_; }    // draft tokens of prompt lookup
  int64_t num_accepted() const { return num_accepted_; }  // draft tokens that were right
  int32_t num_threads() const { return ps_context_num_threads(context_); }

 private:
  bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  bool failed(const char* what);  // adds the library's message
  bool open_tokenizer();
  void choose_sampling();
  bool read_ids(const char* text, int64_t bytes);
  bool prefill(int32_t* token);
  bool step(int64_t begin, int64_t count, int32_t num_rows, int32_t* drawn);
  bool next(int32_t* drawn, int64_t* count);
  Finish take(int32_t token, Emit emit, void* to);
  bool emit_text(Finish* finish, bool ends, Emit emit, void* to);
  bool is_end(int32_t token) const;
  int32_t pages_of_group(int32_t group, int64_t max_tokens) const;
  bool bench_prefill();

  const Options& options_;
  ps_context* context_ = nullptr;
  ps_model* model_ = nullptr;
  ps_program* program_ = nullptr;
  ps_tokenizer* tokenizer_ = nullptr;
  ps_model_info info_{};
  ps_plan plan_{};
  ps_tokenizer_info token_info_{};
  Defaults sampling_;
  Timings timings_;
  Rows rows_;
  Stops stops_;
  uint64_t seed_ = 0;
  double start_ = 0, first_ = 0;  // time of the first token
  int64_t num_prompt_ = 0, max_new_ = 0, decoded_ = 0, chunk_ = 0, num_pages_ = 0, num_guessed_ = 0, num_accepted_ = 0;
  int64_t tokenizer_bytes_ = 0;
  Array<int32_t> tokens_, positions_, pages_, group_pages_;
  Array<char> text_;
  char error_[2200] = "";
};

double now();
extern volatile int interrupted;  // set by a signal handler

}  // namespace lite

#endif
