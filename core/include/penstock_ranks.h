/* Penstock native core: one network over several processes, the ranks of a group.
 *
 *   ps_shared_open -> ps_context_create with its comm -> ps_context_agree
 *   -> ps_model_open, ps_program_create of the rank's bundle
 *   -> on rank 0 ps_program_step ..., on the others ps_program_follow ... -> abort, close
 *
 * The ranks of a pipeline have two comms.  `links` connects all of them: rank 0, which has no layers, and then the
 * ranks of each stage in turn.  `comm` connects the ranks of one stage, if they are several.
 *
 * docs/explanation/ranks.md says what is exchanged, and how bundles of ranks are made.  The rules of penstock.h hold
 * here too.
 */
#ifndef PENSTOCK_RANKS_H
#define PENSTOCK_RANKS_H

#include "penstock.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PS_MAX_RANKS 64
/* How the ranks of a group exchange bytes: the seam between programs and a transport (docs/explanation/ranks.md). Every
 * rank of a group calls all_gather, broadcast and barrier in the same order with the same tag; a rank that finds
 * another tag than its own fails and names both.  A function that fails leaves the group aborted.  One thread at a time
 * uses a comm; `abort` may be called by any. */
typedef struct ps_comm {
  uint32_t struct_size;
  int32_t rank, world; /* 0 <= rank < world <= PS_MAX_RANKS */
  int32_t reserved;    /* 0 */
  int64_t part_bytes;  /* the most bytes of one rank's part of an exchange */
  void* self;          /* the transport's, passed to each function */
  /* Returns where the rank writes its part of the next exchange, part_bytes of memory at a multiple of 64.  Nodes store
   * into it as soon as the exchange before has returned, if that one had other memory. */
  void* (*part)(void* self);
  /* Sends bytes[rank] of part() to all, and waits for the others: parts[r] are the bytes[r] of rank r, until this
   * rank's next exchange. */
  ps_status (*all_gather)(void* self, uint64_t tag, const int64_t* bytes, const void** parts);
  /* The same with a part of only `root`.  wait_forever 1: without the transport's timeout, for ranks that are idle. */
  ps_status (*broadcast)(void* self, uint64_t tag, int32_t root, int64_t bytes, int32_t wait_forever,
                         const void** data);
  /* From one rank to another.  Both name the same number of bytes; messages between two ranks keep their order. */
  ps_status (*send)(void* self, int32_t to, const void* data, int64_t bytes);
  ps_status (*recv)(void* self, int32_t from, void* data, int64_t bytes);
  ps_status (*barrier)(void* self, uint64_t tag);
  /* Ends every wait of every rank, now and later, with `reason`; the first reason stays. */
  void (*abort)(void* self, const char* reason);
  /* Waits without a timeout until a message of `from` arrives, which recv then takes.  Null: an idle stage of a
   * pipeline waits in recv, with its timeout. */
  ps_status (*await)(void* self, int32_t from);
} ps_comm;

/* Ranks on one host, over shared memory: processes that inherit a file descriptor, or threads of one process. */
typedef struct ps_shared_options {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t fd;         /* of at least ps_shared_bytes bytes (memfd_create), zero at first; unused with memory */
  void* memory;       /* null: map fd; else the same bytes that the ranks share, at a multiple of 128 */
  int64_t part_bytes; /* equal on all ranks */
  int64_t timeout_ms; /* how long one rank waits for another inside a step; 0: 60 s */
  uint64_t epoch;     /* which run of the group this is: ranks of different epochs refuse each other */
  int32_t yield;      /* 1: ranks have fewer cores than threads, so a rank that waits gives up its core */
  int32_t reserved;   /* 0 */
} ps_shared_options;
PS_API ps_status ps_shared_bytes(int32_t world, int64_t part_bytes, int64_t* bytes);
/* Opens the transport of one rank; waits for no other.  Close it after the contexts that were made with it. */
PS_API ps_status ps_shared_open(const ps_shared_options* options, ps_comm** out);
PS_API void ps_shared_close(ps_comm* comm);
/* Of a transport that is no part of this library: stores the thread's error message and returns `status`, as a function
 * of a ps_comm does that fails. */
PS_API ps_status ps_fail(ps_status status, const char* message);

/* ---- processes that meet by themselves -------------------------------------------------------------------------- */
/* The place of this process among those that a launcher started together. */
typedef struct ps_rank_place {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t local_rank, local_world; /* among those on this host */
} ps_rank_place;
/* Reads the variables of penstock launch and torchrun (RANK, WORLD_SIZE ...), MPICH, Open MPI or Slurm.
 * PS_INVALID_ARGUMENT without any, for one that is no number, and for two launchers that disagree. */
