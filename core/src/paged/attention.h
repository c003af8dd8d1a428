// The kernel arguments that attention and context_attention have in common.
#ifndef PENSTOCK_OPS_ATTENTION_H
#define PENSTOCK_OPS_ATTENTION_H

#include "ops/ops.h"

namespace ps {

// Arguments of the kernels, without partials.
AttentionArgs attention_args(const Call& call);

}  // namespace ps

#endif
