// The rank of this process in the environment variables of its launcher. src/penstock/launch/environment.py reads the
// same variables.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/rendezvous.h"

namespace ps {
namespace {

// `needs`: a variable that must be set as well.
struct Source { const char *launcher, *rank, *world, *local_rank, *local_world, *needs; };
// A batch script of Slurm has SLURM_PROCID too, although it is not a rank; a job step has SLURM_STEP_ID.
constexpr Source kSources[] = {
    {"penstock launch", "PENSTOCK_RANK", "PENSTOCK_WORLD_SIZE", "PENSTOCK_LOCAL_RANK", "PENSTOCK_LOCAL_WORLD_SIZE",
     nullptr},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID"},
};
constexpr int32_t kMaxWorld = 1 << 16;

ps_status read_number(const char* name, int32_t min, int32_t max, int32_t* out) {
  const char* text = getenv(name);
  char* end = nullptr;
  const long value = text && *text >= '0' && *text <= '9' ? strtol(text, &end, 10) : -1;
  if (!text || !end || *end || value < min || value > max)
    return fail(PS_INVALID_ARGUMENT, "%s: expected an integer from %d to %d, got %.40s", name, min, max,
                text ? text : "none");
  *out = static_cast<int32_t>(value);
  return PS_OK;
}

// Reads Slurm's tasks per node: in "2(x3),1" nodes 0 to 2 have 2 tasks each, and node 3 has 1.  Returns 0 if the text
// is malformed.
int32_t tasks_of_node(const char* text, int32_t node) {
  while (text && *text >= '0' && *text <= '9') {
    char* end;
    const long tasks = strtol(text, &end, 10);
    const bool is_repeated = end[0] == '(' && end[1] == 'x';
    const long count = is_repeated ? strtol(end + 2, &end, 10) : 1;
    if (is_repeated && *end++ != ')') return 0;
    if (node < count) return tasks <= kMaxWorld ? static_cast<int32_t>(tasks) : 0;
    node -= static_cast<int32_t>(count > 0 ? count : 0);
    if (*end != ',') return 0;
    text = end + 1;
  }
  return 0;
}

// Leaves world 0 if this launcher did not start the process.
ps_status read_source(const Source& source, ps_rank_place* out) {
  const char* world = getenv(source.world);
  out->world = 0;
  if (source.needs && (!getenv(source.needs) || (world && !strcmp(world, "1")))) return PS_OK;
  if (!getenv(source.rank) && !world) return PS_OK;
  PS_TRY(read_number(source.world, 1, kMaxWorld, &out->world));
  PS_TRY(read_number(source.rank, 0, out->world - 1, &out->rank));
  if (read_number(source.local_world, 1, out->world, &out->local_world) != PS_OK) out->local_world = out->world;
  int32_t node;
  if (source.needs && read_number("SLURM_NODEID", 0, kMaxWorld, &node) == PS_OK) {
    const int32_t tasks = tasks_of_node(getenv("SLURM_STEP_TASKS_PER_NODE"), node);
    if (tasks > 0 && tasks <= out->world) out->local_world = tasks;
  }
  out->local_rank = out->rank % out->local_world;
  if (getenv(source.local_rank)) PS_TRY(read_number(source.local_rank, 0, out->world - 1, &out->local_rank));
  if (out->local_world <= out->local_rank) out->local_world = out->local_rank + 1;
  return PS_OK;
}

}  // namespace

ps_status read_rank_environment(ps_rank_place* out) {
  const bool nested = getenv("TORCHELASTIC_RUN_ID") && getenv("RANK");  // torchrun sets all that it uses: it wins
  const Source* first = nullptr;
  for (int32_t i = 0; i < (nested ? 2 : 5); ++i) {
    ps_rank_place place{};
    PS_TRY(read_source(kSources[i], &place));
    if (!place.world) continue;
    if (first && (place.rank != out->rank || place.world != out->world)) {
      return fail(PS_INVALID_ARGUMENT,
                  "%s says rank %d of %d, but %s says rank %d of %d; unset the variables of one of them",
                  first->launcher, out->rank, out->world, kSources[i].launcher, place.rank, place.world);
    }
    if (!first) *out = place;
    if (!first) first = &kSources[i];
  }
  return first ? PS_OK
               : fail(PS_INVALID_ARGUMENT,
                      "RANK: expected a process that penstock launch, torchrun, mpirun or srun started");
}

}  // namespace ps
