// Checks of inputs for shape rules.
#ifndef PENSTOCK_OPS_EXPECT_H
#define PENSTOCK_OPS_EXPECT_H

#include "ops/ops.h"

namespace ps {

bool is_tensor(const Spec& s, int32_t dtype, int32_t min_rank, int32_t max_rank);
inline int64_t last_dim(const Spec& s) { return s.dims[s.rank - 1].offset; }

// Each fails with the input's name, what was expected and what it got.
ps_status expect_f32(const Spec& s, const char* name, int32_t min_rank, int32_t max_rank);
ps_status expect_same(const Spec& s, const Spec& other, const char* name, const char* other_name);
ps_status expect_indices(const Spec& s, const char* name);
// A vector parameter: one row of f32; cols -1: any length.
ps_status expect_vector(const Spec& w, const char* name, int64_t cols);

// An output with the dtype of an input.
void copy_type(const Spec& from, Spec* to);

}  // namespace ps

#endif
