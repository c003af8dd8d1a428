// Stop strings, which end an answer.
#ifndef PENSTOCK_LITE_STOPS_H
#define PENSTOCK_LITE_STOPS_H

#include "array.h"

namespace lite {

// Finds the string that is completed first, of those the longest; holds back text that may still become one.
class Stops {
 public:
  void add(const char* text) { strings_.push(text); }
  bool empty() const { return strings_.size == 0; }
  // Takes new text.  True: a string is complete, and text() ends before it.
  bool push(const char* text, int64_t bytes);
  // The answer is over: text() is what was held back.
  void flush() { num_shown_ = held_.size; }
  const char* text() const { return held_.data; }  // that may be shown
  int64_t bytes() const { return num_shown_; }
  void taken();  // it was shown

 private:
  Array<const char*> strings_;
  Array<char> held_;
  int64_t num_shown_ = 0;
};

}  // namespace lite

#endif
