// Nodes of an encoder-decoder that a step without tokens of the encoder leaves out.
#ifndef PENSTOCK_PASSES_PREFIX_ONLY_H
#define PENSTOCK_PASSES_PREFIX_ONLY_H

#include "ops/ops.h"

namespace ps {

// Sets Node::prefix_only in a graph whose nodes and output are validated: where all that comes of a node are keys and
// values that queries read within the prefix only.
ps_status mark_prefix_only(Graph* graph);

}  // namespace ps

#endif
