// The shapes of all values of a general network, for one set of sizes.
#ifndef PENSTOCK_BUNDLE_NETWORK_SHAPES_H
#define PENSTOCK_BUNDLE_NETWORK_SHAPES_H

#include "ops/ops.h"

namespace ps {

constexpr int64_t kMaxElements = int64_t{1} << 40;  // of a value

// The value of each size, in the order of the graph's symbols, with its name.
struct NetworkSizes {
  NamedSize items[kMaxSizes];
  int32_t count;
  SizeNames names() const { return SizeNames{items, count}; }
};
// The sizes that the file gives as an example.
NetworkSizes example_sizes(const Graph& graph);

// Dims of one input, as a caller has them.
struct InputDims {
  int32_t rank;
  int64_t dims[kMaxRank];
};
// Finds the sizes for which the inputs have these dims.  Fails, with the input and the dimension, where there are none.
ps_status solve_sizes(const Graph& graph, const InputDims* inputs, NetworkSizes* out);

// An op that general networks may have: it has no state, exchanges nothing and trusts no index.
bool is_network_op(int32_t op);
// The operands of a node, from the types of the values before it.
Spec network_operand(const Graph& graph, const Vec<Spec>& specs, const Operand& operand);
// Binds the attributes of a node and infers its outputs into `specs`.  `lists`: kMaxAttrs * kMaxListLen numbers, to
// which attributes point.
ps_status infer_network_node(const Graph& graph, const Node& node, const NetworkSizes& sizes, Vec<Spec>* specs,
                             AttrValue* attrs, int64_t* lists);
// The types of all values; those that nothing defines have the kind OPERAND_NONE.
ps_status infer_network(const Graph& graph, const NetworkSizes& sizes, Vec<Spec>* specs);
inline int64_t num_elements(const Spec& spec) {
  int64_t count = 1;
  for (int32_t d = 0; d < spec.rank; ++d) count *= spec.dims[d].offset;
  return count;
}

}  // namespace ps

#endif
