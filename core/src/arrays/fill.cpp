// Ops of general networks: fill, iota, sizes.
// Hot: runs in every step.
#include "arrays/integers.h"
#include "arrays/strided_copy.h"
#include "ops/expect.h"
#include "base/size_list.h"
#include "base/half.h"

namespace ps {
namespace {

constexpr int32_t kFillSizes = attr_at(OP_FILL, "int[] sizes"), kFillDtype = attr_at(OP_FILL, "str dtype"),
                  kFillValue = attr_at(OP_FILL, "float value"), kIotaRange = attr_at(OP_IOTA, "int[] range"),
                  kSizesValues = attr_at(OP_SIZES, "int[] values");

int64_t* i64(const Tensor& t) { return reinterpret_cast<int64_t*>(t.data); }

void run_fill(const Call& c, int64_t begin, int64_t end, int32_t) {
  uint8_t value[8];
  fill_value(c.out[0].dtype, c.attrs[kFillValue].f, value);
  const int64_t total = num_elements(c.out[0]), bytes = dtype_bytes(c.out[0].dtype), first = begin * kItem;
  splat(value, bytes, (end * kItem < total ? end * kItem : total) - first, c.out[0].data + first * bytes);
}
void run_iota(const Call& c, int64_t begin, int64_t end, int32_t) {
  const int64_t total = num_elements(c.out[0]), last = end * kItem < total ? end * kItem : total;
  const int64_t* range = c.attrs[kIotaRange].list;
  for (int64_t i = begin * kItem; i < last; ++i)
    i64(c.out[0])[i] = static_cast<int64_t>(static_cast<uint64_t>(range[0]) +
                                            static_cast<uint64_t>(i) * static_cast<uint64_t>(range[1]));
}
void run_sizes(const Call& c, int64_t, int64_t, int32_t) {
  for (int64_t i = 0; i < c.out[0].dims[0]; ++i) i64(c.out[0])[i] = c.attrs[kSizesValues].list[i];
}

constexpr Phase fill_phase(void (*run)(const Call&, int64_t, int64_t, int32_t)) {
  return Phase{.split = SPLIT_ITEMS, .items = element_items, .run = run, .writes_outputs = true};
}
constexpr Phase kFill = fill_phase(run_fill), kIota = fill_phase(run_iota), kSizes = fill_phase(run_sizes);

}  // namespace

void fill_value(int32_t dtype, double value, uint8_t* out) {
  const float number = static_cast<float>(value);
  const uint16_t half = dtype == PS_F16 ? f32_to_f16(number) : f32_to_bf16(number);
  const int64_t whole = dtype == PS_BOOL ? value != 0 : saturated(value, -9223372036854775808.0, 9223372036854775808.0);
  if (dtype == PS_F32) {
    memcpy(out, &number, sizeof(number));
  } else if (dtype == PS_F16 || dtype == PS_BF16) {
    memcpy(out, &half, sizeof(half));
  } else {
    store_integers(dtype, &whole, 1, out);
  }
}

ps_status infer_fill(const Spec*, AttrValue* attrs, Spec* out) {
  PS_TRY(parse_dtype("dtype", &attrs[kFillDtype]));
  const AttrValue& sizes = attrs[kFillSizes];
  if (sizes.i > kMaxRank)
    return fail(PS_INVALID_ARGUMENT, "sizes: expected up to %d numbers, got %lld", kMaxRank,
                static_cast<long long>(sizes.i));
  return set_output(static_cast<int32_t>(attrs[kFillDtype].i), static_cast<int32_t>(sizes.i), sizes.list, out);
}
Phases fill_phases(const Call&) { return Phases{&kFill, 1}; }
ps_status fill_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_iota(const Spec*, AttrValue* attrs, Spec* out) {
  const AttrValue& range = attrs[kIotaRange];
  if (range.i != 3)
    return fail(PS_INVALID_ARGUMENT, "range: expected start, step and number, got %lld numbers",
                static_cast<long long>(range.i));
  return set_output(PS_I64, 1, range.list + 2, out);
}
Phases iota_phases(const Call&) { return Phases{&kIota, 1}; }
ps_status iota_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_sizes(const Spec*, AttrValue* attrs, Spec* out) {
  return set_output(PS_I64, 1, &attrs[kSizesValues].i, out);
}
Phases sizes_phases(const Call&) { return Phases{&kSizes, 1}; }
ps_status sizes_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
