// Checks of arguments, handles and structs, shared by the functions of the C API.
#ifndef PENSTOCK_API_H
#define PENSTOCK_API_H

#include <string.h>

#include "base/float_environment.h"
#include "base/handles.h"
#include "program/model.h"
#include "program/program.h"
#include "threads/context.h"

namespace ps {

inline ps_status require(bool is_set, const char* names) {
  return is_set ? PS_OK : fail(PS_INVALID_ARGUMENT, "%s: expected pointers, got null", names);
}

// The error of a build without ranks.  The compiler drops the code after a return of it.
inline ps_status no_ranks() {
  return fail(PS_UNSUPPORTED,
              "ranks: this build leaves them out: build it with the bundle of a rank in PENSTOCK_OPS_FROM");
}

inline ps_status require_path(const char* path) {
  return path && *path
             ? PS_OK
             : fail(PS_INVALID_ARGUMENT, "path: expected the name of a file, got %s", path ? "an empty text" : "null");
}

// Each function replaces the handle with its object.
inline ps_status check_open(ps_context*& context) { return check_handle(context, HANDLE_CONTEXT, "context"); }
inline ps_status check_open(const ps_context*& context) { return check_handle(context, HANDLE_CONTEXT, "context"); }
inline ps_status check_open(ps_model*& model) { return check_handle(model, HANDLE_MODEL, "model"); }
inline ps_status check_open(const ps_model*& model) { return check_handle(model, HANDLE_MODEL, "model"); }

// The error of a function for models of another kind.
inline ps_status check_kind(const Graph& graph, int32_t kind) {
  if (graph.kind == kind) return PS_OK;
  return fail(PS_UNSUPPORTED, kind == KIND_NETWORK
                                  ? "program: expected one of a general network, got a language model's"
                                  : "program: expected one of a language model, got a general network's, which "
                                    "ps_program_predict runs");
}

constexpr int32_t kAnyKind = -1;

// A call's exclusive use of a program.  Replaces the handle with the program, and refuses it while another call is
// using it or if the model is of another kind.  Keeps the program alive even if it is destroyed meanwhile.
class Use {
 public:
  template <typename T>
  explicit Use(T*& program, int32_t kind = KIND_LANGUAGE_MODEL) {
    status_ = check_handle(program, HANDLE_PROGRAM, "program");
    if (status_ == PS_OK && kind != kAnyKind) status_ = check_kind(program->model->graph, kind);
    if (status_ != PS_OK) return;
    if (program->in_use.exchange(true, std::memory_order_acquire)) {
      status_ = fail(PS_INVALID_ARGUMENT, "program: expected one call at a time, got another thread inside");
      return;
    }
    program_ = hold(const_cast<ps_program*>(static_cast<const ps_program*>(program)));
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    if (!program_) return;
    program_->in_use.store(false, std::memory_order_release);
    let_go(program_);
  }
  ps_status status() const { return status_; }

 private:
  ps_program* program_ = nullptr;
  ps_status status_;
};

// Reads a struct of the size that the caller declares.  A newer caller's struct may have fields that this version does
// not know: they must be zero, which has no effect.
inline ps_status check_struct(const void* from, uint32_t size, size_t known, bool read, const char* name) {
  if (size < sizeof(uint32_t) || size > 65536)
    return fail(PS_INVALID_ARGUMENT, "%s.struct_size: expected the size of the struct, got %u", name, size);
  const uint8_t* bytes = static_cast<const uint8_t*>(from);
  for (size_t i = known; read && i < size; ++i) {
    if (bytes[i]) {
      return fail(PS_UNSUPPORTED, "%s: byte %zu of %u is set, in a field that version %s, of %zu bytes, does not know",
                  name, i, size, PS_VERSION, known);
    }
  }
  return PS_OK;
}

// Copies what the caller's struct has; the rest is zero.
template <typename T>
ps_status read_struct(const T* from, T* to, const char* name) {
  memset(to, 0, sizeof(T));
  if (!from) return fail(PS_INVALID_ARGUMENT, "%s: expected a pointer, got null", name);
  PS_TRY(check_struct(from, from->struct_size, sizeof(T), true, name));
  memcpy(to, from, from->struct_size < sizeof(T) ? from->struct_size : sizeof(T));
  return PS_OK;
}

// Fills the caller's struct up to its size; fields that this version does not know become zero.
template <typename T>
ps_status write_struct(const T& from, T* to, const char* name) {
  if (!to) return fail(PS_INVALID_ARGUMENT, "%s: expected a pointer, got null", name);
  const uint32_t size = to->struct_size;
  PS_TRY(check_struct(to, size, sizeof(T), false, name));
  memcpy(to, &from, size < sizeof(T) ? size : sizeof(T));
  if (size > sizeof(T)) memset(reinterpret_cast<uint8_t*>(to) + sizeof(T), 0, size - sizeof(T));
  to->struct_size = size;
  return PS_OK;
}

}  // namespace ps

#endif
