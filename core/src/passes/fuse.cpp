// Fusion into linears: silu_mul of gate and up, and the residual sum at the start of add_rms_norm.
#include "passes/fuse.h"

#include "base/tiles.h"

namespace ps {
namespace {

// The kernels for integers, GGUF's block types and bf16 dot products compute a tile of the gate together with the
// matching tile of `up`.  Other kernels would compute the two separately, and lose more than silu_mul costs.
bool is_gated_layout(int32_t layout, const Kernels& kernels) {
  return layout >= PS_T16_Q8_0 || layout == PS_T16_I8 || layout == PS_T16_I4G32 ||
         (layout == PS_T16_BF16 && kernels.bf16_bytes == 2);
}

class Fuser {
 public:
  Fuser(const Graph& graph, const Kernels& kernels, Vec<RunNode>* nodes)
      : graph_(graph), kernels_(kernels), nodes_(*nodes) {}

  ps_status run() {
    if (!readers_.resize(graph_.values.size())) return fail(PS_OUT_OF_MEMORY, "program: out of memory");
    for (const RunNode& n : nodes_) {
      for (int32_t i = 0; i < n.node.num_inputs; ++i) {
        if (n.node.inputs[i].kind == OPERAND_VALUE) ++readers_[value(n.node.inputs[i]).root];
      }
    }
    for (RunNode& n : nodes_) {
      if (n.node.op == OP_SILU_MUL) fuse_gate(&n);
      if (n.node.op == OP_ADD_RMS_NORM) fuse_residual(&n);
    }
    return PS_OK;
  }

 private:
  const Value& value(const Operand& operand) const { return graph_.values[operand.index]; }

  // The linear that produces the operand, if only `readers` operands read it, all of the calling node; else null.
  RunNode* linear_of(const Operand& operand, int32_t readers) {
    if (operand.kind != OPERAND_VALUE) return nullptr;
    const int32_t root = value(operand).root;
    const int32_t producer = graph_.values[root].producer;
    if (producer < 0 || root == graph_.output || readers_[root] != readers) return nullptr;
    RunNode* n = &nodes_[producer];
    return n->node.op == OP_LINEAR && n->node.outputs[0] == root ? n : nullptr;
  }

  // linear, silu_mul(left half, right half): the linear computes the product.
  void fuse_gate(RunNode* product) {
    const Operand &gate = product->node.inputs[0], &up = product->node.inputs[1];
    RunNode* linear = linear_of(gate, 2);
    if (!linear || value(up).root != value(gate).root) return;
    if (!is_gated_layout(graph_.weights[linear->node.inputs[1].index].layout, kernels_)) return;
    const int64_t half = value(gate).row_elements;
    const bool halves = value(gate).rank == 2 && value(gate).root_offset == 0 && value(up).root_offset == half &&
                        value(gate).row_stride == 2 * half && half % kTileRows == 0;
    if (!halves) return;
    linear->gated = true;
    linear->node.outputs[0] = product->node.outputs[0];
    product->skipped = true;
  }

  // linear, add_rms_norm(its result, residual): the linear computes the sum.
  void fuse_residual(RunNode* norm) {
    const Operand x = norm->node.inputs[0], residual = norm->node.inputs[1];
    RunNode* linear = linear_of(x, 1);
    if (!linear || linear->gated || value(x).root_offset || residual.kind != OPERAND_VALUE) return;
    const Value& sum = graph_.values[norm->node.outputs[1]];
    const bool is_dense = value(x).rank == 2 && value(x).row_stride == value(x).row_elements &&
                          norm->node.outputs[1] != graph_.output && sum.row_stride == sum.row_elements;
    const int32_t residual_producer = graph_.values[value(residual).root].producer;
    if (!is_dense || residual_producer >= linear - nodes_.data()) return;
    while (linear->node.num_inputs <= kResidual)
      linear->node.inputs[linear->node.num_inputs++] = Operand{OPERAND_NONE, 0};
    linear->node.inputs[kResidual] = residual;
    linear->node.outputs[0] = norm->node.outputs[1];
    norm->node.inputs[0] = Operand{OPERAND_VALUE, norm->node.outputs[1]};
    norm->node.inputs[1] = Operand{OPERAND_NONE, 0};
    norm->node.num_outputs = 1;
  }

  const Graph& graph_;
  const Kernels& kernels_;
  Vec<RunNode>& nodes_;
  Vec<int32_t> readers_;  // number of operands that read a root or a view of it
};

}  // namespace

ps_status fuse_nodes(const Graph& graph, const Kernels& kernels, Vec<RunNode>* out) {
  out->clear();
  for (const Node& node : graph.nodes) {
    if (!out->push(RunNode{node, false, false})) return fail(PS_OUT_OF_MEMORY, "program: out of memory");
  }
  return Fuser(graph, kernels, out).run();
}

}  // namespace ps
