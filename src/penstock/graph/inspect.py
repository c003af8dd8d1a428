"""Describe the contents of a bundle, for ``penstock inspect``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from penstock.core.native import Model
from penstock.graph.bundle import read_graph
from penstock.graph.ir import GENERAL_NETWORK, Graph, Weight

__all__ = ["describe"]

_PARTS = (("embed", "embedding"), ("lm_head", "output head"), ("attn", "attention"), ("mlp", "feed forward"))


def describe(path: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Return the contents of a bundle as plain data; ``verify`` also checks the checksum of every segment.

    Keys: file_bytes, network, scheme, vocab_size, context_len, parameters, weight_bytes, weight_bytes_per_token,
    bits_per_weight (of linear layers and the output head, with scales and padding; 0 without any), bytes_by_part,
    bytes_by_layout, ops (name to count), states, page_groups, weights, segments, properties; of a general network also
    inputs, outputs, sizes and int8.
    """
    with Model.open(path, verify=verify) as model:
        info = model.info
    graph, segments = read_graph(path)
    return {
        "file_bytes": info.file_bytes,
        "network": graph.network,
        "scheme": graph.scheme,
        "vocab_size": graph.vocab_size,
        "context_len": graph.context_len,
        "parameters": _count_parameters(graph),
        "weight_bytes": info.weight_bytes,
        "weight_bytes_per_token": info.weight_bytes_per_token,
        "bits_per_weight": _bits_per_weight(graph),
        "bytes_by_part": _bytes_by(graph, _part_of),
        "bytes_by_layout": _bytes_by(graph, lambda weight: weight.layout.name.lower()),
        "ops": dict(Counter(node.op for node in graph.nodes)),
        "states": [
            {"name": s.name, "num_kv_heads": s.num_kv_heads, "head_dim": s.head_dim, "group": s.group}
            | ({"recurrent": True} if s.recurrent else {})
            | ({"latent_dim": s.latent_dim} if s.latent_dim else {})
            for s in graph.states.values()
        ],
        "page_groups": [{"window": window} for window in graph.page_groups],
        "weights": [_describe_weight(weight) for weight in graph.weights.values()],
        "segments": [{"name": s.name, "bytes": s.num_bytes, "crc32": f"{s.crc32:08x}"} for s in segments],
        "properties": dict(graph.properties),
        **(_describe_network(graph) if graph.kind == GENERAL_NETWORK else {}),
    }


def _describe_network(graph: Graph) -> dict[str, Any]:
    def values(names: list[str]) -> list[dict[str, str]]:
        ports = [graph.values[name] for name in names]
        return [{"name": value.name, "dtype": value.dtype.name.lower(), "sizes": value.sizes} for value in ports]

    sizes = [asdict(symbol) for symbol in graph.symbols]
    return {
        "inputs": values(graph.inputs), "outputs": values(graph.outputs), "sizes": sizes, "int8": _describe_int8(graph)
    }  # fmt: skip


def _describe_int8(graph: Graph) -> dict[str, int]:
    """Return how many nodes compute in int8, how many could but do not, and how many convert between types."""
    ops = Counter(node.op for node in graph.nodes)
    linears = sum(node.op == "linear" and node.attrs.get("scheme") == "w8a8" for node in graph.nodes)
    return {
        "convolutions": ops["conv_int8"], "linears": linears, "conversions": ops["requantize"],
        "float_nodes": ops["conv"] + ops["conv_winograd"] + ops["linear"] - linears,
    }  # fmt: skip


def _count_parameters(graph: Graph) -> int:
    """Return the numbers of all weights; a kernel of ``conv_winograd`` counts as the 3x3 numbers that it is made of."""
    numbers = {name: weight.rows * weight.cols for name, weight in graph.weights.items()}
    kernels = {node.inputs[1].name for node in graph.nodes if node.op == "conv_winograd"}
    return sum(number // 16 * 9 if name in kernels else number for name, number in numbers.items())


def _bits_per_weight(graph: Graph) -> float:
    names = {operand.name for node in graph.nodes if node.op == "linear" for operand in node.inputs}
    matrices = [weight for name, weight in graph.weights.items() if name in names and weight.rows > 1]
    values = sum(weight.rows * weight.cols for weight in matrices)
    return 8 * sum(weight.num_bytes for weight in matrices) / values if values else 0.0


def _part_of(weight: Weight) -> str:
    names = " ".join([weight.name, *(part.name for part in weight.parts)])
    return next((part for text, part in _PARTS if text in names), "norms and others")


def _bytes_by(graph: Graph, key: Callable[[Weight], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for weight in graph.weights.values():
        sums[key(weight)] += weight.num_bytes
    return dict(sums.most_common())


def _describe_weight(weight: Weight) -> dict[str, Any]:
    return {
        "name": weight.name,
        "rows": weight.rows,
        "cols": weight.cols,
        "layout": weight.layout.name.lower(),
        "bytes": weight.num_bytes,
        "parts": [part.name for part in weight.parts],
    }
