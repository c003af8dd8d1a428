// Validation of a graph before it runs; nothing in a file is trusted.
#ifndef PENSTOCK_BUNDLE_VALIDATE_H
#define PENSTOCK_BUNDLE_VALIDATE_H

#include "ops/graph.h"
#include "ops/ops.h"

namespace ps {

// Segments and weights: inside the file, aligned, disjoint, of the exact size, with unique names.
ps_status validate_storage(Graph* graph, int64_t data_begin, int64_t file_bytes);
// Values, states, nodes: infers shapes again and checks every reference.  Fills what Value calls "found by validation".
ps_status validate_graph(Graph* graph);
// The same for a general network.
ps_status validate_network(Graph* graph);
// Only the nodes, after values and states.
ps_status validate_nodes(Graph* graph);
// An operand for shape rules; its index has been checked.
Spec spec_of(const Graph& graph, const Operand& operand);
// Attributes in the order of the schema, already validated.
ps_status bind_node_attrs(const Node& node, AttrValue* out);
// The first name that is not unique; -1: none, -2: out of memory.
int64_t find_duplicate(const Vec<Str>& names, Vec<int32_t>* order);

}  // namespace ps

#endif
