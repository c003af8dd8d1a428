#include "comm/mpi_library.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef PENSTOCK_NO_DLOPEN
#include <dlfcn.h>
#endif

namespace ps {

#ifdef PENSTOCK_NO_DLOPEN
ps_status load_mpi(const char*, const MpiLibrary**) {
  return fail(PS_UNSUPPORTED, "ranks: this build loads no libraries (PENSTOCK_DLOPEN), MPI neither");
}
void forget_mpi() {}
#else
namespace {

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
MpiLibrary mpi;
bool is_loaded = false, is_forgotten = false;

void finalize_mpi() {
  int done = 1;
  if (!is_forgotten && mpi.finalized(&done) == 0 && !done) mpi.finalize();
}

// Use TCP between hosts unless the environment names something else: if MPI believes that ranks share a host, it uses
// shared memory, which containers and namespaces do not share.  Ranks on one host have our own transport.
void choose_network() {
  if (getenv("MPIR_CVAR_CH4_NETMOD") || getenv("FI_PROVIDER")) return;
  setenv("MPIR_CVAR_CH4_NETMOD", "ofi", 0);
  setenv("FI_PROVIDER", "tcp", 0);
  setenv("MPIR_CVAR_NOLOCAL", "1", 0);
}

ps_status open_library(const char* path, void** out) {
  const char* const names[] = {path ? path : getenv("PENSTOCK_MPI_LIBRARY"), "libmpi_abi.so.1", "libmpi_abi.so.0",
                               "libmpi_abi.so"};
  *out = nullptr;
  for (int i = names[0] ? 0 : 1; !*out && i < (names[0] ? 1 : 4); ++i) *out = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL);
  return *out ? PS_OK
              : fail(PS_UNSUPPORTED,
                     "ranks: no MPI library: pip install 'penstock[mpi]', or set PENSTOCK_MPI_LIBRARY (%s)", dlerror());
}

ps_status find_functions(void* library) {
  const struct {
    const char* name;
    void* target;
  } functions[] = {{"MPI_Initialized", &mpi.initialized},
                   {"MPI_Init_thread", &mpi.init_thread},
                   {"MPI_Query_thread", &mpi.query_thread},
                   {"MPI_Finalize", &mpi.finalize},
                   {"MPI_Finalized", &mpi.finalized},
                   {"MPI_Error_string", &mpi.error_string},
                   {"MPI_Comm_rank", &mpi.comm_rank},
                   {"MPI_Comm_size", &mpi.comm_size},
                   {"MPI_Comm_dup", &mpi.comm_dup},
                   {"MPI_Comm_set_errhandler", &mpi.comm_set_errhandler},
                   {"MPI_Isend", &mpi.isend},
                   {"MPI_Irecv", &mpi.irecv},
                   {"MPI_Test", &mpi.test},
                   {"MPI_Comm_free", &mpi.comm_free}};
  int (*abi_version)(int*, int*) = nullptr;
  *reinterpret_cast<void**>(&abi_version) = dlsym(library, "MPI_Abi_get_version");
  int major = -1, minor = 0;
  if (!abi_version || abi_version(&major, &minor) != 0 || major < 0)
    return fail(PS_UNSUPPORTED, "ranks: expected an MPI library of the standard ABI (libmpi_abi.so), as MPICH 5 has");
  for (const auto& function : functions) {
    *static_cast<void**>(function.target) = dlsym(library, function.name);
    if (!*static_cast<void**>(function.target))
      return fail(PS_UNSUPPORTED, "ranks: the MPI library has no %s", function.name);
  }
  return PS_OK;
}

ps_status load_once(const char* path) {
  if (is_loaded) return PS_OK;
  void* library;
  choose_network();
  PS_TRY(open_library(path, &library));
  PS_TRY(find_functions(library));
  int begun = 0, level = 0;
  if (mpi.initialized(&begun) != 0 ||
      (begun ? mpi.query_thread(&level) : mpi.init_thread(nullptr, nullptr, kMpiThreadMultiple, &level)) != 0)
    return fail(PS_UNSUPPORTED, "ranks: MPI does not start");
  if (level < kMpiThreadMultiple)
    return fail(PS_UNSUPPORTED, "ranks: expected MPI with MPI_THREAD_MULTIPLE, got level %d", level);
  if (!begun) atexit(finalize_mpi);
  is_loaded = true;
  return PS_OK;
}

}  // namespace

ps_status load_mpi(const char* path, const MpiLibrary** out) {
  pthread_mutex_lock(&lock);
  const ps_status status = load_once(path);
  pthread_mutex_unlock(&lock);
  *out = &mpi;
  return status;
}

void forget_mpi() { is_forgotten = true; }
#endif

void unlink_mpi_memory() {
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[512];
  while (maps && fgets(line, sizeof(line), maps)) {
    char* path = strstr(line, "/dev/shm/mpich_shm_");
    if (!path || strstr(path, " (deleted)")) continue;
    path[strcspn(path, "\n")] = 0;
    unlink(path);
  }
  if (maps) fclose(maps);
}

}  // namespace ps
