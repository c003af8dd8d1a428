"""Remove nodes whose results no other node reads."""

from __future__ import annotations

from penstock.graph.ir import Graph
from penstock.ops.table import find_op

__all__ = ["drop_dead_code"]


def drop_dead_code(graph: Graph) -> None:
    """Remove pure nodes (those that write no state) without readers, and unused weights and states."""
    live = {graph.output}
    kept = []
    for node in reversed(graph.nodes):
        names = set(node.outputs) | {v.name for v in graph.values.values() if v.base in node.outputs}
        if "(a!)" in find_op(node.op).schema or names & live:
            kept.append(node)
            live.update(operand.name for operand in node.inputs if operand.kind == "value")
    graph.nodes = kept[::-1]
    made = set(graph.inputs) | {output for node in graph.nodes for output in node.outputs}
    graph.values = {name: value for name, value in graph.values.items() if (value.base or name) in made}
    named = {(operand.kind, operand.name) for node in graph.nodes for operand in node.inputs}
    graph.weights = {name: weight for name, weight in graph.weights.items() if ("weight", name) in named}
    graph.states = {name: state for name, state in graph.states.items() if ("state", name) in named}
