"""Fuse a residual addition and the norm that reads its sum into one op, which reads the rows once."""

from __future__ import annotations

from penstock.graph.ir import Graph, Node

__all__ = ["fuse_add_norm"]


def fuse_add_norm(graph: Graph) -> None:
    """Replace add + rms_norm of whole rows by add_rms_norm.  The sum keeps its name for its other readers."""
    added = {node.outputs[0]: node for node in graph.nodes if node.op == "add"}
    for norm in [node for node in graph.nodes if node.op == "rms_norm"]:
        node = added.pop(norm.inputs[0].name, None)
        if node is None:
            continue
        residual, x = node.inputs  # networks write x = x + layer(x); the order does not change the sum
        weight = norm.inputs[1]
        fused = Node("add_rms_norm", norm.name, [x, residual, weight], [norm.outputs[0], node.outputs[0]], norm.attrs)
        graph.nodes[graph.nodes.index(node)] = fused
        graph.nodes.remove(norm)
