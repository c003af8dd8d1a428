"""Run calibration sequences on the native core, and collect what the linears read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.texts import CalibrationData
from penstock.config import show
from penstock.core.layouts import KV_NUMBERS
from penstock.core.native import INPUT_SUMS, Context, CoreProgram, Model, ProgramOptions, StepBatch
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph
from penstock.quant.input_statistics import InputStatistics, WeightInputs
from penstock.runtime.program import kv_layout_of, pages_for

__all__ = ["CalibrationProgram", "LinearNode", "linear_groups"]

StepCallback = Callable[[int], None]
_HESSIAN_ITEM_BYTES: Final = 4
_HESSIAN_BYTES: Final = 1 << 30
"""Memory for the Hessians of one pass over the calibration data; a single larger one is computed by itself."""


@dataclass(frozen=True)
class LinearNode:
    """A linear of a graph: the index of its node, the tensors that its weight is made of, and its columns."""

    index: int
    names: tuple[str, ...]
    cols: int

    @property
    def hessian_bytes(self) -> int:
        """The size of the sum of ``x^T x``."""
        return self.cols * self.cols * _HESSIAN_ITEM_BYTES


def _linears(graph: Graph) -> list[LinearNode]:
    found = []
    for index, node in enumerate(graph.nodes):
        if node.op == "linear":
            weight = graph.weights[node.inputs[1].name]
            found.append(LinearNode(index, tuple(part.name for part in weight.parts), weight.cols))
    return found


def linear_groups(linears: list[LinearNode]) -> list[list[LinearNode]]:
    """Divide linears, in their order, into groups whose Hessians fit into memory together."""
    groups: list[list[LinearNode]] = []
    num_bytes = 0
    for linear in linears:
        if not groups or num_bytes + linear.hessian_bytes > _HESSIAN_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(linear)
        num_bytes += linear.hessian_bytes
    return groups


@dataclass
class CalibrationProgram:
    """A bundle that computes calibration sequences, one a step.  A context manager."""

    bundle: Path
    data: CalibrationData
    threads: int = 0
    graph: Graph = field(init=False)
    linears: list[LinearNode] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        """Open the bundle with memory for one sequence."""
        self.graph, _ = read_graph(self.bundle)
        self.linears = _linears(self.graph)
        self._len = max(map(len, self.data.sequences))
        self._model = Model.open(self.bundle)
        try:
            info = self._model.info
            if info.prefix_token >= 0:
                raise UnsupportedError(
                    f"calibration: expected a decoder or an encoder, got {info.network}, which has both; use --method "
                    "rtn",
                    param="method",
                )
            self._num_groups, self._keeps_hidden = info.num_page_groups, info.hidden_size > 0
            self._context = Context(self.threads)
            rows = 1 if self._keeps_hidden else self._len
            options = ProgramOptions(
                max_tokens=self._len,
                max_requests=1,
                max_rows=rows,
                num_pages=pages_for(self._len),
                kv_layout=KV_NUMBERS[kv_layout_of("auto", info.scheme)],
                flags=INPUT_SUMS,
            )
            self._program = CoreProgram(self._model, self._context, options)
        except BaseException:
            self._model.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()
        self._context.close()
        self._model.close()

    def _steps(self) -> Iterator[int]:
        """Compute each sequence; yields its number of tokens."""
        pages = np.arange(pages_for(self._len), dtype=np.int32)
        table = np.ascontiguousarray(np.broadcast_to(pages, (self._num_groups, 1, len(pages))))
        for ids in self.data.sequences:
            length = len(ids)
            rows = [] if self._keeps_hidden else range(length)
            self._program.run(
                StepBatch(
                    token_ids=np.array(ids, np.int32),
                    positions=np.arange(length, dtype=np.int32),
                    request_starts=np.array([0, length], np.int32),
                    page_tables=table,
                    output_rows=np.array(rows, np.int32),
                    hidden=self._keeps_hidden,
                )
            )
            yield length

    def statistics(self, on_step: StepCallback) -> InputStatistics:
        """Return the statistics of all inputs; ``on_step`` gets the number of tokens of each step.

        Raises InvalidArgumentError where an input is NaN or infinite.
        """
        squares = {linear.index: np.zeros(linear.cols) for linear in self.linears}
        maxima = {linear.index: np.zeros(linear.cols, np.float32) for linear in self.linears}
        for linear in self.linears:
            self._program.sum_inputs(linear.index, squares=squares[linear.index], maxima=maxima[linear.index])
        for length in self._steps():
            on_step(length)
        weights: dict[str, WeightInputs] = {}
        for linear in self.linears:
            self._program.sum_inputs(linear.index)
            _check_finite(squares[linear.index], linear)
            own = WeightInputs(squares[linear.index], self.data.num_tokens, maxima[linear.index])
            for name in linear.names:
                weights[name] = _merged(weights[name], own) if name in weights else own
        return InputStatistics(weights, self.data.num_tokens, self.data.digest, self.data.source)

    def hessians(self, linears: Sequence[LinearNode], on_step: StepCallback) -> Mapping[int, NDArray[np.float32]]:
        """Return the sum of ``x^T x`` over all tokens for each of these linears, by the index of its node."""
        sums = {linear.index: np.zeros((linear.cols, linear.cols), np.float32) for linear in linears}
        for inputs in self.inputs(linears, on_step):
            for index, x in inputs.items():
                sums[index] += x.T @ x
        for linear in linears:
            _check_finite(np.diagonal(sums[linear.index]), linear)
        return sums

    def inputs(
        self, linears: Sequence[LinearNode], on_step: StepCallback
    ) -> Iterator[Mapping[int, NDArray[np.float32]]]:
        """Yield the inputs [tokens, columns] of these linears in each step, by the index of their node: views."""
        rows = {linear.index: np.zeros((self._len, linear.cols), np.float32) for linear in linears}
        for linear in linears:
            self._program.sum_inputs(linear.index, rows=rows[linear.index])
        try:
            for length in self._steps():
                yield {index: array[:length] for index, array in rows.items()}
                on_step(length)
        finally:
            for linear in linears:
                self._program.sum_inputs(linear.index)


def _check_finite(sums: NDArray[Any], linear: LinearNode) -> None:
    if np.isfinite(sums).all():
        return
    column = int(np.flatnonzero(~np.isfinite(sums))[0])
    raise InvalidArgumentError(
        f"calibration: expected finite inputs of {show(linear.names[0])}, got NaN or infinity in column {column}; "
        "check the checkpoint",
        param="calibration",
        code="not_finite",
    )


def _merged(first: WeightInputs, second: WeightInputs) -> WeightInputs:
    """Return the statistics of a weight that several linears have."""
    maxima = None if first.maxima is None or second.maxima is None else np.maximum(first.maxima, second.maxima)
    return WeightInputs(first.squares + second.squares, first.count + second.count, maxima)
