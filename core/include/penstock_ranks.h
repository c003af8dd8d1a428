/* Penstock native core: one network over several processes, which are the ranks of a group.
 *
 *   ps_shared_open -> ps_context_create with its comm -> ps_context_agree
 *   -> ps_model_open, ps_program_create of the rank's bundle
 *   -> on rank 0 ps_program_step ..., on the others ps_program_follow ... -> abort, close
 *
 * The ranks of a pipeline have two comms. `links` connects all of them: rank 0, which has no layers, then the ranks of
 * each stage in turn. `comm` connects the ranks of one stage if it has several.
 *
 * docs/explanation/ranks.md describes what is exchanged and how the bundles of ranks are made.  The rules of penstock.h
 * hold here too.
 */
#ifndef PENSTOCK_RANKS_H
#define PENSTOCK_RANKS_H

#include "penstock.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PS_MAX_RANKS 64
/* The interface between programs and a transport: how the ranks of a group exchange bytes (docs/explanation/ranks.md).
 * Every rank of a group calls all_gather, broadcast and barrier in the same order and with the same tags; a rank that
 * sees another tag than its own fails and names both.  After a function has failed, the group is aborted.  Only one
 * thread at a time may use a comm, but any thread may call `abort`. */
typedef struct ps_comm {
  uint32_t struct_size;
  int32_t rank, world; /* 0 <= rank < world <= PS_MAX_RANKS */
  int32_t reserved;    /* 0 */
  int64_t part_bytes;  /* the maximum bytes of one rank's part of an exchange */
  void* self;          /* the transport's, passed to each function */
  /* Returns the buffer for the rank's part of the next exchange: part_bytes of memory, 64-byte aligned.  If it differs
   * from the buffer of the exchange before, nodes store into it as soon as that exchange has returned. */
  void* (*part)(void* self);
  /* Sends bytes[rank] of part() to all ranks and waits for theirs: parts[r] are the bytes[r] of rank r, valid until
   * this rank's next exchange. */
  ps_status (*all_gather)(void* self, uint64_t tag, const int64_t* bytes, const void** parts);
  /* The same, but only `root` sends. wait_forever 1: no timeout, for ranks that are idle. */
  ps_status (*broadcast)(void* self, uint64_t tag, int32_t root, int64_t bytes, int32_t wait_forever,
                         const void** data);
  /* Point to point.  Both ranks name the same number of bytes; messages between two ranks keep their order. */
  ps_status (*send)(void* self, int32_t to, const void* data, int64_t bytes);
  ps_status (*recv)(void* self, int32_t from, void* data, int64_t bytes);
  ps_status (*barrier)(void* self, uint64_t tag);
  /* Makes every wait of every rank fail, now and later, with `reason`; the first reason stays. */
  void (*abort)(void* self, const char* reason);
  /* Waits without a timeout until a message from `from` arrives, which recv then takes.  Null: an idle stage of a
   * pipeline waits in recv, with its timeout. */
  ps_status (*await)(void* self, int32_t from);
} ps_comm;

/* Ranks on one host over shared memory: processes that inherit a file descriptor, or threads of one process. */
typedef struct ps_shared_options {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t fd;         /* of at least ps_shared_bytes bytes (memfd_create), initially zero; unused if memory is set */
  void* memory;       /* null: map fd; otherwise the same bytes on all ranks, 128-byte aligned */
  int64_t part_bytes; /* equal on all ranks */
  int64_t timeout_ms; /* how long one rank waits for another inside a step; 0: 60 s */
  uint64_t epoch;     /* number of this run of the group: ranks of different epochs refuse each other */
  int32_t yield;      /* 1: ranks have fewer cores than threads, so a waiting rank yields its core */
  int32_t reserved;   /* 0 */
} ps_shared_options;
PS_API ps_status ps_shared_bytes(int32_t world, int64_t part_bytes, int64_t* bytes);
/* Opens the transport of one rank without waiting for others.  Close it after the contexts that use it. */
PS_API ps_status ps_shared_open(const ps_shared_options* options, ps_comm** out);
PS_API void ps_shared_close(ps_comm* comm);
/* For transports outside this library: stores the thread's error message and returns `status`.  A ps_comm function that
 * fails calls it. */
PS_API ps_status ps_fail(ps_status status, const char* message);

