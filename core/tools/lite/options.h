// The command-line options of penstock-lite.
#ifndef PENSTOCK_LITE_OPTIONS_H
#define PENSTOCK_LITE_OPTIONS_H

#include <stdint.h>

#include "array.h"

namespace lite {

constexpr int32_t kMaxTokens = INT32_MAX;

// Options not given (below 0; for the seed has_seed) come from the bundle's generation_config.json.
struct Options {
  const char* bundle = nullptr;
  const char* prompt = nullptr;
  int64_t max_tokens = -1, top_k = -1, threads = 0, prompt_lookup = 0;
  double temperature = -1, top_p = -1;
  uint64_t seed = 0;
  const char* kv_cache = "auto";
  Array<const char*> stops, ops, inputs, outputs;
  bool has_seed = false, ids = false, bench = false, json = false, ignore_eos = false, huge = false, verify = false,
       help = false, version = false;
};

// False: `message` names the option, what was expected and what it got.
bool parse_options(int argc, char** argv, Options* out, char* message, uint64_t message_bytes);
extern const char kHelp[];

}  // namespace lite

#endif
