// Shared parts of the ops of general networks: shape checks, and broadcast operands read in blocks.
#ifndef PENSTOCK_ARRAYS_BLOCKS_H
#define PENSTOCK_ARRAYS_BLOCKS_H

#include "ops/ops.h"

namespace ps {

constexpr int64_t kMaxElements = int64_t{1} << 40;

constexpr uint32_t dtypes(int32_t dtype) { return 1u << dtype; }
template <class... Rest>
constexpr uint32_t dtypes(int32_t dtype, Rest... rest) {
  return 1u << dtype | dtypes(rest...);
}
constexpr uint32_t kInts = dtypes(PS_I8, PS_I32, PS_U8, PS_I64), kIntsAndBool = kInts | dtypes(PS_BOOL),
                   kAnyDtype = kIntsAndBool | dtypes(PS_F32, PS_F16, PS_BF16);

// Checks that the tensor has one of the types.
ps_status expect_dtype(const Spec& s, const char* name, uint32_t types);
// Fills a spec.  Fails for dims outside 0...2^31 and for more than 2^40 elements.
ps_status set_output(int32_t dtype, int32_t rank, const int64_t* dims, Spec* out);
// Normalizes an axis of -rank...rank - 1 to 0...rank - 1 in the attribute.
ps_status resolve_axis(const char* name, AttrValue* axis, int32_t rank);
// Sets the attribute to the dtype of that name.
ps_status parse_dtype(const char* name, AttrValue* dtype);
// Broadcasts `dims` of `rank` with those of s, by numpy's rules.
ps_status broadcast(const Spec& s, const char* name, int64_t* dims, int32_t* rank);

// The bytes of one element with this value.
void fill_value(int32_t dtype, double value, uint8_t* out);

inline int64_t num_elements(const Tensor& t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.rank; ++i) n *= t.dims[i];
  return n;
}
// The product of the dims from `begin` to `end`.
inline int64_t extent(const Tensor& t, int32_t begin, int32_t end) {
  int64_t n = 1;
  for (int32_t i = begin; i < end; ++i) n *= t.dims[i];
  return n;
}
inline int64_t num_blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

// Elementwise ops process their output in blocks of at most kBlock elements.  Threads take kItem elements at a time.
constexpr int64_t kBlock = 1024, kItem = 4 * kBlock;
inline int64_t element_items(const Call& c) { return num_blocks(num_elements(c.out[0]), kItem); }

// Calls function(start, n) for the blocks of items.
template <class Function>
void each_block(int64_t total, int64_t block, int64_t begin, int64_t end, Function function) {
  const int64_t first = begin * kItem, last = end * kItem < total ? end * kItem : total;
  for (int64_t start = first; start < last;) {
    // Blocks begin at multiples of their size, so that most begin where a vector along the last axis begins.
    const int64_t next = (start / block + 1) * block, stop = next < last ? next : last;
    function(start, stop - start);
    start = stop;
  }
}

// n elements of an operand: consecutive (step 1), or one for all (step 0).
struct Piece {
  const uint8_t* data;
  int64_t step;
};

// An operand broadcast to the output's dims.
struct BroadcastOperand {
  const uint8_t* data;
  int64_t bytes;  // of an element
  int64_t strides[kMaxRank];
  // Set by Broadcast::plan.  The trailing dims are a run of equal elements, or `repeats` repetitions of a run.
  bool dense, constant_run;
  int64_t run, repeats;
  // The contents of `buffer`: elements from `phase` in the run on.
  int64_t cached_span, cached_phase, cached_count;
};

template <int32_t max_operands>
struct Buffers {
  alignas(64) uint8_t bytes[max_operands][kBlock * 8];
};

// The dims of an output; adjacent ones are merged if every operand allows it.
struct Broadcast {
  int32_t rank = 0, count = 0;
  int64_t dims[kMaxRank], total = 1;
  BroadcastOperand operands[kMaxOperands];

  void start(const Tensor& out);
  void add(const Tensor& operand);
  void plan();
  // Returns n <= kBlock elements of an operand from `start` on: in its memory, or copied to a buffer of kBlock
  // elements.
  Piece piece(int32_t operand, int64_t start, int64_t n, uint8_t* buffer);
  // The largest block, up to kBlock elements, that begins where a vector along the last axis begins.
  int64_t block() const;

 private:
  void fill(const BroadcastOperand& o, int64_t start, int64_t n, uint8_t* buffer) const;
  int64_t offset_of(const BroadcastOperand& o, int64_t start, int64_t* index) const;
};

}  // namespace ps

#endif
