// Shared parts of the ops of general networks.
// Hot: runs in every step.
#include "arrays/blocks.h"

#include "arrays/strided_copy.h"
#include "ops/expect.h"

namespace ps {

ps_status expect_dtype(const Spec& s, const char* name, uint32_t types) {
  if (s.dtype > 0 && s.dtype < 32 && (types >> s.dtype & 1)) return PS_OK;
  char list[64] = "";
  for (int32_t i = 1; i <= PS_BOOL; ++i) {
    if (!(types >> i & 1)) continue;
    if (*list) strncat(list, ", ", sizeof(list) - strlen(list) - 1);
    strncat(list, dtype_name(i), sizeof(list) - strlen(list) - 1);
  }
  return fail(PS_INVALID_ARGUMENT, "%s: expected a type of %s, got %s", name, list, describe(s).text);
}

ps_status set_output(int32_t dtype, int32_t rank, const int64_t* dims, Spec* out) {
  if (rank > kMaxRank) return fail(PS_INVALID_ARGUMENT, "output: expected up to %d dims, got %d", kMaxRank, rank);
  memset(out, 0, sizeof(*out));
  out->kind = OPERAND_VALUE;
  out->dtype = dtype;
  out->rank = rank;
  out->group = -1;
  out->bound = constant(0);
  int64_t elements = 1;
  for (int32_t i = 0; i < rank; ++i) {
    if (dims[i] < 0 || dims[i] > kMaxDim)
      return fail(PS_INVALID_ARGUMENT, "output: expected sizes of 0 to 2^31, got %lld",
                  static_cast<long long>(dims[i]));
    out->dims[i] = constant(dims[i]);
    // A dim of 0 must not hide the others, whose product is used elsewhere.
    if (dims[i] && elements > kMaxElements / dims[i])
      return fail(PS_INVALID_ARGUMENT, "output: expected up to 2^40 elements, got %s", describe(*out).text);
    if (dims[i]) elements *= dims[i];
  }
  return PS_OK;
}

ps_status resolve_axis(const char* name, AttrValue* axis, int32_t rank) {
  if (axis->i < -rank || axis->i >= rank)
    return fail(PS_INVALID_ARGUMENT, "%s: expected -%d to %d, got %lld", name, rank, rank - 1,
                static_cast<long long>(axis->i));
  if (axis->i < 0) axis->i += rank;
  return PS_OK;
}

ps_status parse_dtype(const char* name, AttrValue* dtype) {
  for (int32_t i = 1; i <= PS_BOOL; ++i) {
    if (!equal(dtype->s, dtype_name(i))) continue;
    dtype->i = i;
    return PS_OK;
  }
  return fail(PS_UNSUPPORTED, "%s: expected a type such as f32 or i64, got \"%.*s\"", name, PS_STR(dtype->s));
}

ps_status broadcast(const Spec& s, const char* name, int64_t* dims, int32_t* rank) {
  if (s.rank > *rank) {
    const int32_t more = s.rank - *rank;
    for (int32_t i = s.rank - 1; i >= 0; --i) dims[i] = i >= more ? dims[i - more] : 1;
    *rank = s.rank;
  }
  for (int32_t i = 0; i < s.rank; ++i) {
    int64_t& dim = dims[*rank - s.rank + i];
    const int64_t own = s.dims[i].offset;
    if (own == dim || own == 1) continue;
    if (dim != 1)
      return fail(PS_INVALID_ARGUMENT, "%s: expected a size of 1 or %lld at dim %d, got %s", name,
                  static_cast<long long>(dim), i, describe(s).text);
    dim = own;
  }
  return PS_OK;
}

void Broadcast::start(const Tensor& out) {
  rank = out.rank;
  count = 0;
  total = num_elements(out);
  memcpy(dims, out.dims, sizeof(dims));
}

void Broadcast::add(const Tensor& t) {
  BroadcastOperand& o = operands[count++];
  o.data = t.data;
  o.bytes = dtype_bytes(t.dtype);
  o.cached_span = -1;
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    const int32_t own = i - (rank - t.rank);
    const int64_t size = own >= 0 ? t.dims[own] : 1;
    o.strides[i] = size == 1 ? 0 : stride;
    stride *= size;
  }
}

