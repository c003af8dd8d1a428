// The C API for contexts, error messages and the version.
#include "api/api.h"

using namespace ps;

namespace {

ps_status check_comm(const ps_comm& comm) {
  if (comm.struct_size != sizeof(ps_comm))
    return fail(PS_UNSUPPORTED, "comm.struct_size: expected %zu, found %u", sizeof(ps_comm), comm.struct_size);
  if (comm.world >= 1 && comm.world <= PS_MAX_RANKS && comm.rank >= 0 && comm.rank < comm.world) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "comm: expected a rank below a world of 1 to %d, found rank %d of %d", PS_MAX_RANKS, comm.rank, comm.world);
}

}  // namespace

const char* ps_error_message(void) { return error_message(); }
const char* ps_version(void) { return PS_VERSION; }
int32_t ps_abi_version(void) { return PS_ABI_VERSION; }

ps_status ps_context_create(const ps_context_options* options, ps_context** out) {
  const FloatEnvironment environment;
  ps_context_options o;
  PS_TRY(read_struct(options, &o, "options"));
  if (!out) return fail(PS_INVALID_ARGUMENT, "out: expected a pointer, found null");
  *out = nullptr;
  if (o.num_threads < 0 || o.num_threads > kMaxThreads) {
    return fail(PS_INVALID_ARGUMENT, "num_threads: expected 0 (automatic) to %d, found %d", kMaxThreads, o.num_threads);
  }
  if (o.comm && !kBuildsRanks) return no_ranks();
  if (o.comm) PS_TRY(check_comm(*o.comm));
  const Kernels* kernels = nullptr;
  PS_TRY(choose_kernels(o.cpu_level, &kernels));
  ps_context* context = create_object<ps_context>();
  if (!context) return fail(PS_OUT_OF_MEMORY, "context: out of memory");
  context->kernels = kernels;
  context->comm = o.comm;
  const ps_status status = context->pool.start(o.num_threads ? o.num_threads : default_num_threads());
  if (status != PS_OK) {
    destroy_object(context);
    return status;
  }
  return open_handle(context, HANDLE_CONTEXT, out);
}

void ps_context_destroy(ps_context* context) { close_handle(context, HANDLE_CONTEXT); }
int32_t ps_context_num_threads(const ps_context* context) {
  return check_open(context) == PS_OK ? context->pool.num_threads() : 0;
}
const char* ps_context_cpu_level(const ps_context* context) {
  return check_open(context) == PS_OK ? context->kernels->level : nullptr;
}
