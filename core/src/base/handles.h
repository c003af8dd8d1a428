// Handles of the API, and reference counts of the objects behind them.
//
// A handle is a token that is cast to a pointer.  A function looks it up in the table of open handles, so that a handle
// that was closed or never opened is an error and no fault.  The table takes no lock: a forked child finds it as it
// was.
#ifndef PENSTOCK_BASE_HANDLES_H
#define PENSTOCK_BASE_HANDLES_H

#include <atomic>

#include "base/error.h"
#include "base/memory.h"

namespace ps {

enum HandleKind { HANDLE_CONTEXT = 1, HANDLE_MODEL, HANDLE_PROGRAM, HANDLE_TOKENIZER };

// The base of every object behind a handle.  The handle holds the object, and so do objects made from it and calls that
// are using it.
struct Held { mutable std::atomic<int32_t> holders{1}; };

uintptr_t add_handle(void* object, HandleKind kind);    // 0: out of memory
void* remove_handle(uintptr_t token, HandleKind kind);  // the object; null: it was no open handle
// What an open handle stands for; `name` is the argument's.
ps_status find_handle(uintptr_t token, HandleKind kind, const char* name, void** out);

// Replaces a handle by its object, for the rest of a function of the API.
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
// The last holder destroys it.
template <typename T>
void let_go(T* object) {
  if (object && object->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) destroy_object(object);
}

// Makes a new object's handle known; a failure destroys the object.
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
