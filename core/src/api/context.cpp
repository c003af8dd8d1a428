// The C API for contexts, error messages and the version.
#include "api/api.h"

using namespace ps;

namespace {

ps_status check_comm(const ps_comm& comm) {
  if (comm.struct_size != sizeof(ps_comm))
    return fail(PS_UNSUPPORTED, "comm.struct_size: expected %zu, got %u", sizeof(ps_comm), comm.struct_size);
  if (comm.world >= 1 && comm.world <= PS_MAX_RANKS && comm.rank >= 0 && comm.rank < comm.world) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "comm: expected a rank below a world of 1 to %d, got rank %d of %d", PS_MAX_RANKS,
              comm.rank, comm.world);
}

// All ranks but rank 0 are in stages of equal size.  The ranks of a stage have a comm if there are several.
ps_status check_pipeline(const ps_context_options& o) {
  const int32_t stage_ranks = o.stage_ranks ? o.stage_ranks : 1;
  if (!o.links)
    return stage_ranks == 1 ? PS_OK
                            : fail(PS_INVALID_ARGUMENT, "stage_ranks: expected 0 without links, got %d", stage_ranks);
  PS_TRY(check_comm(*o.links));
  if (stage_ranks < 1 || o.links->world < 2 || (o.links->world - 1) % stage_ranks) {
    return fail(PS_INVALID_ARGUMENT,
                "stage_ranks: expected links of rank 0 and of stages of %d ranks, got a world of %d", stage_ranks,
                o.links->world);
  }
  const int32_t expected = o.links->rank ? stage_ranks : 1, found = o.comm ? o.comm->world : 1;
  if (found == expected && (found == 1 || (o.links->rank - 1) % stage_ranks == o.comm->rank)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "comm: expected that of the %d ranks of a stage, got rank %d of %d", expected,
              o.comm ? o.comm->rank : 0, found);
}

}  // namespace

const char* ps_error_message(void) { return error_message(); }
const char* ps_version(void) { return PS_VERSION; }
int32_t ps_abi_version(void) { return PS_ABI_VERSION; }

ps_status ps_context_create(const ps_context_options* options, ps_context** out) {
  const FloatEnvironment environment;
  ps_context_options o;
  PS_TRY(read_struct(options, &o, "options"));
  if (!out) return fail(PS_INVALID_ARGUMENT, "out: expected a pointer, got null");
  *out = nullptr;
  if (o.num_threads < 0 || o.num_threads > kMaxThreads) {
    return fail(PS_INVALID_ARGUMENT, "num_threads: expected 0 (automatic) to %d, got %d", kMaxThreads, o.num_threads);
  }
  if ((o.comm || o.links) && !kBuildsRanks) return no_ranks();
  if (o.comm) PS_TRY(check_comm(*o.comm));
  PS_TRY(check_pipeline(o));
  if (o.reserved) return fail(PS_UNSUPPORTED, "reserved: expected 0, got 0x%x", o.reserved);
  const Kernels* kernels = nullptr;
  PS_TRY(choose_kernels(o.cpu_level, &kernels));
  ps_context* context = create_object<ps_context>();
  if (!context) return fail(PS_OUT_OF_MEMORY, "context: out of memory");
  context->kernels = kernels;
  context->comm = o.comm;
  context->links = o.links;
  context->stage_ranks = o.stage_ranks ? o.stage_ranks : 1;
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
