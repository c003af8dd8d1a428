// int8 activations: i8 from -127 to 127 or u8 from 0 to 127, times a scale.
#ifndef PENSTOCK_GENERAL_REQUANTIZE_H
#define PENSTOCK_GENERAL_REQUANTIZE_H

#include "ops/expect.h"

namespace ps {

constexpr int64_t kMaxInt8Columns = int64_t{1} << 16;  // sums fit 32 bits for any bytes of a damaged file

ps_status expect_int8(const Spec& s, const char* name, int32_t min_rank, int32_t max_rank);
// Requires a scale with a finite inverse.
ps_status check_scale(const char* name, const AttrValue& scale);
// Sets the dtype named by `dtype`, f32, i8 or u8; y_scale is for int8 outputs.
ps_status int8_output(AttrValue* dtype, const AttrValue& y_scale, Spec* out);

}  // namespace ps

#endif
