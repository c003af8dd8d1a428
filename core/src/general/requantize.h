// int8 activations: i8 with -127 to 127 or u8 with 0 to 127, times a scale.
#ifndef PENSTOCK_GENERAL_REQUANTIZE_H
#define PENSTOCK_GENERAL_REQUANTIZE_H

#include "ops/expect.h"

namespace ps {

constexpr int64_t kMaxInt8Columns = int64_t{1} << 16;  // sums fit 32 bits, whatever the bytes of a damaged file are

ps_status expect_int8(const Spec& s, const char* name, int32_t min_rank, int32_t max_rank);
// Expects a scale whose inverse is finite.
ps_status check_scale(const char* name, const AttrValue& scale);
// Sets the type that `dtype` names, f32, i8 or u8; y_scale is that of an int8 output.
ps_status int8_output(AttrValue* dtype, const AttrValue& y_scale, Spec* out);

}  // namespace ps

#endif
