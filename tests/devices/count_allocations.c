/* Linked with --wrap=ps_program_step: says at the end how many steps there were, and how often anything was allocated or
 * mapped in one of them, in whichever thread. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "penstock.h"

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
ps_status __real_ps_program_step(ps_program*, const ps_batch*, const ps_sampling*, const ps_sampled*);

static atomic_int in_step, num_allocations, num_steps;

static void note(void) { num_allocations += in_step; }

void* malloc(size_t bytes) {
  note();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  note();
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  note();
  return __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  note();
  return __libc_memalign(alignment, bytes);
}
void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  note();
  return (void*)syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
}

ps_status __wrap_ps_program_step(ps_program* program, const ps_batch* batch, const ps_sampling* sampling, const ps_sampled* out) {
  in_step = 1;
#ifdef PLANTED
  free(malloc(64));
#endif
  const ps_status status = __real_ps_program_step(program, batch, sampling, out);
  in_step = 0;
  ++num_steps;
  return status;
}

__attribute__((destructor)) static void report(void) {
  fprintf(stderr, "%d steps, %d allocations in them\n", num_steps, num_allocations);
}
