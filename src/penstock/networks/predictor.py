"""Bundles of general networks, ready to run: arrays by name in, arrays by name out."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy.typing as npt

from penstock.config import check_integer
from penstock.core import native
from penstock.core.metadata import read_metadata, stored_properties
from penstock.core.predict import NetworkProgram, NetworkSize, NetworkValue, network_sizes
from penstock.core.spans import node_infos, set_profiling
from penstock.errors import InvalidArgumentError
from penstock.graph.general.sizes import evaluate
from penstock.networks.node_times import NodeTime, node_times, span_times

__all__ = ["Predictor", "open_predictor"]

Arrays = Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]


class Predictor:
    """A general network with its memory.  Calls from several threads run one at a time."""

    def __init__(self, model: native.Model, context: native.Context, properties: Mapping[str, str]) -> None:
        self._program = NetworkProgram(model, context)
        self._model = model
        self.sizes: list[NetworkSize] = network_sizes(model)
        self.properties: Mapping[str, str] = properties
        """The texts that the bundle carries, such as labels; those of an ONNX file are its metadata."""
        self._lock = threading.Lock()

    @property
    def inputs(self) -> list[NetworkValue]:
        """The inputs, in order."""
        return self._program.inputs

    @property
    def outputs(self) -> list[NetworkValue]:
        """The outputs, in order."""
        return self._program.outputs

    def shape_of(self, value: NetworkValue, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the shape of an input or output for ``sizes``; those that are left out are the example's."""
        names = {size.name: size.example or size.min for size in self.sizes}
        unknown = set(sizes or {}) - set(names)
        if unknown:
            raise InvalidArgumentError(
                f"sizes: expected {', '.join(names) or 'none'}, got {', '.join(sorted(unknown))}", param="size"
            )
        return tuple(evaluate(size, {**names, **(sizes or {})}) for size in value.sizes)

    def run(self, arrays: Arrays) -> list[npt.NDArray[Any]]:
        """Return the outputs in order, for inputs in order or by name.

        Raises InvalidArgumentError with the input's name for a wrong type or shape.
        """
        with self._lock:
            return self._program.predict(arrays)

    def predict(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs by name."""
        return {value.name: array for value, array in zip(self.outputs, self.run(arrays), strict=True)}

    def profile(self, arrays: Arrays, runs: int = 1) -> list[NodeTime]:
        """Run the network ``runs`` times, and return the median time of each node, the slowest first."""
        check_integer("runs", runs, 1, 1 << 31)
        with self._lock:
            nodes, times = node_infos(self._model), []
            set_profiling(self._program, True)
            try:
                for _ in range(runs):
                    self._program.predict(arrays, copy=False)
                    times.append(span_times(self._program, len(nodes)))
            finally:
                set_profiling(self._program, False)
        return node_times(times, nodes)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._program.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def open_predictor(path: str | os.PathLike[str], *, threads: int = 0) -> Predictor:
    """Open the bundle of a general network.  ``threads`` 0: as many as there are cores.

    Raises UnsupportedError for the bundle of a language model, and InvalidFileError for a damaged file.
    """
    model = native.Model.open(path)
    properties = stored_properties(read_metadata(path, model.stamp))
    return Predictor(model, native.Context(num_threads=threads), properties)
