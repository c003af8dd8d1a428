"""Let ranks send activations as the integers that linears round them to: fewer bytes and equal bits."""

from __future__ import annotations

from penstock.graph.ir import Graph, Node
from penstock.quant.scheme import find_scheme

__all__ = ["round_exchanges"]

_LINEARS = ("linear", "expert_linear")


def round_exchanges(graph: Graph) -> int:
    """Replace in the graph of a rank each ``all_gather`` whose rows only linears with integer activations read.

    Returns the number of exchanges that were replaced: the same on each rank.
    """
    count = 0
    for node in graph.nodes:
        bits = _common_bits(graph, node) if node.op == "all_gather" else 0
        if bits:
            node.op, node.attrs = "all_gather_rounded", {**node.attrs, "bits": bits}
            count += 1
    return count


def _common_bits(graph: Graph, gather: Node) -> int:
    """Return the bits of the integers to which all readers of a result round whole rows; 0 if one does not."""
    result = gather.outputs[0]
    views = {name for name, value in graph.values.items() if result in (name, value.base)}
    if graph.output in views:
        return 0
    bits = {
        _bits(graph, node, result) if index == 0 else 0
        for node in graph.nodes
        for index, operand in enumerate(node.inputs)
        if operand.kind == "value" and operand.name in views
    }
    return bits.pop() if len(bits) == 1 else 0


def _bits(graph: Graph, reader: Node, result: str) -> int:
    """Return the bits of the integers to which a linear rounds the rows of ``result``; 0 if it does not."""
    whole, x = graph.values[result], graph.values[reader.inputs[0].name]
    is_alone = [dim.offset for dim in x.shape[1:]] == [1, *(dim.offset for dim in whole.shape[1:])]  # in its only slot
    has_rows = x.offset == 0 and (x.shape == whole.shape or is_alone)
    if reader.op not in _LINEARS or not has_rows:
        return 0
    scheme = find_scheme(str(reader.attrs["scheme"]))
    return scheme.activation_bits if scheme.quantized and not scheme.hadamard else 0
