// The reader of the metadata of a bundle.
#ifndef PENSTOCK_BUNDLE_METADATA_H
#define PENSTOCK_BUNDLE_METADATA_H

#include "bundle/flatbuffer.h"
#include "ops/graph.h"

namespace ps {

// The metadata's tables as a Graph.  Counts and indices of symbols and ops are checked here, the rest by validate.
ps_status read_metadata(FlatBuffer buffer, Graph* graph);

}  // namespace ps

#endif
