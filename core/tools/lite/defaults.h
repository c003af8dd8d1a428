// The generation defaults in the generation_config.json of a bundle.
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

}  // namespace lite

#endif
