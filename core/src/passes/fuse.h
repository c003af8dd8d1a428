// The nodes of a graph as a program runs them, after fusion.
#ifndef PENSTOCK_PASSES_FUSE_H
#define PENSTOCK_PASSES_FUSE_H

#include "ops/ops.h"

namespace ps {

// A node that a program runs.  A fused linear also computes another node's op on its result: silu_mul(gate, up) if
// `gated`; the sum with inputs[kResidual] if that is set, and then add_rms_norm has no inputs[1] and no outputs[1], and
// its input is the sum.  The bits are the same, with fewer passes over memory.
struct RunNode {
  Node node;
  bool gated;    // linear only
  bool skipped;  // another node does its work
};

// One for each node of the graph, in the same order.
ps_status fuse_nodes(const Graph& graph, const Kernels& kernels, Vec<RunNode>* out);

}  // namespace ps

#endif
