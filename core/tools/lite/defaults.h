// The defaults in a bundle: those of generation in generation_config.json, and the type of keys and values in
// config.json.
#ifndef PENSTOCK_LITE_DEFAULTS_H
#define PENSTOCK_LITE_DEFAULTS_H

#include <stdint.h>

namespace lite {

// What the file leaves out means greedy, and the library's end tokens.
struct Defaults {
  int64_t max_tokens = 256;
  double temperature = 0, top_p = 1, min_p = 0, typical_p = 1, repetition_penalty = 1;
  int64_t top_k = 0;
};

// The text of generation_config.json, or none.  What was checked at export is read here; a value that is no number
// counts as absent.
Defaults read_defaults(const char* json, int64_t bytes);

// The type of keys and values that Penstock stored with the weights, quantization_config.kv_cache of config.json:
// "auto" if there is none, nullptr if there is no such type.
const char* stored_kv_cache(const char* json, int64_t bytes);

}  // namespace lite

#endif
