// Weight and KV layouts: the single place that computes their sizes.
#ifndef PENSTOCK_OPS_LAYOUT_H
#define PENSTOCK_OPS_LAYOUT_H

#include "base/error.h"

namespace ps {

constexpr int64_t kMaxDim = int64_t{1} << 31;  // rows or columns of a weight

const char* layout_name(int32_t layout);  // null: unknown
const char* dtype_name(int32_t dtype);    // null: unknown
int64_t dtype_bytes(int32_t dtype);       // 0: unknown
const char* kv_layout_name(int32_t layout);
// The default KV layout of programs of a scheme: as exact as the scheme, unless that is noticeably slower.
int32_t auto_kv_layout(Str scheme);

// Exact bytes of a weight; fails if the layout or shape is invalid.
ps_status checked_bytes(int32_t layout, int64_t rows, int64_t cols, int64_t* bytes);
// Bytes of one page of one state. kStatePages: a recurrent state, for any format of keys and values.
constexpr int32_t kStatePages = PS_STATE_F32;
struct StateShape {
  int32_t num_kv_heads, head_dim;
  int32_t latent_dim;  // State::latent_dim
};
ps_status kv_page_bytes(int32_t kv_layout, const StateShape& shape, int64_t* bytes);

}  // namespace ps

#endif
