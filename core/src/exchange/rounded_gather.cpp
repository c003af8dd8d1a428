// all_gather_rounded: gathers rows as the integers to which a linear rounds them, which are fewer bytes.
//
// Ranks first exchange the largest magnitude of their part of each row, so that each rounds with the scale of the whole
// row, as the linear does (kernels/rows/quantize.h).  An element of the result is its integer times the scale; the
// largest integers stand for the magnitude itself.  Rounding the result again gives the same scale and the same
// integers: the other elements are smaller than the magnitude, and an integer up to 2^15 times two rounded factors is
// off by far less than a half.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "base/memory.h"
#include "exchange/exchange.h"

namespace ps {
namespace {

constexpr float kRoundMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number
constexpr uint32_t kInfinity = 0x7f800000;

float* f32(const Tensor& t) { return reinterpret_cast<float*>(t.data); }
int64_t rows(const Call& c) { return c.in[0].dims[0]; }
int64_t once(const Call& c) { return rows(c) > 0; }
int64_t slots(const Call& c) { return c.in[0].rank == 3 ? c.in[0].dims[1] : 1; }
bool is_alive(const Call& c) { return c.exchange && c.exchange->status == PS_OK; }
bool is_short(const Call& c) { return c.attrs[kRoundedBits].i == 8; }
int64_t integer_bytes(const Call& c) { return is_short(c) ? 1 : 2; }
uint32_t* largest(const Call& c) { return reinterpret_cast<uint32_t*>(c.scratch); }  // [rows][slots], as bits
uint8_t* own_part(const Call& c) { return static_cast<uint8_t*>(c.exchange->comm->part(c.exchange->comm->self)); }

Cut cut_of(const Call& c) {
  Cut cut{};
  read_cut(c.attrs[kRoundedStarts].s, &cut);
  return cut;
}

struct Rounding {
  float magnitude, scale, inverse, limit;

