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
from penstock.quant.product_sums import ProductSums
from penstock.runtime.program import kv_layout_of, pages_for

__all__ = ["CalibrationProgram", "LinearNode", "linear_groups", "product_sums"]

StepCallback = Callable[[int], None]
_ITEM_BYTES: Final = 4
_HESSIAN_BYTES: Final = 736 << 20
"""Memory for the Hessians of one pass over the calibration data, and for the inputs of its linears in a step.

A single larger one is computed by itself.  With the 8-bit weights of a network of 1.1B it stays below 2 GiB.
"""
_EXPERT_IDS: Final = 2
"""The operand of ``expert_linear`` that has the experts of each token."""


@dataclass(frozen=True)
class LinearNode:
    """A weight of linears: the indices of its nodes, the values that they read, its tensors and its columns.

    Layers that share their weights have several nodes with one weight, and their inputs count together.
    ``expert``: the number of the expert whose rows of an ``expert_linear`` this is; -1 of others.
    """

    indices: tuple[int, ...]
    reads: tuple[str, ...]
    names: tuple[str, ...]
    cols: int
    expert: int = -1

    @property
    def hessian_bytes(self) -> int:
        """The size of the sum of ``x^T x``."""
        return ProductSums.num_bytes(self.cols)

    @property
    def source(self) -> tuple[tuple[str, ...], int]:
        """Key of the inputs, which weights such as gate and up of an expert have in common."""
        return self.reads, self.expert


