// Custom ops that users load: rows after the built-in table, for the lifetime of the process.
#ifndef PENSTOCK_OPS_LOADED_H
#define PENSTOCK_OPS_LOADED_H

#include <atomic>

#include "ops/ops.h"
#include "penstock_op.h"

namespace ps {

struct LoadedOp {
  OpRow row;  // only name, version and schema
  ps_op op;   // as registered, with copied strings
  Signature signature;
  Phase phase;
  char name[64], schema[512], source[512], text[640];  // text: "name.version schema"
};

// The status and message of the first op that failed in a step, from a callback of a custom op or report_failure.
struct OpFailure {
  std::atomic<int32_t> claimed{0};  // 1: an op has failed and writes the rest
  int32_t status;
  const Call* call;
  ps_op_error error;
};

int32_t num_loaded_ops();
const LoadedOp& loaded_op(int32_t index);  // below num_loaded_ops(), never freed
int32_t find_loaded_op(Str name);          // -1: not loaded
bool is_foreign_name(Str name);            // "owner::op"
// Registers all of a library's ops, or none. `source` is their origin, for messages.
ps_status register_ops(const ps_op_library* library, const char* source);

ps_status infer_loaded(const LoadedOp& op, const Spec* in, const AttrValue* attrs, Spec* out);
ps_status loaded_scratch(const LoadedOp& op, const Call& call, Scratch* out);
// Takes the failure, if there is one: its status and message, with the name of a custom op.
ps_status take_failure(OpFailure* failure);

}  // namespace ps

#endif
