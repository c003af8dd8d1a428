// Packing of weights into their layouts and unpacking, on the threads of a context.
#ifndef PENSTOCK_PACK_PACK_H
#define PENSTOCK_PACK_PACK_H

#include "threads/context.h"

namespace ps {

struct PackRange {
  int32_t layout;
  int64_t rows, cols, row_start, num_rows;
};

ps_status pack(ps_context* context, const PackArgs& args);
ps_status unpack(ps_context* context, const PackRange& range, const uint8_t* src, float* dst);
// q, scales and groups are checked before anything is written.
ps_status pack_quantized(ps_context* context, const PackRange& range, const int8_t* q, const float* scales,
                         const int8_t* groups, uint8_t* dst);
ps_status pack_blocks(ps_context* context, const PackRange& range, const uint8_t* src, uint8_t* dst);
ps_status unpack_quantized(ps_context* context, const PackRange& range, const uint8_t* src, int8_t* q, float* scales,
                           int8_t* groups);

}  // namespace ps

#endif