@dataclass(frozen=True)
class _Routing:
    """An ``expert_linear``: its experts, how many a token has, and whether each of these has an input of its own."""

    num_experts: int
    num_slots: int
    has_own_rows: bool

    def rows_of(self, expert: int, rows: NDArray[np.float32], experts: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the inputs [n, columns] of an expert, from those of a step."""
        chosen = experts == expert
        own: NDArray[np.float32] = rows[chosen if self.has_own_rows else chosen.any(axis=1)]
        return own


def _linears(graph: Graph) -> tuple[list[LinearNode], dict[int, _Routing]]:
    """Return the linears, those of experts one by one, and the routing of the nodes that have experts."""
    found: dict[tuple[str, int], LinearNode] = {}
    routed: dict[int, _Routing] = {}

    def add(index: int, names: tuple[str, ...], expert: int = -1) -> None:
        x, weight, *ids = (operand.name for operand in graph.nodes[index].inputs[: _EXPERT_IDS + 1])
        known = found.get((weight, expert))
        before: tuple[tuple[int, ...], tuple[str, ...]] = ((), ()) if known is None else (known.indices, known.reads)
        reads = (*before[1], x) if expert < 0 else (*before[1], x, *ids)
        found[weight, expert] = LinearNode((*before[0], index), reads, names, graph.weights[weight].cols, expert)

    for index, node in enumerate(graph.nodes):
        if node.op not in ("linear", "expert_linear"):
            continue
        weight = graph.weights[node.inputs[1].name]
        if node.op == "linear":
            add(index, tuple(part.name for part in weight.parts))
            continue
        num_experts, num_rows = int(node.attrs["num_experts"]), int(node.attrs["out_features"])
        x, ids = (graph.values[node.inputs[at].name].shape for at in (0, _EXPERT_IDS))
        routed[index] = _Routing(num_experts, ids[1].offset, len(x) == 3)
        for expert in range(num_experts):
            own = range(expert * num_rows, (expert + 1) * num_rows)
            names = tuple(
                part.name
                for part in weight.parts
                if part.row_start in own and part.row_start + part.num_rows - 1 in own
            )
            if names:  # else one tensor has the rows of several experts
                add(index, names, expert)
    return list(found.values()), routed


def linear_groups(linears: Sequence[LinearNode], max_len: int) -> list[list[LinearNode]]:
    """Divide linears into groups whose Hessians fit into memory together; those with the same inputs have one.

    ``max_len``: the tokens of the longest sequence, whose inputs are in memory, too.
    """
    by_source: dict[Any, list[LinearNode]] = {}
    for linear in linears:
        by_source.setdefault(linear.source, []).append(linear)
    groups: list[list[LinearNode]] = []
    num_bytes = 0
    for same in by_source.values():
        own_bytes = same[0].hessian_bytes + max_len * same[0].cols * _ITEM_BYTES
        if not groups or num_bytes + own_bytes > _HESSIAN_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1] += same
        num_bytes += own_bytes
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
        self.linears, self._routed = _linears(self.graph)
        self.max_len = max(map(len, self.data.sequences))
        self._open()
        return self

    def _open(self) -> None:
        self._model = Model.open(self.bundle)
        try:
            info = self._model.info
            if info.prefix_token >= 0:
                raise UnsupportedError(
                    f"calibration: expected a decoder or an encoder, got {info.network}, which has both; use --method "
                    "rtn",
                    param="method",
                )
            self._num_groups, self._hidden_size = info.num_page_groups, info.hidden_size
            self._keeps_hidden = info.hidden_size > 0
            self._context = Context(self.threads)
            options = ProgramOptions(
                max_tokens=self.max_len,
                max_requests=1,
                max_rows=1 if self._keeps_hidden else self.max_len,
                num_pages=pages_for(self.max_len),
                kv_layout=KV_NUMBERS[kv_layout_of("auto", info.scheme)],
                flags=INPUT_SUMS,
            )
            self._program = CoreProgram(self._model, self._context, options)
        except BaseException:
            self._model.close()
            raise
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Free the memory of the network, its pages of the bundle included, until the next pass."""
        if self._is_open:
            self._is_open = False
            self._program.close()
            self._context.close()
            self._model.close()

    def _wake(self) -> None:
        if not self._is_open:
            self._open()

    def _steps(self) -> Iterator[int]:
        """Compute each sequence; yields its number of tokens."""
        pages = np.arange(pages_for(self.max_len), dtype=np.int32)
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

    def statistics(
        self, on_step: StepCallback, products: Mapping[LinearNode, ProductSums] | None = None
    ) -> InputStatistics:
        """Return the statistics of all inputs; ``on_step`` gets the number of tokens of each step.

        ``products``: linears whose ``x^T x`` is added up in the same pass, into what they are mapped to.  A step
        computes no logits where the program has its hidden rows, which are the inputs of the head.

        Raises InvalidArgumentError where an input is NaN or infinite.
        """
        self._wake()
        products = products or {}
        own_products = _of_sources(list(products))
        rows = self._row_buffers(own_products)
        squares: dict[int, NDArray[np.float64]] = {}
        maxima: dict[int, NDArray[np.float32]] = {}
        counts = {index: np.zeros(own.num_experts, np.int64) for index, own in self._routed.items()}
        experts = {index: self._expert_buffer(index) for index in self._routed}
        for index, cols in _columns(self.linears).items():
            num = self._routed[index].num_experts if index in self._routed else 1
            squares[index], maxima[index] = np.zeros((num, cols)), np.zeros((num, cols), np.float32)
            own_rows, chosen = rows.get(index), experts.get(index)
            self._program.sum_inputs(index, squares=squares[index], maxima=maxima[index], rows=own_rows, experts=chosen)
        head = _head_tensor(self.graph) if self._keeps_hidden else None
        head_squares = np.zeros(self._hidden_size)
        for length in self._steps():
            for linear in own_products:
                products[linear].add(self._inputs_of(linear, rows, experts, length))
            if head is not None:
                head_squares += np.square(self._program.hidden()).sum(axis=0, dtype=np.float64)
            for index, own in experts.items():
                counts[index] += np.bincount(own[:length].reshape(-1), minlength=len(counts[index]))
            on_step(length)
        weights: dict[str, WeightInputs] = {}
        expert_tokens: dict[str, int] = {}
        for linear in self.linears:
            for index in linear.indices:
                self._program.sum_inputs(index)
                row, count = max(linear.expert, 0), self.data.num_tokens
                if linear.expert >= 0:
                    count = int(counts[index][linear.expert])
                    expert_tokens |= {name: expert_tokens.get(name, 0) + count for name in linear.names}
                _check_finite(squares[index][row], linear.names[0])
                inputs = WeightInputs(squares[index][row], count, maxima[index][row])
                for name in linear.names:
                    weights[name] = _merged(weights[name], inputs) if name in weights else inputs
        heads = {}
        if head is not None:
            _check_finite(head_squares, head)
            heads[head] = WeightInputs(head_squares, self.data.num_tokens)
        return InputStatistics(weights, self.data.num_tokens, self.data.digest, self.data.source, expert_tokens, heads)

    def hessians(self, linears: Sequence[LinearNode], on_step: StepCallback) -> Mapping[LinearNode, ProductSums]:
        """Return the sum of ``x^T x`` over all tokens for each of these linears, of an expert over its own tokens.

        Linears with the same inputs share one.
        """
        sums = product_sums(linears)
        own = {linear: sums[linear] for linear in _of_sources(linears)}
        for inputs in self.inputs(list(own), on_step):
            for linear, x in inputs.items():
                own[linear].add(x)  # x has no rows where the step has no token of the expert
        for linear, total in own.items():
            _check_finite(total.diagonal(), linear.names[0])
        return sums

    def inputs(
        self, linears: Sequence[LinearNode], on_step: StepCallback
    ) -> Iterator[Mapping[LinearNode, NDArray[np.float32]]]:
        """Yield the inputs [tokens, columns] of these linears in each step.

        They are views; of an expert, and of layers that share their weights, copies.
        """
        self._wake()
        rows = self._row_buffers(linears)
        experts = {index: self._expert_buffer(index) for index in rows if index in self._routed}
        for index, buffer in rows.items():
            self._program.sum_inputs(index, rows=buffer, experts=experts.get(index))
        try:
            for length in self._steps():
                yield {own: self._inputs_of(own, rows, experts, length) for own in linears}
                on_step(length)
        finally:
            for index in rows:
                self._program.sum_inputs(index)

    def _row_buffers(self, linears: Sequence[LinearNode]) -> dict[int, NDArray[np.float32]]:
        """Return memory for the inputs of a step, by the nodes of these linears."""
        rows = {}
        for index, cols in _columns(linears).items():
            routing = self._routed.get(index)
            slots = (routing.num_slots,) if routing is not None and routing.has_own_rows else ()
            rows[index] = np.zeros((self.max_len, *slots, cols), np.float32)
        return rows

    def _inputs_of(
        self,
        linear: LinearNode,
        rows: Mapping[int, NDArray[np.float32]],
        experts: Mapping[int, NDArray[np.int32]],
        length: int,
    ) -> NDArray[np.float32]:
        """Return the inputs of a linear in a step of ``length`` tokens, those of its nodes one after another."""
        parts = [rows[index][:length] for index in linear.indices]
        if linear.expert >= 0:
            parts = [
                self._routed[index].rows_of(linear.expert, part, experts[index][:length])
                for index, part in zip(linear.indices, parts, strict=True)
            ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _expert_buffer(self, index: int) -> NDArray[np.int32]:
        return np.zeros((self.max_len, self._routed[index].num_slots), np.int32)


def _of_sources(linears: Sequence[LinearNode]) -> list[LinearNode]:
    """Return the first linear of each input."""
    return list({linear.source: linear for linear in reversed(linears)}.values())


def product_sums(linears: Sequence[LinearNode]) -> dict[LinearNode, ProductSums]:
    """Return an empty sum of products for each linear; those with the same inputs share one."""
    sums = {linear.source: ProductSums(linear.cols) for linear in linears}
    return {linear: sums[linear.source] for linear in linears}


def _head_tensor(graph: Graph) -> str | None:
    """Return the tensor of the output head, whose linear reads rows that are picked from the hidden ones, or None."""
    gathers = [node for node in graph.nodes if node.op == "gather_rows" and node.inputs[1].name == "output_rows"]
    picked = {node.outputs[0] for node in gathers}
    for node in graph.nodes:
        if node.op == "linear" and node.inputs[0].name in picked:
            parts = graph.weights[node.inputs[1].name].parts
            return parts[0].name if len(parts) == 1 else None
    return None


def _columns(linears: Sequence[LinearNode]) -> dict[int, int]:
    """Return the columns of the weight of each node."""
    return {index: linear.cols for linear in linears for index in linear.indices}


def _check_finite(sums: NDArray[Any], name: str) -> None:
    if np.isfinite(sums).all():
        return
    column = int(np.flatnonzero(~np.isfinite(sums))[0])
    raise InvalidArgumentError(
        f"calibration: expected finite inputs of {show(name)}, got NaN or infinity in column {column}; "
        "check the checkpoint",
        param="calibration",
        code="not_finite",
    )


def _merged(first: WeightInputs, second: WeightInputs) -> WeightInputs:
    """Return the statistics of a weight that several linears have."""
    maxima = None if first.maxima is None or second.maxima is None else np.maximum(first.maxima, second.maxima)
    return WeightInputs(first.squares + second.squares, first.count + second.count, maxima)
