// Rows that nobody but the output rows of a step needs.
//
// Behind the last layer's keys and values only the tokens whose logits are wanted are looked at.  The nodes there are
// kept nodes: they run after all others, over the wanted tokens alone.  Before them what they read of other nodes moves
// together in its own memory, one wanted row after another from row 0 on.
#ifndef PENSTOCK_PROGRAM_WANTED_ROWS_H
#define PENSTOCK_PROGRAM_WANTED_ROWS_H

#include "ops/ops.h"

namespace ps {

constexpr int32_t kKeptTokens = NUM_ROLES;  // beside the roles: the tokens that kept nodes run over

// Sets Node::kept; nodes and output are validated.
ps_status find_kept(Graph* graph);
// The nodes in a program's order: kept ones after all others that come before the output rows are picked.
ps_status order_nodes(const Graph& graph, Vec<int32_t>* order);

// What kept nodes read of other nodes: elements [begin, end) of each row of a root.
struct KeptSource {
  int32_t root;
  int64_t begin, end;
};
struct KeptSources {
  KeptSource items[kMaxOperands];
  int32_t count;  // -1: too many
};
KeptSources find_sources(const Graph& graph);

// Inputs: the sources as rows of f32, as many as are kept; first output: as many as the step has.  Row r of each
// becomes what its row token_request[r] was, which ascends with r.
extern const Phase kMoveKept;

}  // namespace ps

#endif