/* ---- ranks that a launcher started ---------------------------------------------------------------------------- */
/* The rank of this process among those that a launcher started together. */
typedef struct ps_rank_place {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t local_rank, local_world; /* among those on this host */
} ps_rank_place;
/* Reads the environment variables of penstock launch and torchrun (RANK, WORLD_SIZE ...), MPICH, Open MPI or Slurm.
 * PS_INVALID_ARGUMENT if there are none, if one is not a number, or if two launchers disagree. */
PS_API ps_status ps_rank_from_environment(ps_rank_place* out);
/* The group that a bundle needs for a program with these options.  Not for pipelines: their bundles (penstock export
 * --pp) run in a context with `links`; without links they are refused, and so they are here. */
typedef struct ps_rank_info {
  uint32_t struct_size;
  int32_t rank, world; /* the rank and world that the bundle was cut for; 0 and 1: a whole bundle */
  int32_t reserved;    /* 0 */
  int64_t part_bytes;  /* ps_comm.part_bytes; the same for the bundle of each rank */
} ps_rank_info;
PS_API ps_status ps_model_rank(const ps_model* model, const ps_program_options* options, ps_rank_info* out);

typedef struct ps_join_options {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t yield;           /* see ps_shared_options */
  int64_t part_bytes;      /* equal on all ranks */
  int64_t timeout_ms;      /* how long one rank waits for another inside a step; 0: 60 s */
  int64_t join_timeout_ms; /* how long the ranks wait here for each other; 0: 300 s */
  const char* meeting;     /* the same on all ranks, and different from that of any other group of this user; null:
                              MASTER_ADDR and MASTER_PORT, or the process that launched this one */
} ps_join_options;
/* Waits for the other ranks, which are processes of this user on this host, and opens the transport over memory that
 * rank 0 sends them.  Nothing appears in a file system.  A rank that ends without ps_shared_close ends the group: the
 * others' waits fail within 0.1 s.  PS_ABORTED if the ranks do not arrive in time or one does not match. */
PS_API ps_status ps_shared_join(const ps_join_options* options, ps_comm** out);

/* Ranks on several hosts over an MPI library with the standard ABI of MPI 5 (libmpi_abi.so), which this function loads.
 * Its mpiexec starts the ranks. */
typedef struct ps_mpi_options {
  uint32_t struct_size;
  int32_t rank, world; /* must agree with mpiexec */
  /* 1: only these ranks use the network.  Required, because MPI neither encrypts nor authenticates */
  int32_t trusted_network;
  int64_t part_bytes;  /* equal on all ranks */
  int64_t timeout_ms;  /* how long one rank waits for another inside a step; 0: 60 s */
  const char* library; /* null: PENSTOCK_MPI_LIBRARY, or the system's search path */
} ps_mpi_options;
/* Waits for the other ranks.  MPI uses TCP unless the environment names another network (MPIR_CVAR_CH4_NETMOD or
 * FI_PROVIDER), and is finalized when the process ends.  A TCP connection between each pair of ranks carries a
 * heartbeat: a rank that ends or is silent for 1.7 s ends the group.  PS_UNSUPPORTED if there is no library. */
PS_API ps_status ps_mpi_join(const ps_mpi_options* options, ps_comm** out);
PS_API void ps_mpi_close(ps_comm* comm);

/* Checks that all ranks agree on `text` (the checksum of a file, say), the ABI version and the instruction level of
 * the context, whose comm it uses.  Every rank calls this once before its first step.  It waits without a timeout
 * until the others have opened their files; a rank that ends, or abort, ends the wait.  PS_INVALID_ARGUMENT names
 * the difference. */
PS_API ps_status ps_context_agree(ps_context* context, const char* text);

/* On ranks other than 0: waits for the next step of rank 0's program and computes this rank's part of it.  Rank 0 runs
 * steps with the functions above, samples, and has the logits.  Fails if the group was aborted. */
PS_API ps_status ps_program_follow(ps_program* program);

/* On rank 0 of a pipeline: a step in two parts, so that each stage can work on a different step. `launch` sends the
 * batch to the first stage; `collect` waits for the oldest step in flight and samples its rows if `sampling` is not
 * null.  There can be as many steps in flight as stages.  A step that is launched cannot use slots as token ids; its
 * `sampling` and `out` are passed to collect. */
PS_API ps_status ps_program_launch(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                                   const ps_sampled* out);
PS_API ps_status ps_program_collect(ps_program* program, const ps_sampling* sampling, const ps_sampled* out);

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_RANKS_H */
