// The search for stop strings across chunks of text.
#include "stops.h"

#include <string.h>

namespace lite {
namespace {

// Length of the longest suffix of the text that is a proper prefix of the string.
int64_t overlap(const char* text, int64_t bytes, const char* string) {
  const int64_t whole = static_cast<int64_t>(strlen(string));
  int64_t length = bytes < whole - 1 ? bytes : whole - 1;
  while (length > 0 && memcmp(text + bytes - length, string, static_cast<size_t>(length)) != 0) --length;
  return length;
}

}  // namespace

bool Stops::push(const char* text, int64_t bytes) {
  held_.append(text, bytes);
  int64_t end = -1, begin = 0, kept = 0;
  for (int64_t i = 0; i < strings_.size; ++i) {
    const char* string = strings_.data[i];
    const size_t size = strlen(string);
    const void* found = held_.size ? memmem(held_.data, static_cast<size_t>(held_.size), string, size) : nullptr;
    if (found) {
      const int64_t at = static_cast<const char*>(found) - held_.data, behind = at + static_cast<int64_t>(size);
      if (end < 0 || behind < end || (behind == end && at < begin)) {
        end = behind;
        begin = at;
      }
    }
    const int64_t length = overlap(held_.data, held_.size, string);
    if (length > kept) kept = length;
  }
  num_shown_ = end < 0 ? held_.size - kept : begin;
  return end >= 0;
}

void Stops::taken() {
  const int64_t rest = held_.size - num_shown_;
  if (rest && num_shown_) memmove(held_.data, held_.data + num_shown_, static_cast<size_t>(rest));
  held_.size = rest;
  num_shown_ = 0;
}

}  // namespace lite
