// The object behind a tokenizer handle, shared by the C API and penstock_dev.h.
#ifndef PENSTOCK_API_TOKENIZER_H
#define PENSTOCK_API_TOKENIZER_H

#include "api/api.h"
#include "tokenizer/tokenizer.h"

struct ps_tokenizer : ps::Held {
  ~ps_tokenizer() { ps::let_go(const_cast<ps_model*>(model)); }
  const ps_model* model = nullptr;  // whose memory holds the tables; null: the caller's memory does
  ps::Tokenizer tokenizer{};
};

namespace ps {

inline ps_status check_open(const ps_tokenizer*& tokenizer) {
  return check_handle(tokenizer, HANDLE_TOKENIZER, "tokenizer");
}

ps_status make_tokenizer(const void* data, int64_t bytes, const ps_model* model, ps_tokenizer** out);

}  // namespace ps

#endif
