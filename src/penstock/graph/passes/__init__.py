"""The passes, each of which rewrites a graph.  They do not import tensors.

``run_passes`` makes the graph of a bundle; ``assign_scheme`` then chooses the layouts of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.graph.ir import Graph
from penstock.graph.passes.assign_scheme import assign_scheme, set_schemes
from penstock.graph.passes.fuse_linear import fuse_add_norm, fuse_linear
from penstock.graph.passes.rewrite import drop_dead_code, order_values

__all__ = [
    "assign_scheme",
    "drop_dead_code",
    "fuse_add_norm",
    "fuse_linear",
    "order_values",
    "run_passes",
]


def run_passes(graph: Graph, schemes: Mapping[str, str] | None = None) -> Graph:
    """Return a rewritten copy of a captured graph, which computes the same numbers with fewer nodes.

    ``schemes``: those of ``assign_scheme``.  Equal graphs give equal results.
    """
    graph = graph.copy()
    if schemes is not None:
        set_schemes(graph, schemes)
    drop_dead_code(graph)  # first: dead nodes must not prevent or join a fusion
    fuse_linear(graph)
    fuse_add_norm(graph)
    order_values(graph)
    return graph