  int32_t integer(float x) const {
    float v = x * inverse;
    v = v < limit ? v : limit;  // NaN becomes the limit; its scale is NaN
    v = v > -limit ? v : -limit;
    return static_cast<int32_t>((v + kRoundMagic) - kRoundMagic);
  }
  float value(int32_t q) const {
    const float whole = static_cast<float>(q);
    return whole == limit ? magnitude : whole == -limit ? -magnitude : whole * scale;
  }
};

Rounding rounding_of(const Call& c, int64_t index) {
  const float limit = is_short(c) ? 127.f : 32512.f;
  const uint32_t bits = largest(c)[index];
  if (bits >= kInfinity) return Rounding{NAN, NAN, 0.f, limit};
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  const float scale = magnitude / limit;
  if (scale < 1e-37f) return Rounding{0.f, 0.f, 0.f, limit};
  return Rounding{magnitude, scale, 1.f / scale, limit};
}

// The part of all rows at slot `index`.
const float* own_slot(const Call& c, int64_t index, int64_t size) {
  return f32(c.in[0]) + index / slots(c) * c.in[0].row_stride + index % slots(c) * size;
}

void find_largest(const Call& c, int64_t begin, int64_t end, uint32_t* out) {
  const int64_t size = c.in[0].dims[c.in[0].rank - 1];
  for (int64_t i = begin * slots(c); i < end * slots(c); ++i) {
    const float* x = own_slot(c, i, size);
    uint32_t most = 0, bits;
    for (int64_t j = 0; j < size; ++j) {
      memcpy(&bits, x + j, 4);
      most = std::max(most, bits & 0x7fffffff);
    }
    out[i] = most;
  }
}

void run_put_largest(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (is_alive(c)) find_largest(c, begin, end, reinterpret_cast<uint32_t*>(own_part(c)));
}

void run_exchange_largest(const Call& c, int64_t, int64_t, int32_t) {
  if (!c.exchange) return find_largest(c, 0, rows(c), largest(c));
  const Cut cut = cut_of(c);
  const int64_t count = rows(c) * slots(c);
  for (int32_t r = 0; r < cut.world; ++r) c.exchange->bytes[r] = count * 4;
  c.exchange->gather(c);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t most = 0;
    for (int32_t r = 0; r < cut.world && c.exchange->status == PS_OK; ++r)
      most = std::max(most, static_cast<const uint32_t*>(c.exchange->parts[r])[i]);
    largest(c)[i] = most;
  }
}

template <typename Integer>
void put_integers(const Call& c, int64_t begin, int64_t end) {
  const int64_t size = c.in[0].dims[c.in[0].rank - 1];
  Integer* part = reinterpret_cast<Integer*>(own_part(c));
  for (int64_t i = begin * slots(c); i < end * slots(c); ++i) {
    const Rounding rounding = rounding_of(c, i);
    const float* x = own_slot(c, i, size);
    for (int64_t j = 0; j < size; ++j) part[i * size + j] = static_cast<Integer>(rounding.integer(x[j]));
  }
}

void run_put_integers(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (!is_alive(c)) return;
  if (is_short(c)) return put_integers<int8_t>(c, begin, end);
  put_integers<int16_t>(c, begin, end);
}

void run_exchange_integers(const Call& c, int64_t, int64_t, int32_t) {
  if (!c.exchange) return;
  const Cut cut = cut_of(c);
  for (int32_t r = 0; r < cut.world; ++r) c.exchange->bytes[r] = rows(c) * slots(c) * cut.size(r) * integer_bytes(c);
  c.exchange->gather(c);
}

template <typename Integer>
void take_integers(const Call& c, int64_t begin, int64_t end) {
  const Cut cut = cut_of(c);
  const int64_t own = c.attrs[kRoundedRank].i;
  for (int64_t i = begin * slots(c); i < end * slots(c); ++i) {
    const Rounding rounding = rounding_of(c, i);
    float* y = f32(c.out[0]) + i / slots(c) * c.out[0].row_stride + i % slots(c) * cut.total();
    for (int32_t r = 0; r < cut.world; ++r, y += cut.size(r - 1)) {
      const int64_t size = cut.size(r);
      const float* x = own_slot(c, i, size);
      const Integer* q = r == own ? nullptr : static_cast<const Integer*>(c.exchange->parts[r]) + i * size;
      for (int64_t j = 0; j < size; ++j) y[j] = rounding.value(q ? q[j] : rounding.integer(x[j]));
    }
  }
}

void run_take_integers(const Call& c, int64_t begin, int64_t end, int32_t) {
  if (c.exchange && c.exchange->status != PS_OK) return;
  if (is_short(c)) return take_integers<int8_t>(c, begin, end);
  take_integers<int16_t>(c, begin, end);
}

constexpr Phase kPhases[] = {
    {.split = SPLIT_ROWS, .items = rows, .run = run_put_largest, .reads_rows = operands(0), .writes_scratch = true},
    {.split = SPLIT_ITEMS,
     .items = once,
     .run = run_exchange_largest,
     .reads_all = operands(0),
     .reads_scratch = true,
     .writes_scratch = true},
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_put_integers,
     .reads_rows = operands(0),
     .reads_scratch = true,
     .writes_scratch = true},
    {.split = SPLIT_ITEMS, .items = once, .run = run_exchange_integers, .reads_scratch = true, .writes_scratch = true},
    {.split = SPLIT_ROWS,
     .items = rows,
     .run = run_take_integers,
     .reads_rows = operands(0),
     .writes_outputs = true,
     .reads_scratch = true},
};

}  // namespace

Phases all_gather_rounded_phases(const Call&) { return Phases{kPhases, 5}; }

ps_status all_gather_rounded_scratch(const Call& c, Scratch* out) {
  if (checked_mul(rows(c), slots(c) * 4, &out->shared)) return PS_OK;
  return fail(PS_INVALID_ARGUMENT, "max_tokens: the rows do not fit in memory");
}

ps_status infer_all_gather_rounded(const Spec* in, AttrValue* attrs, Spec* out) {
  const int64_t bits = attrs[kRoundedBits].i;
  if (bits != 8 && bits != 16)
    return fail(PS_INVALID_ARGUMENT, "bits: expected 8 or 16, got %lld", static_cast<long long>(bits));
  return infer_all_gather(in, attrs, out);
}

}  // namespace ps
