// The parser of a bundle's metadata.
#ifndef PENSTOCK_BUNDLE_METADATA_H
#define PENSTOCK_BUNDLE_METADATA_H

#include "bundle/flatbuffer.h"
#include "ops/graph.h"

namespace ps {

// Converts the metadata's tables to a Graph.  Checks counts and indices of symbols and ops; validate checks the rest.
ps_status read_metadata(FlatBuffer buffer, Graph* graph);

}  // namespace ps

#endif
