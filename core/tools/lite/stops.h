// Stop strings, which end a response.
#ifndef PENSTOCK_LITE_STOPS_H
#define PENSTOCK_LITE_STOPS_H

#include "array.h"

namespace lite {

// Finds the stop string that is completed first, the longest among several; holds back text that may still become one.
class Stops {
 public:
  void add(const char* text) { strings_.push(text); }
  bool empty() const { return strings_.size == 0; }
  // Adds text.  True: a stop string is complete, and text() ends before it.
  bool push(const char* text, int64_t bytes);
  // The response is over: text() is the text held back.
  void flush() { num_shown_ = held_.size; }
  const char* text() const { return held_.data; }  // text that can be shown
  int64_t bytes() const { return num_shown_; }
  void taken();  // text() was shown

 private:
  Array<const char*> strings_;
  Array<char> held_;
  int64_t num_shown_ = 0;
};

}  // namespace lite

#endif
