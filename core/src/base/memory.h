// Memory and vectors that report failure instead of throwing.
#ifndef PENSTOCK_BASE_MEMORY_H
#define PENSTOCK_BASE_MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <type_traits>
#include <utility>

namespace ps {

// A growing array of plain data. resize and push return false if memory runs out.
template <typename T>
class Vec {
  static_assert(std::is_trivially_copyable<T>::value, "elements are moved with realloc");

 public:
  Vec() = default;
  Vec(const Vec&) = delete;
  Vec& operator=(const Vec&) = delete;
  Vec(Vec&& other) noexcept { *this = std::move(other); }
  Vec& operator=(Vec&& other) noexcept {  // swaps the contents
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~Vec() { free(data_); }

  // New elements are zero.
  bool resize(int64_t size) {
    if (!reserve(size)) return false;
    if (size > size_) memset(static_cast<void*>(data_ + size_), 0, static_cast<size_t>(size - size_) * sizeof(T));
    size_ = size;
    return true;
  }
  bool push(const T& value) {
    const T copy = value;  // `value` may be inside the array that is reallocated
    if (size_ == capacity_ && !reserve(size_ ? size_ * 2 : 8)) return false;
    data_[size_++] = copy;
    return true;
  }
  void pop() { --size_; }
  void clear() { size_ = 0; }
  int64_t size() const { return size_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  bool reserve(int64_t capacity) {
    if (capacity <= capacity_) return true;
    size_t bytes;
    if (__builtin_mul_overflow(static_cast<size_t>(capacity), sizeof(T), &bytes)) return false;
    T* grown = static_cast<T*>(realloc(static_cast<void*>(data_), bytes));
    if (!grown) return false;
    data_ = grown;
    capacity_ = capacity;
    return true;
  }
  T* data_ = nullptr;
  int64_t size_ = 0, capacity_ = 0;
};

// Objects without operator new, which would require the C++ runtime.  Null if memory runs out.
template <typename T>
T* create_object() {
  void* memory = aligned_alloc(alignof(T) < 16 ? 16 : alignof(T), (sizeof(T) + 63) / 64 * 64);
  return memory ? ::new (memory) T : nullptr;
}
template <typename T>
void destroy_object(T* object) {
  if (!object) return;
  object->~T();
  free(object);
}

int64_t system_page_bytes();  // 4,096, or 16 or 64 KiB

// Pages from the system: zero, committed when first touched, released by the destructor.
class Region {
 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  Region(Region&& other) noexcept { *this = std::move(other); }
  Region& operator=(Region&& other) noexcept {  // swaps the contents
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    return *this;
  }
  ~Region() { release(); }
  bool allocate(int64_t bytes, bool huge = false);
  void release();
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0, mapped_bytes_ = 0;
};

// Objects in pages of their own, all constructed before use.  Moving swaps the contents.
template <typename T>
class Objects {
  static_assert(std::is_trivially_destructible<T>::value, "nothing runs when the pages are given back");

 public:
  bool make(int64_t count) {  // false: out of memory
    first_ = nullptr;
    if (!region_.allocate(count * static_cast<int64_t>(sizeof(T)))) return false;
    T* const place = reinterpret_cast<T*>(region_.data());
    for (int64_t i = 0; i < count; ++i) ::new (static_cast<void*>(place + i)) T();
    first_ = std::launder(place);
    return true;
  }
  Objects() = default;
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;
  Objects(Objects&& other) noexcept { *this = std::move(other); }
  Objects& operator=(Objects&& other) noexcept {
    region_ = std::move(other.region_);
    std::swap(first_, other.first_);
    return *this;
  }
  T* get() const { return first_; }  // null: none were made

 private:
  Region region_;
  T* first_ = nullptr;
};

// Size arithmetic with overflow checks: false if the result does not fit.
inline bool checked_mul(int64_t a, int64_t b, int64_t* out) { return !__builtin_mul_overflow(a, b, out); }
inline bool checked_add(int64_t a, int64_t b, int64_t* out) { return !__builtin_add_overflow(a, b, out); }
inline bool checked_align(int64_t a, int64_t step, int64_t* out) {
  if (__builtin_add_overflow(a, step - 1, out)) return false;
  *out -= *out % step;
  return true;
}
constexpr int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }

}  // namespace ps

#endif
