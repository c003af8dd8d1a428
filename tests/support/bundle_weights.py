"""The bytes of a bundle's weights."""

from __future__ import annotations

from pathlib import Path

from penstock.graph.bundle import read_graph


def weights_of(path: Path) -> bytes:
    segment = next(segment for segment in read_graph(path)[1] if segment.name == "weights")
    return path.read_bytes()[segment.offset : segment.offset + segment.num_bytes]
