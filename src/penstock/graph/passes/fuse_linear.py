"""Fusions: linears of one module that read the same rows (q|k|v, gate|up), and a residual addition with its norm.

The fused weight stacks the rows of its parts, each under its checkpoint name, and the results are views.  Every output
is computed as before, so the numbers are equal bit for bit.
"""

from __future__ import annotations

from penstock.graph.ir import Dim, Graph, Node, Operand, Part, Value, Weight
from penstock.graph.passes.rewrite import count_weight_uses, is_router, make_view

__all__ = ["fuse_add_norm", "fuse_linear"]


def fuse_linear(graph: Graph) -> None:
    """Fuse each group of at least two linears that share input, scheme and parent module.

    All linears of a group have a bias, or none has.
    """
    uses = count_weight_uses(graph)
    groups: dict[tuple[str, str, str, bool], list[Node]] = {}
    for node in graph.nodes:
        if (
            node.op != "linear"
            or is_router(graph, node)
            or any(uses[i.name] > 1 for i in node.inputs if i.kind == "weight")
        ):
            continue
        parent, has_bias = node.name.rpartition(".")[0], node.inputs[2].kind == "weight"
        groups.setdefault((node.inputs[0].name, str(node.attrs["scheme"]), parent, has_bias), []).append(node)
    for (_, _, parent, _), nodes in groups.items():
        if len(nodes) > 1 and len({node.name for node in nodes}) == len(nodes):
            _fuse(graph, parent, nodes)


def _fuse(graph: Graph, parent: str, nodes: list[Node]) -> None:
    name = f"{parent}." if parent else ""
    name += "|".join(node.name.removeprefix(name) for node in nodes)
    weight = _stack(graph, f"{name}.weight", [node.inputs[1].name for node in nodes])
    bias = Operand("none")
    if nodes[0].inputs[2].kind == "weight":
        bias = Operand("weight", _join(graph, f"{name}.bias", [node.inputs[2].name for node in nodes]))
    inputs = [nodes[0].inputs[0], Operand("weight", weight), bias]
    total = graph.weights[weight].rows
    result = f"{name}:linear"
    first = graph.values[nodes[0].outputs[0]]
    graph.values[result] = Value(result, first.dtype, (first.shape[0], Dim(None, 0, total)))
    start = 0
    for node in nodes:
        make_view(graph, node.outputs[0], result, start)
        start += graph.values[node.outputs[0]].shape[1].offset
    attrs = {**nodes[0].attrs, "out_features": total}
    graph.nodes[graph.nodes.index(nodes[0])] = Node("linear", name, inputs, [result], attrs)
    for node in nodes[1:]:
        graph.nodes.remove(node)


def _stack(graph: Graph, name: str, names: list[str]) -> str:
    """Stack the rows of matrices with the same number of columns."""
    parts: list[Part] = []
    rows = 0
    for weight in map(graph.weights.__getitem__, names):
        parts += [Part(part.name, rows + part.row_start, part.num_rows) for part in weight.parts]
        rows += weight.rows
    _replace(
        graph, names, Weight(name, rows, graph.weights[names[0]].cols, graph.weights[names[0]].layout, tuple(parts))
    )
    return name


def _join(graph: Graph, name: str, names: list[str]) -> str:
    """Concatenate vectors: one row, whose parts count elements."""
    parts: list[Part] = []
    cols = 0
    for weight in map(graph.weights.__getitem__, names):
        inner = (
            [(part.row_start, part.num_rows) for part in weight.parts] if len(weight.parts) > 1 else [(0, weight.cols)]
        )
        parts += [Part(part.name, cols + at, length) for part, (at, length) in zip(weight.parts, inner, strict=True)]
        cols += weight.cols
    _replace(graph, names, Weight(name, 1, cols, graph.weights[names[0]].layout, tuple(parts)))
    return name


def _replace(graph: Graph, names: list[str], fused: Weight) -> None:
    """Replace the weights ``names`` by ``fused``, at the place of the first."""
    weights: dict[str, Weight] = {}
    for name, weight in graph.weights.items():
        if name == names[0]:
            weights[fused.name] = fused
        elif name not in names:
            weights[name] = weight
    graph.weights.clear()
    graph.weights.update(weights)


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
