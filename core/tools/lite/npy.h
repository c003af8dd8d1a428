// Files with one array, in the format of numpy.save: versions 1.0 to 3.0, little-endian, C order.
#ifndef PENSTOCK_LITE_NPY_H
#define PENSTOCK_LITE_NPY_H

#include "array.h"
#include "penstock.h"

namespace lite {

struct Npy {
  Array<char> data;
  ps_array array{};  // its data points into `data`
};

// False: `message` gives the reason.  The format has no bf16: a file of u2 is read as `dtype` PS_BF16.
bool read_npy(const char* path, int32_t dtype, Npy* out, char* message, uint64_t message_bytes);
bool write_npy(const char* path, const ps_array& array, char* message, uint64_t message_bytes);
const char* npy_type(int32_t dtype);  // "<f4" ...
int64_t array_bytes(const ps_array& array);

}  // namespace lite

#endif
