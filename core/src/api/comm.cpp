// The C API for the transports of ranks, and the check that all ranks agree.
#include "api/api.h"
#include "comm/mpi.h"
#include "comm/rendezvous.h"
#include "comm/shared.h"
#include "program/ranks.h"

using namespace ps;

namespace {

constexpr uint64_t kAgreementTag = 0x61677265656d656eu;

struct Agreement {
  int32_t abi;
  char version[28], level[32], text[448];
};

ps_status differ(const ps_comm& comm, int32_t rank, const char* name, const char* own, const char* other) {
  const ps_status status =
      fail(PS_INVALID_ARGUMENT, "%s: expected equal values on all ranks, got %s on rank %d and %s on rank %d", name,
           own, comm.rank, other, rank);
  comm.abort(comm.self, error_message());
  return status;
}

template <typename Transport, typename Options, typename Open>
ps_status open_transport(const Options* options, ps_comm** out, Open&& open) {
  Options o;
  if (!kBuildsRanks) return no_ranks();
  PS_TRY(require(out, "out"));
  *out = nullptr;
  PS_TRY(read_struct(options, &o, "options"));
  Transport* transport = create_object<Transport>();
  if (!transport) return fail(PS_OUT_OF_MEMORY, "comm: out of memory");
  const ps_status status = open(transport, o);
  if (status != PS_OK) {
    destroy_object(transport);
    return status;
  }
  *out = transport->comm();
  return PS_OK;
}

}  // namespace

ps_status ps_shared_bytes(int32_t world, int64_t part_bytes, int64_t* bytes) {
  if (!kBuildsRanks) return no_ranks();
  PS_TRY(require(bytes, "bytes"));
  return SharedComm::bytes(world, part_bytes, bytes);
}

ps_status ps_shared_open(const ps_shared_options* options, ps_comm** out) {
  return open_transport<SharedComm>(options, out,
                                    [](SharedComm* shared, const ps_shared_options& o) { return shared->open(o); });
}

ps_status ps_shared_join(const ps_join_options* options, ps_comm** out) {
  return open_transport<SharedComm>(options, out,
                                    [](SharedComm* shared, const ps_join_options& o) { return join_ranks(o, shared); });
}

ps_status ps_mpi_join(const ps_mpi_options* options, ps_comm** out) {
  return open_transport<MpiComm>(options, out, [](MpiComm* mpi, const ps_mpi_options& o) { return mpi->open(o); });
}

void ps_mpi_close(ps_comm* comm) {
  if (kBuildsRanks && comm) destroy_object(static_cast<MpiComm*>(comm->self));
}

ps_status ps_rank_from_environment(ps_rank_place* out) {
  if (!kBuildsRanks) return no_ranks();
  ps_rank_place place{};
  PS_TRY(read_rank_environment(&place));
  return write_struct(place, out, "out");
}

ps_status ps_model_rank(const ps_model* model, const ps_program_options* options, ps_rank_info* out) {
  if (!kBuildsRanks) return no_ranks();
  PS_TRY(check_open(model));
  ps_program_options o;
  PS_TRY(read_struct(options, &o, "options"));
  ps_rank_info info{};
  info.world = 1;
  PS_TRY(describe_rank(*model, o, &info));
  return write_struct(info, out, "out");
}

void ps_shared_close(ps_comm* comm) {
  if (kBuildsRanks && comm) destroy_object(static_cast<SharedComm*>(comm->self));
}

ps_status ps_fail(ps_status status, const char* message) { return fail(status, "%s", message ? message : ""); }

ps_status ps_context_agree(ps_context* context, const char* text) {
  if (!kBuildsRanks) return no_ranks();
  PS_TRY(check_open(context));
  if (!all_ranks(*context)) return fail(PS_INVALID_ARGUMENT, "context: expected one with a comm");
  const ps_comm& comm = *all_ranks(*context);
  const void* nothing = nullptr;
  // Ranks take different times to open their bundles.  Only a broadcast can wait without a timeout, and only for its
  // root; therefore each rank is the root once.
  for (int32_t r = 0; r < comm.world; ++r) PS_TRY(comm.broadcast(comm.self, kAgreementTag + 2, r, 0, 1, &nothing));
  Agreement own{};
  own.abi = PS_ABI_VERSION;
  if (!text || strlen(text) >= sizeof(own.text))
    return fail(PS_INVALID_ARGUMENT, "text: expected at most %zu bytes", sizeof(own.text) - 1);
  strcpy(own.text, text);
  strcpy(own.version, PS_VERSION);
  strncpy(own.level, context->kernels->level, sizeof(own.level) - 1);
  memcpy(comm.part(comm.self), &own, sizeof(own));
  int64_t bytes[PS_MAX_RANKS];
  const void* parts[PS_MAX_RANKS];
  for (int64_t& n : bytes) n = sizeof(own);
  PS_TRY(comm.all_gather(comm.self, kAgreementTag, bytes, parts));
  for (int32_t r = 0; r < comm.world; ++r) {
    Agreement other;
    memcpy(&other, parts[r], sizeof(other));
    other.version[sizeof(other.version) - 1] = other.level[sizeof(other.level) - 1] =
        other.text[sizeof(other.text) - 1] = 0;
    if (other.abi != own.abi || strcmp(other.version, own.version))
      return differ(comm, r, "version", own.version, other.version);
    if (strcmp(other.level, own.level)) return differ(comm, r, "cpu_level", own.level, other.level);
    if (strcmp(other.text, own.text)) return differ(comm, r, "text", own.text, other.text);
  }
  return comm.barrier(comm.self, kAgreementTag + 1);  // no rank leaves before all have compared
}
