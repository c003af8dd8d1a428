// The functions of an MPI library with the standard ABI of MPI 5, loaded at run time, so that a build needs no MPI.
#ifndef PENSTOCK_COMM_MPI_LIBRARY_H
#define PENSTOCK_COMM_MPI_LIBRARY_H

#include <stdint.h>

#include "base/error.h"

namespace ps {

using MpiHandle = void*;  // of a communicator, a datatype, a request

struct MpiLibrary {
  int (*initialized)(int*);
  int (*init_thread)(int*, char***, int, int*);
  int (*query_thread)(int*);
  int (*finalize)();
  int (*finalized)(int*);
  int (*error_string)(int, char*, int*);
  int (*comm_rank)(MpiHandle, int*);
  int (*comm_size)(MpiHandle, int*);
  int (*comm_dup)(MpiHandle, MpiHandle*);
  int (*comm_free)(MpiHandle*);
  int (*comm_set_errhandler)(MpiHandle, MpiHandle);
  int (*isend)(const void*, int, MpiHandle, int, int, MpiHandle, MpiHandle*);
  int (*irecv)(void*, int, MpiHandle, int, int, MpiHandle, MpiHandle*);
  int (*test)(MpiHandle*, int*, void*);
};

// The numbers of the standard ABI (MPI 5.0, chapter 20).
inline MpiHandle mpi_handle(uintptr_t number) { return reinterpret_cast<MpiHandle>(number); }
constexpr uintptr_t kMpiCommWorld = 0x101, kMpiErrorsReturn = 0x143, kMpiByte = 0x247;
constexpr int kMpiThreadMultiple = 4096;

// Loads the library once and initializes MPI, which is finalized when the process ends. path null:
// PENSTOCK_MPI_LIBRARY, or libmpi_abi.so on the system's search path.
ps_status load_mpi(const char* path, const MpiLibrary** out);
// Unlinks the shared memory that this process has mapped for MPI, once all ranks have mapped it: a killed process would
// leave it in /dev/shm.
void unlink_mpi_memory();
// Skips MPI_Finalize when the process ends: the group was aborted, and MPI_Finalize would wait for the others.
void forget_mpi();

}  // namespace ps

#endif
