// The nodes of a graph as a program runs them, after fusion.
#ifndef PENSTOCK_PASSES_FUSE_H
#define PENSTOCK_PASSES_FUSE_H

#include "ops/ops.h"

namespace ps {

// A node that a program runs.  A fused linear writes what another node's op would have made of its result:
// silu_mul(gate, up) when `gated`, the sum with inputs[kResidual] when that is there; then add_rms_norm has no
// inputs[1], no outputs[1], and its input is the sum.  The same bits, from fewer passes over memory.
struct RunNode {
  Node node;
  bool gated;    // a linear's
  bool skipped;  // another node does its work
};

// One for each node of the graph, in its order.
ps_status fuse_nodes(const Graph& graph, const Kernels& kernels, Vec<RunNode>* out);

}  // namespace ps

#endif
