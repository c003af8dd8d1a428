// A growing array of plain data.  The process exits if there is no memory.
#ifndef PENSTOCK_LITE_ARRAY_H
#define PENSTOCK_LITE_ARRAY_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

namespace lite {

template <typename T>
struct Array {
  T* data = nullptr;
  int64_t size = 0, capacity = 0;
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(data); }
  void reserve(int64_t wanted) {
    if (wanted <= capacity) return;
    capacity = wanted > 2 * capacity ? wanted : 2 * capacity;
    data = static_cast<T*>(realloc(data, static_cast<size_t>(capacity) * sizeof(T)));
    if (data) return;
    fputs("penstock-lite: out of memory\n", stderr);
    exit(1);
  }
  void push(T value) {
    reserve(size + 1);
    data[size++] = value;
  }
  void append(const T* values, int64_t count) {
    reserve(size + count);
    for (int64_t i = 0; i < count; ++i) data[size++] = values[i];
  }
};

}  // namespace lite

#endif
