"""Remove all_reduce: with one rank the sum over the ranks is its only term."""

from __future__ import annotations

from penstock.graph.ir import Graph
from penstock.graph.passes.rewrite import replace_value

__all__ = ["drop_all_reduce"]


def drop_all_reduce(graph: Graph) -> None:
    """Remove every all_reduce node."""
    for node in [node for node in graph.nodes if node.op == "all_reduce"]:
        graph.nodes.remove(node)
        replace_value(graph, node.outputs[0], node.inputs[0].name)
