"""Bundles without weights: the real steps of a network, and its exact plan, for a scheme that was never exported.

The file has a hole where the weights would be, which reads as zeros and takes no disk space.  Kernels take as long as
with real weights, because no kernel branches on a value.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.core.metadata import read_metadata
from penstock.core.native import Model
from penstock.errors import UnsupportedError
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import Graph, Layout, Operand
from penstock.graph.metadata import decode_metadata

__all__ = ["cut_layers", "num_layers", "read_source", "table_dtype", "write_without_weights"]

_WEIGHTS = "weights"
_TABLES = {Layout.ROWS_F32: "f32", Layout.ROWS_F16: "f16", Layout.ROWS_BF16: "bf16"}
_LAYER = re.compile(r"(?:.*?[.])?(\d+)(?=[.:])")


def read_source(path: Path | str) -> tuple[Graph, dict[str, bytes]]:
    """Return the graph of a bundle, and its segments except the weights."""
    with Model.open(path) as model:
        graph, segments = decode_metadata(read_metadata(path, model.stamp))
        files = {
            segment.name: bytes(data)
            for segment in segments
            if segment.name != _WEIGHTS and (data := model.segment(segment.name)) is not None
        }
    return graph, files


def write_without_weights(path: Path | str, graph: Graph, files: dict[str, bytes] | None = None) -> None:
    """Write a bundle with a hole instead of weights.  Its checksum of the weights is wrong: open it unverified.

    The file need not be on the disk yet.
    """
    with BundleWriter(Path(path), graph, files, durable=False) as writer:
        writer.leave_weights(0)


def table_dtype(graph: Graph) -> str:
    """Return the type of an embedding that is not tied to the output head ("f32", "f16", "bf16"); "f32" without one."""
    for node in graph.nodes:
        if node.op == "embedding":
            return _TABLES.get(graph.weights[node.inputs[1].name].layout, "f32")
    return "f32"


def num_layers(graph: Graph) -> int:
    """Return the number of repeated layers: those that have keys and values of their own."""
    return len(graph.states)


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def cut_layers(graph: Graph, count: int) -> Graph:
    """Return a copy with the first ``count`` layers, the embedding and the output head.

    Nodes after the last layer read the values of layer ``count - 1`` instead.  Raises UnsupportedError for a graph
    whose layers differ or are not numbered.
    """
    total = num_layers(graph)
    if count >= total:
        return graph
    layers = [_layer_of(name) for name in graph.states]
    if count < 2 or layers != list(range(total)):
        raise UnsupportedError(f"{graph.network}: expected numbered layers, of which at least two remain")
    graph = graph.copy()
    last, new_last = f".{total - 1}", f".{count - 1}"

    def renamed(name: str) -> str:
        return re.sub(rf"{re.escape(last)}(?=[.:])", new_last, name, count=1) if _layer_of(name) == total - 1 else name

    graph.nodes = [node for node in graph.nodes if (_layer_of(node.name) or 0) < count]
    for node in graph.nodes:
        if _layer_of(node.name) is None:
            node.inputs = [Operand(o.kind, renamed(o.name)) if o.kind == "value" else o for o in node.inputs]
    _keep_used(graph)
    return graph


def _keep_used(graph: Graph) -> None:
    """Drop the weights, states and values that no node uses; UnsupportedError if a node reads what none computes."""
    used = {operand.kind: set[str]() for node in graph.nodes for operand in node.inputs}
    for node in graph.nodes:
        for operand in node.inputs:
            used[operand.kind].add(operand.name)
    graph.weights = {name: weight for name, weight in graph.weights.items() if name in used.get("weight", ())}
    graph.states = {name: state for name, state in graph.states.items() if name in used.get("state", ())}
    available = set(graph.inputs) | {name for node in graph.nodes for name in node.outputs}
    while more := {v.name for v in graph.values.values() if v.base in available} - available:
        available |= more
    if missing := used.get("value", set()) - available:
        raise UnsupportedError(f"{graph.network}: layers differ: {sorted(missing)[0]} is not computed without them")
    if {state.group for state in graph.states.values()} != set(range(len(graph.page_groups))):
        raise UnsupportedError(f"{graph.network}: layers differ: some page groups belong to later layers only")
    graph.values = {name: value for name, value in graph.values.items() if name in available}