PS_API ps_status ps_rank_from_environment(ps_rank_place* out);
/* What a bundle needs of a group, for a program of these options.  Not of a pipeline: its bundles (penstock export
 * --pp) run in a context with `links` only, and are refused here and without links. */
typedef struct ps_rank_info {
  uint32_t struct_size;
  int32_t rank, world; /* that the bundle was cut for; 0 of 1: a whole bundle, which needs no group */
  int32_t reserved;    /* 0 */
  int64_t part_bytes;  /* of the comm; the same in the bundle of each rank */
} ps_rank_info;
PS_API ps_status ps_model_rank(const ps_model* model, const ps_program_options* options, ps_rank_info* out);

typedef struct ps_join_options {
  uint32_t struct_size;
  int32_t rank, world;
  int32_t yield;           /* as ps_shared_options has it */
  int64_t part_bytes;      /* equal on all ranks */
  int64_t timeout_ms;      /* how long one rank waits for another inside a step; 0: 60 s */
  int64_t join_timeout_ms; /* how long the ranks wait for each other here; 0: 300 s */
  const char* meeting; /* equal on all ranks, and of no other group of this user; null: MASTER_ADDR and MASTER_PORT, or
                          the process that launched this one */
} ps_join_options;
/* Waits for the other ranks, which are processes of this user on this host, and opens the transport over memory that
 * rank 0 sends them.  Nothing has a name in a file system.  A rank that ends without ps_shared_close ends the group:
 * the others' waits fail within 0.1 s.  PS_ABORTED if the ranks do not come in time or one does not fit. */
PS_API ps_status ps_shared_join(const ps_join_options* options, ps_comm** out);

/* Ranks on several hosts, over the messages of an MPI library with the standard ABI of MPI 5 (libmpi_abi.so), which is
 * loaded here and not before.  The ranks are started by its mpiexec. */
typedef struct ps_mpi_options {
  uint32_t struct_size;
  int32_t rank, world; /* as mpiexec says, too */
  /* 1: only these ranks use the network.  MPI neither encrypts nor authenticates: else refused */
  int32_t trusted_network;
  int64_t part_bytes;  /* equal on all ranks */
  int64_t timeout_ms;  /* how long one rank waits for another inside a step; 0: 60 s */
  const char* library; /* null: PENSTOCK_MPI_LIBRARY, or where the system finds libraries */
} ps_mpi_options;
/* Waits for the other ranks.  MPI goes over TCP unless the environment names another network (MPIR_CVAR_CH4_NETMOD or
 * FI_PROVIDER), and ends with the process.  A TCP connection between each two ranks carries a heartbeat: a rank that
 * ends or is not heard of for 1.7 s ends the group.  PS_UNSUPPORTED without a library. */
PS_API ps_status ps_mpi_join(const ps_mpi_options* options, ps_comm** out);
PS_API void ps_mpi_close(ps_comm* comm);

/* Compares what all ranks must have in common: `text` (the checksum of a file, say), the ABI version and the
 * instruction level of the context, whose comm it uses.  Every rank calls this once, before its first step.  It waits
 * for the others without a timeout, however long they open their files; a rank that ends, or abort, ends the wait.
 * PS_INVALID_ARGUMENT names what differs. */
PS_API ps_status ps_context_agree(ps_context* context, const char* text);

/* On a rank other than 0: waits for the next step of rank 0's program, and computes this rank's part of it.  Rank 0
 * runs steps with the functions above, samples, and has the logits.  Fails when the group was aborted. */
PS_API ps_status ps_program_follow(ps_program* program);

/* On rank 0 of a pipeline: a step in two parts, so that each stage can work on another one.  `launch` sends the batch
 * to the first stage, `collect` waits for the oldest step in flight, and samples its rows if `sampling` is not null.
 * There can be as many steps in flight as stages.  A step that is launched has no slots as token ids, and `sampling`
 * and `out` are those of its collect. */
PS_API ps_status ps_program_launch(ps_program* program, const ps_batch* batch, const ps_sampling* sampling,
                                   const ps_sampled* out);
PS_API ps_status ps_program_collect(ps_program* program, const ps_sampling* sampling, const ps_sampled* out);

#ifdef __cplusplus
}
#endif
#endif /* PENSTOCK_RANKS_H */
