// Helpers of the C ABI's functions.
#ifndef PENSTOCK_API_H
#define PENSTOCK_API_H

#include <string.h>

#include "context.h"
#include "handles.h"
#include "model.h"
#include "program.h"

namespace ps {

inline ps_status require(bool given, const char* names) {
  return given ? PS_OK : fail(PS_INVALID_ARGUMENT, "%s: expected pointers, found null", names);
}

inline ps_status check_open(const ps_context* context) { return check_handle(context, HANDLE_CONTEXT, "context"); }
inline ps_status check_open(const ps_model* model) { return check_handle(model, HANDLE_MODEL, "model"); }

// One call's use of a program: refused while another is inside.  The program outlives it even where it is destroyed meanwhile.
class Use {
 public:
  explicit Use(const ps_program* program) {
    status_ = check_handle(program, HANDLE_PROGRAM, "program");
    if (status_ != PS_OK) return;
    if (program->in_use.exchange(true, std::memory_order_acquire)) {
      status_ = fail(PS_INVALID_ARGUMENT, "program: expected one call at a time, found another thread inside");
      return;
    }
    program_ = hold(const_cast<ps_program*>(program));
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

// Copies what the caller's struct has; the rest is zero.
template <typename T>
ps_status read_struct(const T* from, T* to, const char* name) {
  memset(to, 0, sizeof(T));
  if (!from) return fail(PS_INVALID_ARGUMENT, "%s: expected a pointer, found null", name);
  if (from->struct_size < sizeof(uint32_t) || from->struct_size > 65536) {
    return fail(PS_INVALID_ARGUMENT, "%s.struct_size: expected the size of the struct, found %u", name,
                from->struct_size);
  }
  memcpy(to, from, from->struct_size < sizeof(T) ? from->struct_size : sizeof(T));
  return PS_OK;
}

// Writes as much as the caller's struct has room for.
template <typename T>
ps_status write_struct(const T& from, T* to, const char* name) {
  if (!to) return fail(PS_INVALID_ARGUMENT, "%s: expected a pointer, found null", name);
  const uint32_t size = to->struct_size;
  if (size < sizeof(uint32_t) || size > 65536) {
    return fail(PS_INVALID_ARGUMENT, "%s.struct_size: expected the size of the struct, found %u", name, size);
  }
  memcpy(to, &from, size < sizeof(T) ? size : sizeof(T));
  to->struct_size = size;
  return PS_OK;
}

}  // namespace ps

#endif
