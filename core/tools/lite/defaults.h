// The defaults in a bundle: generation parameters in generation_config.json, and the KV type in config.json.
#ifndef PENSTOCK_LITE_DEFAULTS_H
#define PENSTOCK_LITE_DEFAULTS_H

#include <stdint.h>

namespace lite {

// Missing values mean greedy sampling and the library's end tokens.
struct Defaults {
  int64_t max_tokens = 256;
  double temperature = 0, top_p = 1, min_p = 0, typical_p = 1, repetition_penalty = 1;
  int64_t top_k = 0;
};

// The text of generation_config.json, or null.  Export has checked it; a value that is not a number counts as absent.
Defaults read_defaults(const char* json, int64_t bytes);

// The KV type stored with the weights, quantization_config.kv_cache of config.json: "auto" if there is none, nullptr if
// the type is unknown.
const char* stored_kv_cache(const char* json, int64_t bytes);

}  // namespace lite

#endif
