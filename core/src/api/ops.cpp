// The C API that registers custom ops from a table in the program.
#include "api/api.h"
#include "ops/loaded.h"

using namespace ps;

ps_status ps_ops_register(const ps_op_library* library) {
  const ps_status status = register_ops(library, "the program");
  return status == PS_OK ? PS_OK : prefix(status, "ops: ");
}
