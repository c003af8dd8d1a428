// Draft tokens, guessed from the text so far (prompt lookup decoding).
#ifndef PENSTOCK_LITE_DRAFT_H
#define PENSTOCK_LITE_DRAFT_H

#include <stdint.h>

namespace lite {

constexpr int64_t kMaxDraft = 15;  // guesses of one step

// Where the last three tokens, or else two, stood before, latest first: up to `most` of those that followed there, into
// `out`. How many; none where nothing is like it.
int64_t draft_from(const int32_t* tokens, int64_t num_tokens, int64_t most, int32_t* out);

}  // namespace lite

#endif
