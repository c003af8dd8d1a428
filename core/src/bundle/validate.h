// Validation of a graph before it runs; nothing in a file is trusted.
#ifndef PENSTOCK_BUNDLE_VALIDATE_H
#define PENSTOCK_BUNDLE_VALIDATE_H

#include "ops/graph.h"
#include "ops/ops.h"

namespace ps {

// Segments and weights: inside the file, aligned, disjoint, of the exact size, names unique.
ps_status validate_storage(Graph* graph, int64_t data_begin, int64_t file_bytes);
// Values, states, nodes: shapes inferred again, every reference sound.  Fills what Value calls "found by validation".
ps_status validate_graph(Graph* graph);
// The same of a general network.
ps_status validate_network(Graph* graph);
// Only the nodes, after values and states.
ps_status validate_nodes(Graph* graph);
// An operand as shape rules see it; its index is known to be sound.
Spec spec_of(const Graph& graph, const Operand& operand);
// Attributes in the order of the schema; they were validated.
ps_status bind_node_attrs(const Node& node, AttrValue* out);
// The first name that was used before, -1: none, -2: out of memory.
int64_t find_duplicate(const Vec<Str>& names, Vec<int32_t>* order);

}  // namespace ps

#endif
