"""Find the uses of a value and turn values into views; and the passes that only remove nodes."""

from __future__ import annotations

from collections import Counter

from penstock.graph.ir import Graph, Node, Value
from penstock.ops.table import EXCHANGES, find_op

__all__ = [
    "count_weight_uses",
    "drop_dead_code",
    "is_router",
    "make_view",
    "order_values",
]


def count_weight_uses(graph: Graph) -> Counter[str]:
    """Return the number of operands that refer to each weight."""
    return Counter(operand.name for node in graph.nodes for operand in node.inputs if operand.kind == "weight")


def is_router(graph: Graph, node: Node) -> bool:
    """Return True for a linear whose results choose experts."""
    read = {user.inputs[0].name for user in graph.nodes if user.op == "route"}
    return node.op == "linear" and not read.isdisjoint(node.outputs)


def make_view(graph: Graph, name: str, base: str, offset: int) -> None:
    """Turn a node's output into a view that begins ``offset`` elements into each row of the root ``base``."""
    for value in graph.values.values():
        if value.base == name:
            value.base, value.offset = base, value.offset + offset
    value = graph.values[name]
    value.base, value.offset = base, offset


def order_values(graph: Graph) -> None:
    """Remove unused values, and order the others by their creation, each followed by its views."""
    used = {i.name for node in graph.nodes for i in node.inputs if i.kind == "value"} | {graph.output}
    views: dict[str, list[Value]] = {}
    for value in graph.values.values():
        if value.base is not None and value.name in used:
            views.setdefault(value.base, []).append(value)
    roots = graph.inputs + [output for node in graph.nodes for output in node.outputs]
    ordered: dict[str, Value] = {}
    for name in roots:
        ordered[name] = graph.values[name]
        ordered.update((value.name, value) for value in sorted(views.get(name, []), key=lambda v: (v.offset, v.name)))
    graph.values = ordered


def drop_dead_code(graph: Graph) -> None:
    """Remove pure nodes (those that write no state and exchange nothing) without readers, and unused weights and
    states."""
    live = {graph.output}
    live_nodes = []
    for node in reversed(graph.nodes):
        names = set(node.outputs) | {v.name for v in graph.values.values() if v.base in node.outputs}
        if "(a!)" in find_op(node.op).schema or node.op in EXCHANGES or names & live:
            live_nodes.append(node)
            live.update(operand.name for operand in node.inputs if operand.kind == "value")
    graph.nodes = live_nodes[::-1]
    produced = set(graph.inputs) | {output for node in graph.nodes for output in node.outputs}
    graph.values = {name: value for name, value in graph.values.items() if (value.base or name) in produced}
    used = {(operand.kind, operand.name) for node in graph.nodes for operand in node.inputs}
    graph.weights = {name: weight for name, weight in graph.weights.items() if ("weight", name) in used}
    graph.states = {name: state for name, state in graph.states.items() if ("state", name) in used}
