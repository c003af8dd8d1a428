// Repacks GGUF blocks into tiles of 16 rows without changing their values.
#ifndef PENSTOCK_PACK_GGUF_BLOCKS_H
#define PENSTOCK_PACK_GGUF_BLOCKS_H

#include <stdint.h>

namespace ps {

// Copies block `index` of a row into its tile; false if a scale is not finite.
using PutBlock = bool (*)(const uint8_t* src, int64_t index, int64_t lane, uint8_t* tile);

struct BlockFormat {
  int64_t columns, bytes;  // of a block in the file
  PutBlock put;
};

// Returns the block format of a layout PS_T16_Q*.
BlockFormat block_format(int32_t layout);

}  // namespace ps

#endif