void Broadcast::plan() {
  int32_t kept = 0;
  for (int32_t i = 0; i < rank; ++i) {
    if (dims[i] == 1) continue;
    bool joins = kept > 0;
    for (int32_t j = 0; j < count && joins; ++j)
      joins = operands[j].strides[kept - 1] == operands[j].strides[i] * dims[i];
    if (!joins) ++kept;
    dims[kept - 1] = joins ? dims[kept - 1] * dims[i] : dims[i];
    for (int32_t j = 0; j < count; ++j) operands[j].strides[kept - 1] = operands[j].strides[i];
  }
  rank = kept;
  for (int32_t j = 0; j < count; ++j) {
    BroadcastOperand& o = operands[j];
    o.run = o.repeats = 1;
    int32_t i = rank - 1;
    o.constant_run = i < 0 || o.strides[i] == 0;
    if (o.constant_run) {
      for (; i >= 0 && o.strides[i] == 0; --i) o.run *= dims[i];
      o.dense = false;
    } else {
      for (; i >= 0 && o.strides[i] == o.run; --i) o.run *= dims[i];
      o.dense = i < 0;
      for (; i >= 0 && o.strides[i] == 0; --i) o.repeats *= dims[i];
    }
  }
}

int64_t Broadcast::block() const {
  int64_t block = kBlock;
  for (int32_t j = 0; j < count; ++j) {
    const BroadcastOperand& o = operands[j];
    int64_t own = kBlock;
    if (!o.dense && !o.constant_run && o.run <= kBlock) own = kBlock / o.run * o.run;
    if (!o.dense && o.run > kBlock) {  // blocks that end with a run need no copy
      const int64_t parts = num_blocks(o.run, kBlock);
      if (o.run % parts == 0) own = o.run / parts;
    }
    if (own < block) block = own;
  }
  return block;
}

int64_t Broadcast::offset_of(const BroadcastOperand& o, int64_t start, int64_t* index) const {
  int64_t offset = 0;
  for (int32_t i = rank - 1; i >= 0; --i) {
    const int64_t rest = i ? start / dims[i] : 0;
    const int64_t at = start - rest * dims[i];
    if (index) index[i] = at;
    offset += at * o.strides[i];
    start = rest;
  }
  return offset;
}

void Broadcast::fill(const BroadcastOperand& o, int64_t start, int64_t n, uint8_t* buffer) const {
  int64_t index[kMaxRank];
  int64_t offset = offset_of(o, start, index);
  const int32_t last = rank - 1;
  for (int64_t done = 0; done < n;) {
    const int64_t left = dims[last] - index[last], run = left < n - done ? left : n - done;
    const uint8_t* from = o.data + offset * o.bytes;
    uint8_t* to = buffer + done * o.bytes;
    if (o.strides[last]) {
      memcpy(to, from, static_cast<size_t>(run * o.bytes));
    } else {
      splat(from, o.bytes, run, to);
    }
    done += run;
    offset += run * o.strides[last];
    index[last] += run;
    for (int32_t i = last; i > 0 && index[i] == dims[i]; --i) {
      offset += o.strides[i - 1] - o.strides[i] * dims[i];
      index[i] = 0;
      ++index[i - 1];
    }
  }
}

Piece Broadcast::piece(int32_t operand, int64_t start, int64_t n, uint8_t* buffer) {
  BroadcastOperand& o = operands[operand];
  if (o.dense) return Piece{o.data + start * o.bytes, 1};
  const int64_t run = start / o.run;
  if (start + n <= (run + 1) * o.run)
    return Piece{o.data + offset_of(o, start, nullptr) * o.bytes, o.constant_run ? 0 : 1};
  if (o.constant_run) {
    fill(o, start, n, buffer);
    return Piece{buffer, 1};
  }
  const int64_t span = run / o.repeats, phase = start - run * o.run;
  const bool periodic = start + n <= (span + 1) * o.repeats * o.run;
  if (!periodic || span != o.cached_span || phase != o.cached_phase || n > o.cached_count) {
    fill(o, start, n, buffer);
    o.cached_span = periodic ? span : -1;
    o.cached_phase = phase;
    o.cached_count = n;
  }
  return Piece{buffer, 1};
}

}  // namespace ps
