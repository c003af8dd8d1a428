// The search for a draft in the tokens so far.
#include "draft.h"

#include <string.h>

namespace lite {

// Saxena, "Prompt Lookup Decoding" (2023).  Scanning the text takes microseconds, a step milliseconds.
int64_t draft_from(const int32_t* tokens, int64_t num_tokens, int64_t most, int32_t* out) {
  for (int64_t length = 3; length >= 2; --length) {
    for (int64_t at = num_tokens - length - 1; at >= 0; --at) {
      if (memcmp(tokens + at, tokens + num_tokens - length, static_cast<size_t>(length) * sizeof(int32_t)) != 0)
        continue;
      const int64_t behind = num_tokens - at - length, count = behind < most ? behind : most;
      memcpy(out, tokens + at + length, static_cast<size_t>(count) * sizeof(int32_t));
      return count;
    }
  }
  return 0;
}

}  // namespace lite
