// Nodes that run only for the wanted tokens: those whose logits a step returns.
//
// After the last layer has written its keys and values, the remaining nodes matter only for the wanted tokens.  These
// nodes (Node::wanted_only) run after all others.  Before them, the rows that they read are moved to the front of their
// memory: wanted rows in order, from row 0 on.
#ifndef PENSTOCK_PASSES_WANTED_ROWS_H
#define PENSTOCK_PASSES_WANTED_ROWS_H

#include "ops/ops.h"

namespace ps {

constexpr int32_t kWantedTokens = NUM_ROLES;  // an additional size: the number of wanted tokens

// Sets Node::wanted_only in a graph whose nodes and output are validated.
ps_status mark_wanted_only(Graph* graph);
// The execution order of the nodes: wanted-only nodes come after all others before the gather of the output rows.
ps_status order_nodes(const Graph& graph, Vec<int32_t>* order);

// A value that wanted-only nodes read from another node: elements [begin, end) of each row of a root.
struct WantedSource {
  int32_t root;
  int64_t begin, end;
};
struct WantedSources {
  WantedSource items[kMaxOperands];
  int32_t count;  // -1: too many
};
WantedSources find_sources(const Graph& graph);

// Moves wanted rows to the front.  Inputs: the sources as rows of f32, one for each wanted token; the first output has
// one for each token of the step.  Row r of each input becomes its row token_request[r], which ascends with r.
extern const Phase kMoveWanted;

}  // namespace ps

#endif
