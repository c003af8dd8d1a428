// A reader of the FlatBuffers wire format that checks every access.
//
// Nothing in the buffer is trusted: a table, vector or string is read only after its bounds, alignment and vtable were
// checked.  No table of the schema contains itself, so the code that reads it bounds the depth.
#ifndef PENSTOCK_BUNDLE_FLATBUFFER_H
#define PENSTOCK_BUNDLE_FLATBUFFER_H

#include <string.h>

#include "base/error.h"

namespace ps {

struct FlatBuffer {
  const uint8_t* data;  // 16-byte aligned
  uint32_t size;
};

struct FlatVector {
  const uint8_t* data;  // of the first element
  uint32_t count;
};

// The location of a table for messages: "values[12]". index -1: the root.
struct FlatPlace {
  const char* name;
  int64_t index;
};

class FlatTable {
 public:
  // The root of a buffer with this file identifier.
  static ps_status root(FlatBuffer buffer, const char* identifier, FlatTable* out);

  // Absent fields have the default value.
  ps_status read_i32(int field, const char* name, int32_t otherwise, int32_t* out) const {
    return read_scalar(field, name, otherwise, out);
  }
  ps_status read_u32(int field, const char* name, uint32_t* out) const {
    return read_scalar(field, name, uint32_t{0}, out);
  }
  ps_status read_i64(int field, const char* name, int64_t* out) const {
    return read_scalar(field, name, int64_t{0}, out);
  }
  ps_status read_f64(int field, const char* name, double* out) const { return read_scalar(field, name, 0.0, out); }
  // UTF-8 without control characters, at most `max_bytes`; terminated by a zero byte; absent: empty.
  ps_status read_string(int field, const char* name, uint32_t max_bytes, bool is_text, Str* out) const;
  // Elements of `bytes` each, aligned to `align`, at most `max_count`; absent: empty.
  ps_status read_vector(int field, const char* name, uint32_t bytes, uint32_t align, uint32_t max_count,
                        FlatVector* out) const;
  // A table in a vector of offsets.
  ps_status table_at(const FlatVector& vector, uint32_t index, const char* name, FlatTable* out) const;
  const FlatPlace& place() const { return place_; }

 private:
  static ps_status at(FlatBuffer buffer, uint64_t position, FlatPlace place, FlatTable* out);
  ps_status bad(const char* name, const char* what) const;
  // Position of a field's bytes in the buffer; 0: absent.
  ps_status find(int field, const char* name, uint32_t bytes, uint32_t* position) const;
  // Follows the offset of a field; 0: absent.
  ps_status follow(int field, const char* name, uint32_t* position) const;

  template <typename T>
  ps_status read_scalar(int field, const char* name, T otherwise, T* out) const {
    uint32_t position;
    *out = otherwise;
    PS_TRY(find(field, name, sizeof(T), &position));
    if (position) memcpy(out, buffer_.data + position, sizeof(T));
    return PS_OK;
  }

  FlatBuffer buffer_{nullptr, 0};
  FlatPlace place_{"metadata", -1};
  uint32_t position_ = 0, size_ = 0;  // of the table
  uint32_t vtable_ = 0, vtable_size_ = 0;
};

}  // namespace ps

#endif
