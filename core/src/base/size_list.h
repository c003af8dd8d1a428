// Lists of sizes in files, such as "B,12*S,(H+1)//2": integers and named sizes, + - * // %, max(a,b) and min(a,b).
#ifndef PENSTOCK_BASE_SIZE_LIST_H
#define PENSTOCK_BASE_SIZE_LIST_H

#include "base/error.h"

namespace ps {

constexpr int32_t kMaxListLen = 16;  // pads have two numbers for each of 6 axes

struct NamedSize {
  Str name;
  int64_t value;
};

// Values of the names. // and % round down, as in Python.
struct SizeNames {
  const NamedSize* items = nullptr;
  int32_t count = 0;
};

// Evaluates `text` into at most kMaxListLen numbers.  An empty text is an empty list.  Fails, quoting the text, for a
// syntax error, an unknown name, a division by a size below 1, and numbers beyond 2^62.
ps_status evaluate_sizes(Str text, const SizeNames& names, int64_t* out, int32_t* count);

// Splits a list at commas outside parentheses into at most kMaxListLen expressions.
ps_status split_sizes(Str text, Str* out, int32_t* count);
// Bit i: the expression uses names.items[i]; at most 64 names.
uint64_t sizes_used(Str expression, const SizeNames& names);

}  // namespace ps

#endif
