// The shapes of all values of a general network, for one set of sizes.
#ifndef PENSTOCK_BUNDLE_NETWORK_SHAPES_H
#define PENSTOCK_BUNDLE_NETWORK_SHAPES_H

#include "ops/ops.h"

namespace ps {

constexpr int64_t kMaxElements = int64_t{1} << 40;  // per value

// The value of each size with its name, in the order of the graph's symbols.
struct NetworkSizes {
  NamedSize items[kMaxSizes];
  int32_t count;
  SizeNames names() const { return SizeNames{items, count}; }
};
// The example sizes of the file.
NetworkSizes example_sizes(const Graph& graph);

// Dims of one input, as given by the caller.
struct InputDims {
  int32_t rank;
  int64_t dims[kMaxRank];
};
// Finds the sizes for which the inputs have these dims.  If there are none, fails with the input and the dimension.
ps_status solve_sizes(const Graph& graph, const InputDims* inputs, NetworkSizes* out);

// Whether general networks may use the op: it has no state, exchanges nothing and trusts no index.
bool is_network_op(int32_t op);
// The operands of a node, from the types of earlier values.
Spec network_operand(const Graph& graph, const Vec<Spec>& specs, const Operand& operand);
// Binds the attributes of a node and infers its outputs into `specs`. `lists`: storage for kMaxAttrs * kMaxListLen
// numbers, to which attributes point.
ps_status infer_network_node(const Graph& graph, const Node& node, const NetworkSizes& sizes, Vec<Spec>* specs,
                             AttrValue* attrs, int64_t* lists);
// The types of all values; undefined values have the kind OPERAND_NONE.
ps_status infer_network(const Graph& graph, const NetworkSizes& sizes, Vec<Spec>* specs);
inline int64_t num_elements(const Spec& spec) {
  int64_t count = 1;
  for (int32_t d = 0; d < spec.rank; ++d) count *= spec.dims[d].offset;
  return count;
}

}  // namespace ps

#endif
