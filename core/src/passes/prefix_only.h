// Nodes of an encoder-decoder that are skipped in steps without encoder tokens.
#ifndef PENSTOCK_PASSES_PREFIX_ONLY_H
#define PENSTOCK_PASSES_PREFIX_ONLY_H

#include "ops/ops.h"

namespace ps {

// Sets Node::prefix_only in a graph whose nodes and output are validated: on nodes that contribute only to keys and
// values that queries read within the prefix only.
ps_status mark_prefix_only(Graph* graph);

}  // namespace ps

#endif
