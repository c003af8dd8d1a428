// Helpers of the C ABI's functions.
#ifndef PENSTOCK_API_H
#define PENSTOCK_API_H

#include <string.h>

#include "context.h"
#include "memory.h"

namespace ps {

inline ps_status require(bool given, const char* names) {
  return given ? PS_OK : fail(PS_INVALID_ARGUMENT, "%s: expected pointers, found null", names);
}

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
