// Draft tokens taken from the text so far (prompt lookup decoding).
#ifndef PENSTOCK_LITE_DRAFT_H
#define PENSTOCK_LITE_DRAFT_H

#include <stdint.h>

namespace lite {

constexpr int64_t kMaxDraft = 15;  // draft tokens per step

// Finds the latest earlier occurrence of the last three tokens, or else two, and copies up to `most` of the tokens that
// followed it to `out`.  Returns their number; 0 if there is no occurrence.
int64_t draft_from(const int32_t* tokens, int64_t num_tokens, int64_t most, int32_t* out);

}  // namespace lite

#endif
