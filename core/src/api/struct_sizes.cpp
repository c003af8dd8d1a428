// Compile-time checks of the public structs, which other languages declare too.  No struct ends in padding: a field
// that is added later must not lie where an older caller left bytes unset.
#include <stddef.h>

#include "penstock.h"
#include "penstock_dev.h"
#include "penstock_op.h"

namespace {

static_assert(sizeof(void*) == 8, "sizes below are those of 64-bit machines");
#define PS_STRUCT(type, last, size)                                                 \
  static_assert(sizeof(type) == (size) && offsetof(type, struct_size) == 0, #type); \
  static_assert(offsetof(type, last) + sizeof(type::last) == sizeof(type), #type " ends in padding")

PS_STRUCT(ps_context_options, reserved, 40);
PS_STRUCT(ps_comm, await, 96);
PS_STRUCT(ps_shared_options, reserved, 56);
PS_STRUCT(ps_rank_place, local_world, 20);
PS_STRUCT(ps_rank_info, part_bytes, 24);
PS_STRUCT(ps_join_options, meeting, 48);
PS_STRUCT(ps_mpi_options, library, 40);
PS_STRUCT(ps_model_options, private_copy, 12);
PS_STRUCT(ps_model_info, num_sizes, 136);
PS_STRUCT(ps_value_info, sizes, 24);
PS_STRUCT(ps_size_info, example, 48);
PS_STRUCT(ps_tokenizer_info, unsupported, 48);
PS_STRUCT(ps_program_options, group_pages, 40);
PS_STRUCT(ps_plan, kv_page_bytes, 64);
PS_STRUCT(ps_batch, reserved, 72);
PS_STRUCT(ps_sampling, num_logprobs, 168);
PS_STRUCT(ps_sampled, top_logprobs, 56);
static_assert(sizeof(ps_array) == 64 && offsetof(ps_array, dims) == 16, "ps_array");
static_assert(offsetof(ps_batch, token_ids) == 24 && offsetof(ps_batch, flags) == 64, "ps_batch");
static_assert(offsetof(ps_model_info, weight_bytes) == 32 && offsetof(ps_model_info, network) == 56, "ps_model_info");
static_assert(offsetof(ps_plan, weight_bytes) == 8 && offsetof(ps_sampling, temperature) == 8, "ps_plan, ps_sampling");

PS_STRUCT(ps_op, user, 64);
PS_STRUCT(ps_op_library, ops, 24);
PS_STRUCT(ps_op_shapes, user, 48);
PS_STRUCT(ps_op_call, user, 64);
static_assert(sizeof(ps_op_dim) == 24 && sizeof(ps_op_type) == 104 && sizeof(ps_op_tensor) == 56 &&
                  sizeof(ps_op_attr) == 24,
              "penstock_op.h");

}  // namespace
