"""What a bundle holds, as plain data for people and tools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph

__all__ = ["describe"]


def describe(path: Path | str) -> dict[str, Any]:
    """Network, scheme, sizes and counts of a bundle.

    ``ops`` counts nodes by op, ``parameters`` counts the logical values of weights (padding left out), ``bytes`` and
    ``layouts`` sum weight bytes by the op that reads them and by layout, ``segments`` gives every segment's bytes.
    Raises InvalidFileError, UnsupportedError or FileAccessError, naming file and field.
    """
    graph, segments = read_graph(path)
    return {
        "network": graph.network,
        "scheme": graph.scheme,
        "vocab_size": graph.vocab_size,
        "context_len": graph.context_len,
        "page_windows": list(graph.page_groups),
        "parameters": sum(weight.rows * weight.cols for weight in graph.weights.values()),
        "ops": dict(sorted(Counter(node.op for node in graph.nodes).items())),
        "bytes": _bytes_by_reader(graph),
        "layouts": _bytes_by_layout(graph),
        "segments": {segment.name: segment.num_bytes for segment in segments},
        "properties": dict(sorted(graph.properties.items())),
    }


def _bytes_by_reader(graph: Graph) -> dict[str, int]:
    """A weight that several ops read (a tied embedding) counts once, under the names of all of them."""
    readers: dict[str, set[str]] = {name: set() for name in graph.weights}
    for node in graph.nodes:
        for item in node.inputs:
            if item.kind == "weight":
                readers[item.name].add(node.op)
    sums: Counter[str] = Counter()
    for name, weight in graph.weights.items():
        sums[" + ".join(sorted(readers[name])) or "unused"] += weight.num_bytes
    return dict(sums.most_common())


def _bytes_by_layout(graph: Graph) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for weight in graph.weights.values():
        sums[weight.layout.name.lower()] += weight.num_bytes
    return dict(sums.most_common())
