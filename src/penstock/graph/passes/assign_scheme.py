"""Choose the layouts of the weights."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config import check_choice
from penstock.graph.ir import Graph, Layout, Weight
from penstock.graph.passes.rewrite import is_router
from penstock.quant.scheme import find_scheme

__all__ = ["assign_scheme", "rotated_weights", "set_schemes"]

_LINEARS = ("linear", "expert_linear", "head_linear")
_ROWS = {"f32": Layout.ROWS_F32, "f16": Layout.ROWS_F16, "bf16": Layout.ROWS_BF16}


def scheme_of(weight: Weight, schemes: Mapping[str, str]) -> str:
    """Return the scheme of a linear with the weight, by those of its tensors: float32 where they differ."""
    own = {schemes.get(part.name, "f32") for part in weight.parts}
    return own.pop() if len(own) == 1 else "f32"


def set_schemes(graph: Graph, schemes: Mapping[str, str]) -> None:
    """Set the scheme of each linear by those of its tensors, so that no pass fuses linears of several schemes."""
    for node in graph.nodes:
        if node.op in _LINEARS:
            node.attrs["scheme"] = scheme_of(graph.weights[node.inputs[1].name], schemes)


def assign_scheme(
    graph: Graph, scheme: str, table_dtype: str = "f32", schemes: Mapping[str, str] | None = None
) -> Graph:
    """Return a copy of the graph whose linears have ``scheme`` and whose weights have their layouts.

    ``schemes``: by the names of the checkpoint's tensors, the schemes of the linears that use them, if they differ.

    The output head gets the scheme's ``head``, and a router float32.  A table that is shared with a linear has that
    linear's layout; any other table is row-major in ``table_dtype`` ("f32", "f16", "bf16": the checkpoint's type), or
    in the type of its tensor if ``schemes`` has it.  Vectors are float32.  Raises
    InvalidArgumentError for an unknown scheme or type.
    """
    check_choice("table_dtype", table_dtype, _ROWS)
    body = find_scheme(scheme)
    head = find_scheme(body.head)
    router = find_scheme("f32")
    graph = graph.copy()
    head_names = _head_weights(graph)
    layouts: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op not in _LINEARS:
            continue
        weight = node.inputs[1].name
        chosen = router if is_router(graph, node) else head if weight in head_names else body
        if schemes is not None and chosen is not router:
            chosen = find_scheme(scheme_of(graph.weights[weight], schemes))
        node.attrs["scheme"] = chosen.name
        layouts[weight] = Layout(chosen.layout)
    for node in graph.nodes:
        table = node.inputs[1].name if node.op == "embedding" else ""
        if table and table not in layouts:
            layouts[table] = _table_layout(graph.weights[table], table_dtype, schemes)
    for name, row in graph.weights.items():
        row.layout = layouts.get(name, Layout.ROWS_F32)
    graph.scheme = scheme
    return graph


def rotated_weights(graph: Graph) -> set[str]:
    """Return the names of the weights that linears with ``hadamard`` read: their columns are rotated."""
    linears = (node for node in graph.nodes if node.op in _LINEARS)
    return {node.inputs[1].name for node in linears if find_scheme(str(node.attrs["scheme"])).hadamard}


def _table_layout(weight: Weight, table_dtype: str, schemes: Mapping[str, str] | None) -> Layout:
    """Return the layout of a table that no linear shares: the type of its tensor, where tensors have several."""
    if schemes is None or not all(part.name in schemes for part in weight.parts):
        return _ROWS[table_dtype]
    own = find_scheme(scheme_of(weight, schemes))
    return _ROWS[own.name] if own.name in _ROWS else Layout(own.layout)


def _head_weights(graph: Graph) -> set[str]:
    """Return the weight of the output head: the module that capture recorded, or else the linear before the output."""
    recorded = graph.properties.get("output_head")
    root = graph.values[graph.output].base or graph.output
    return {
        node.inputs[1].name
        for node in graph.nodes
        if node.op == "linear" and (node.name == recorded if recorded else root in node.outputs)
    }
