"""The graph of a bundle with its weights, which can be changed and written again."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.metadata import read_metadata
from penstock.core.native import Context, Model
from penstock.errors import UnsupportedError
from penstock.graph.bundle import BundleWriter
from penstock.graph.ir import GENERAL_NETWORK, Graph, Weight
from penstock.graph.metadata import decode_metadata

__all__ = ["StoredNetwork"]

Bytes = NDArray[np.uint8]


@dataclass
class StoredNetwork:
    """A general network as it is stored: the graph, and the packed bytes of each weight."""

    graph: Graph
    weights: dict[str, Bytes]
    segments: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> StoredNetwork:
        """Read a bundle.  Raises InvalidFileError for a damaged one and UnsupportedError for a language model."""
        with Model.open(path, verify=True) as model:
            graph, segments = decode_metadata(read_metadata(path, model.stamp))
            if graph.kind != GENERAL_NETWORK:
                raise UnsupportedError(
                    f"{os.fspath(path)}: expected the bundle of a general network, got a language model", param="model"
                )
            data = np.frombuffer(bytes(model.segment("weights") or b""), np.uint8)
            others = {s.name: bytes(model.segment(s.name) or b"") for s in segments if s.name != "weights"}
        weights = {own.name: data[own.offset : own.offset + own.num_bytes] for own in graph.weights.values()}
        return cls(graph, weights, others)

    def rows(self, context: Context, weight: Weight) -> NDArray[np.float32]:
        """Return a weight as float32 [rows, cols]."""
        stored = np.ascontiguousarray(self.weights[weight.name])
        return context.unpack(weight.layout, weight.rows, weight.cols, 0, weight.rows, stored)

    def write(self, path: str | os.PathLike[str], *, durable: bool = False) -> None:
        """Write the bundle; weights that no node reads and no value is are left out."""
        graph = self.graph
        used = {o.name for node in graph.nodes for o in node.inputs if o.kind == "weight"}
        used |= {value.weight for value in graph.values.values() if value.weight is not None}
        kept = {name: weight for name, weight in graph.weights.items() if name in used}
        with BundleWriter(
            path, dataclasses.replace(graph, weights=kept), self.segments, durable=durable
        ) as writer:  # fmt: skip
            for name in kept:
                writer.add_weight(name, self.weights[name])
