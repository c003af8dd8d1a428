// Bounds checks of FlatBuffers tables, vectors and strings.
#include "bundle/flatbuffer.h"

#include <stdio.h>

namespace ps {
namespace {

template <typename T>
T load(const uint8_t* p) {  // the format is little-endian, like all supported machines
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}

// Length of the UTF-8 sequence at p; 0: it is invalid.
uint32_t utf8_length(const uint8_t* p, uint32_t left) {
  const uint8_t c = p[0];
  if (c < 0x80) return 1;
  const uint32_t n = c >= 0xC2 && c <= 0xDF ? 2 : (c & 0xF0) == 0xE0 ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
  if (!n || n > left) return 0;
  for (uint32_t i = 1; i < n; ++i) {
    if ((p[i] & 0xC0) != 0x80) return 0;
  }
  if (c == 0xE0 && p[1] < 0xA0) return 0;  // overlong
  if (c == 0xED && p[1] > 0x9F) return 0;  // a surrogate
  if (c == 0xF0 && p[1] < 0x90) return 0;
  if (c == 0xF4 && p[1] > 0x8F) return 0;
  return n;
}

bool is_utf8(const uint8_t* p, uint32_t size, bool is_text) {
  for (uint32_t i = 0; i < size;) {
    if (p[i] == 0 || p[i] == 0x7F || (p[i] < 0x20 && !is_text)) return false;
    const uint32_t n = utf8_length(p + i, size - i);
    if (!n || (p[i] == 0xC2 && p[i + 1] < 0xA0 && !is_text)) return false;  // U+0080 to U+009F are controls too
    i += n;
  }
  return true;
}

}  // namespace

ps_status FlatTable::bad(const char* name, const char* what) const {
  if (place_.index < 0) return fail(PS_INVALID_FILE, "%s.%s: %s", place_.name, name, what);
  return fail(PS_INVALID_FILE, "%s[%lld].%s: %s", place_.name, static_cast<long long>(place_.index), name, what);
}

ps_status FlatTable::root(FlatBuffer buffer, const char* identifier, FlatTable* out) {
  if (buffer.size < 16) return fail(PS_INVALID_FILE, "metadata: expected at least 16 bytes, got %u", buffer.size);
  if (memcmp(buffer.data + 4, identifier, 4) != 0) {
    return fail(PS_INVALID_FILE, "metadata: expected the identifier %s", identifier);
  }
  return at(buffer, load<uint32_t>(buffer.data), FlatPlace{"metadata", -1}, out);
}

ps_status FlatTable::at(FlatBuffer buffer, uint64_t position, FlatPlace place, FlatTable* out) {
  FlatTable table;
  table.buffer_ = buffer;
  table.place_ = place;
  if (position % 4 || position < 4 || position + 4 > buffer.size)
    return table.bad("table", "lies outside of the metadata");
  const int64_t vtable = static_cast<int64_t>(position) - load<int32_t>(buffer.data + position);
  if (vtable % 2 || vtable < 4 || vtable + 4 > buffer.size) return table.bad("vtable", "lies outside of the metadata");
  table.position_ = static_cast<uint32_t>(position);
  table.vtable_ = static_cast<uint32_t>(vtable);
  table.vtable_size_ = load<uint16_t>(buffer.data + vtable);
  table.size_ = load<uint16_t>(buffer.data + vtable + 2);
  if (table.vtable_size_ < 4 || table.vtable_size_ % 2 || vtable + table.vtable_size_ > buffer.size) {
    return table.bad("vtable", "has an impossible size");
  }
  if (table.size_ < 4 || position + table.size_ > buffer.size) return table.bad("table", "has an impossible size");
  *out = table;
  return PS_OK;
}

ps_status FlatTable::find(int field, const char* name, uint32_t bytes, uint32_t* position) const {
  *position = 0;
  const uint32_t entry = 4 + 2 * static_cast<uint32_t>(field);
  if (entry + 2 > vtable_size_) return PS_OK;
  const uint32_t offset = load<uint16_t>(buffer_.data + vtable_ + entry);
  if (offset == 0) return PS_OK;
  if (offset < 4 || offset + bytes > size_) return bad(name, "lies outside of its table");
  if ((position_ + offset) % bytes) return bad(name, "is not aligned");
  *position = position_ + offset;
  return PS_OK;
}

ps_status FlatTable::follow(int field, const char* name, uint32_t* position) const {
  uint32_t at;
  PS_TRY(find(field, name, 4, &at));
  *position = 0;
  if (!at) return PS_OK;
  const uint64_t target = static_cast<uint64_t>(at) + load<uint32_t>(buffer_.data + at);
  if (target % 4 || target == at || target + 4 > buffer_.size) return bad(name, "lies outside of the metadata");
  *position = static_cast<uint32_t>(target);
  return PS_OK;
}

ps_status FlatTable::read_string(int field, const char* name, uint32_t max_bytes, bool is_text, Str* out) const {
  uint32_t at;
  *out = Str{"", 0};
  PS_TRY(follow(field, name, &at));
  if (!at) return PS_OK;
  const uint32_t size = load<uint32_t>(buffer_.data + at);
  if (size > max_bytes) return bad(name, "is too long a string");
  if (static_cast<uint64_t>(at) + 4 + size + 1 > buffer_.size)
    return bad(name, "is a string that runs past the end of the metadata");
  const uint8_t* data = buffer_.data + at + 4;
  if (data[size] != 0) return bad(name, "is a string without its terminator");
  if (!is_utf8(data, size, is_text)) return bad(name, "expected printable UTF-8");
  *out = Str{reinterpret_cast<const char*>(data), size};
  return PS_OK;
}

ps_status FlatTable::read_vector(int field, const char* name, uint32_t bytes, uint32_t align, uint32_t max_count,
                                 FlatVector* out) const {
  uint32_t at;
  *out = FlatVector{buffer_.data, 0};
  PS_TRY(follow(field, name, &at));
  if (!at) return PS_OK;
  const uint32_t count = load<uint32_t>(buffer_.data + at);
  if (count > max_count) {
    char text[96];
    snprintf(text, sizeof(text), "expected at most %u elements, got %u", max_count, count);
    return bad(name, text);
  }
  if (static_cast<uint64_t>(at) + 4 + static_cast<uint64_t>(count) * bytes > buffer_.size) {
    return bad(name, "is a vector that runs past the end of the metadata");
  }
  if (count && (at + 4) % align) return bad(name, "is a vector that is not aligned");
  *out = FlatVector{buffer_.data + at + 4, count};
  return PS_OK;
}

ps_status FlatTable::table_at(const FlatVector& vector, uint32_t index, const char* name, FlatTable* out) const {
  const uint8_t* slot = vector.data + 4 * static_cast<uint64_t>(index);
  const uint64_t position = static_cast<uint64_t>(slot - buffer_.data) + load<uint32_t>(slot);
  return at(buffer_, position, FlatPlace{name, index}, out);
}

}  // namespace ps
