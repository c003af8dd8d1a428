// Places of blocks of memory that are alive for a part of a step.
#ifndef PENSTOCK_PROGRAM_PLACE_BLOCKS_H
#define PENSTOCK_PROGRAM_PLACE_BLOCKS_H

#include "base/error.h"
#include "base/memory.h"

namespace ps {

struct Block {
  int32_t value, first, last;  // alive from node to node, in the program's order
  int64_t bytes, offset;
};

// Fills the offsets, so that blocks that are alive at the same time do not overlap, and sorts the blocks by size.
// *bytes is where the last one ends.  `limit` names what is too large where that does not fit in 63 bits.
ps_status place_blocks(Vec<Block>* blocks, const char* limit, int64_t* bytes);
ps_status too_large(const char* limit);

}  // namespace ps

#endif
