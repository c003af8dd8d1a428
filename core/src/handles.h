// Handles: which are open, and who holds what they stand for.
//
// A function looks its handle up among those that are open before it touches it, so that one that was given back, or never
// was one, is an error and no fault.  Nothing here locks: a forked child finds it as it was.
#ifndef PENSTOCK_HANDLES_H
#define PENSTOCK_HANDLES_H

#include <atomic>

#include "error.h"
#include "memory.h"

namespace ps {

enum HandleKind { HANDLE_CONTEXT = 1, HANDLE_MODEL, HANDLE_PROGRAM, HANDLE_TOKENIZER };

// Of every object behind a handle: the handle itself holds it, and so does what was made of it or is inside it.
struct Held {
  mutable std::atomic<int32_t> holders{1};
};

bool add_handle(const void* object, HandleKind kind);  // false: out of memory
bool is_handle(const void* object, HandleKind kind);
bool remove_handle(const void* object, HandleKind kind);  // false: it is none

// PS_OK for an open handle; `name` is the argument's.
ps_status check_handle(const void* object, HandleKind kind, const char* name);

template <typename T>
T* hold(T* object) {
  object->holders.fetch_add(1, std::memory_order_relaxed);
  return object;
}
// The last holder destroys it.
template <typename T>
void let_go(T* object) {
  if (object && object->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy_object(object);
}

// Makes a new object's handle known; a failure destroys the object.
template <typename T>
ps_status open_handle(T* object, HandleKind kind, T** out) {
  if (!add_handle(object, kind)) {
    destroy_object(object);
    return fail(PS_OUT_OF_MEMORY, "handle: out of memory");
  }
  *out = object;
  return PS_OK;
}
// Does nothing with what is no open handle.
template <typename T>
void close_handle(T* object, HandleKind kind) {
  if (object && remove_handle(object, kind)) let_go(object);
}

}  // namespace ps

#endif
