// Elementwise ops of integers and bool: blocks of any type are widened to i64 and narrowed again, so that each kind has
// one implementation.  Sums and products wrap, like unsigned ones in C.
#ifndef PENSTOCK_ARRAYS_INTEGERS_H
#define PENSTOCK_ARRAYS_INTEGERS_H

#include "arrays/blocks.h"

namespace ps {

// Elements data[i * step] of an integer type or bool.
void load_integers(int32_t dtype, const uint8_t* data, int64_t step, int64_t n, int64_t* out);
// Keeps the low bits; for bool: nonzero is true.
void store_integers(int32_t dtype, const int64_t* x, int64_t n, uint8_t* out);

bool is_integer_unary(int32_t kind);
bool is_integer_binary(int32_t kind);
void integer_unary(int32_t kind, double alpha, double beta, int64_t* x, int64_t n);
// a = kind(a, b)
void integer_binary(int32_t kind, int64_t* a, const int64_t* b, int64_t n);

int64_t saturated(double x, double lowest, double limit);  // truncated; NaN: 0

}  // namespace ps

#endif
