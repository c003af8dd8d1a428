// Handles of the API, and reference counts of the objects behind them.
//
// A handle is a token that is cast to a pointer.  Functions look it up in the table of open handles, so a handle that
// was closed or never opened is an error, not a crash.  The table takes no lock: it stays consistent in a forked child.
#ifndef PENSTOCK_BASE_HANDLES_H
#define PENSTOCK_BASE_HANDLES_H

#include <atomic>

#include "base/error.h"
#include "base/memory.h"

namespace ps {

enum HandleKind { HANDLE_CONTEXT = 1, HANDLE_MODEL, HANDLE_PROGRAM, HANDLE_TOKENIZER };

// The base of every object behind a handle.  References are held by the handle, by objects made from it, and by calls
// in progress.
struct Held { mutable std::atomic<int32_t> holders{1}; };

uintptr_t add_handle(void* object, HandleKind kind);    // 0: out of memory
void* remove_handle(uintptr_t token, HandleKind kind);  // the object; null: not an open handle
// Returns the object of an open handle; `name` is that of the argument.
ps_status find_handle(uintptr_t token, HandleKind kind, const char* name, void** out);

// Replaces a handle with its object for the rest of an API function.
template <typename T>
ps_status check_handle(T*& handle, HandleKind kind, const char* name) {
  void* object = nullptr;
  PS_TRY(find_handle(reinterpret_cast<uintptr_t>(handle), kind, name, &object));
  handle = static_cast<T*>(object);
  return PS_OK;
}

template <typename T>
T* hold(T* object) {
  object->holders.fetch_add(1, std::memory_order_relaxed);
  return object;
}
// Destroys the object with its last reference.
template <typename T>
void let_go(T* object) {
  if (object && object->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy_object(object);
}

// Registers the handle of a new object; destroys the object on failure.
template <typename T>
ps_status open_handle(T* object, HandleKind kind, T** out) {
  const uintptr_t token = add_handle(object, kind);
  if (!token) {
    destroy_object(object);
    return fail(PS_OUT_OF_MEMORY, "handle: out of memory");
  }
  *out = reinterpret_cast<T*>(token);
  return PS_OK;
}
// Ignores a value that is not an open handle.
template <typename T>
void close_handle(T* handle, HandleKind kind) {
  let_go(static_cast<T*>(remove_handle(reinterpret_cast<uintptr_t>(handle), kind)));
}

}  // namespace ps

#endif
