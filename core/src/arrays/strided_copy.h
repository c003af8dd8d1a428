// Copies elements with a stride along each axis to dense memory: permute, slice, expand.
#ifndef PENSTOCK_ARRAYS_STRIDED_COPY_H
#define PENSTOCK_ARRAYS_STRIDED_COPY_H

#include "arrays/blocks.h"

namespace ps {

// Copies `count` elements of 1, 2, 4 or 8 bytes each; avoids a call for short runs.
void copy_elements(uint8_t* to, const uint8_t* from, int64_t bytes);
// Repeats one element n times.
void splat(const uint8_t* from, int64_t bytes, int64_t n, uint8_t* to);

struct StridedCopy {
  int32_t rank = 0;
  int64_t dims[kMaxRank], strides[kMaxRank];  // of the output; elements of the input from one to the next, any sign
  int64_t base = 0;                           // element of the input where the output's first is
  int64_t bytes = 0, total = 1;

  void add(int64_t dim, int64_t stride) {
    dims[rank] = dim;
    strides[rank++] = stride;
    total *= dim;
  }
  void plan();  // merges axes
  int64_t items() const;
  void run(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const;

 private:
  int32_t unit = -1;  // the axis with stride 1 if it is not the last: then the last two are transposed in tiles

  template <class T>
  void transpose(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const;
  void copy_rows(const uint8_t* x, uint8_t* y, int64_t begin, int64_t end) const;
};

}  // namespace ps

#endif
