"""Scales of columns by search (AWQ, Lin et al., arXiv 2306.00978): columns that read large inputs get finer steps.

A column is multiplied by ``s = E|x|^a`` before it is rounded, and what produces it is divided by ``s``: the weight of a
norm, the rows of ``up``, or those of ``v``.  The exponent ``a`` of each group of weights that share an input is that of
a grid with the least error of the outputs over the calibration inputs.  As in ``smooth``, the scales are powers of two,
so that the folded checkpoint computes the same to the last bit; ``a`` = 0 rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.collect import CalibrationProgram, LinearNode, linear_groups
from penstock.calibration.smooth import Smoothing, centred_exponents, exact_exponents, find_folds
from penstock.checkpoint.float_types import to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.core.native import Context
from penstock.graph.ir import Graph, Node
from penstock.quant.matrix import concatenate_rows, quantize_rows, values_of
from penstock.quant.product_sums import ProductSums
from penstock.quant.scheme import Scheme

__all__ = ["ScaleFold", "find_scale_folds", "scaling_of"]

_MAX_ROWS: Final = 512
"""The rows of a weight whose error is computed; of more, evenly spaced ones."""


@dataclass(frozen=True)
class ScaleFold:
    """The weights that read the same columns, and the tensor whose elements or rows produce them.

    ``heads``: for values, the number of KV heads, of query heads that share one, and the length of a head.  Columns
    that read the same row of ``producer`` have the same scale.
    """

    readers: tuple[str, ...]
    producer: str
    heads: tuple[int, int, int] | None = None

    def of_rows(self, means: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean for each row of the producer, from those of the columns."""
        if self.heads is None:
            return means
        shared: NDArray[np.float32] = means.reshape(self.heads).mean(axis=1).reshape(-1)
        return shared

    def of_columns(self, exponents: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the exponent of each column, from those of the rows of the producer."""
        if self.heads is None:
            return exponents
        kv_heads, _, head_dim = self.heads
        rows = exponents.reshape(kv_heads, 1, head_dim)
        return np.ascontiguousarray(np.broadcast_to(rows, self.heads)).reshape(-1)


def find_scale_folds(graph: Graph) -> list[ScaleFold]:
    """Return where scales can be folded: where smoothing can, and from values to the output of attention."""
    folds = [ScaleFold(fold.readers, fold.producer) for fold in find_folds(graph)]
    makers = {name: node for node in graph.nodes for name in node.outputs}
    return folds + [fold for node in graph.nodes if (fold := _value_fold(graph, node, makers)) is not None]


def _value_fold(graph: Graph, reader: Node, makers: Mapping[str, Node]) -> ScaleFold | None:
    """Return the fold of a linear that only reads what attention makes of the values of one linear without bias."""
    if reader.op != "linear":
        return None
    attention = makers.get(_root(graph, reader.inputs[0].name))
    if attention is None or attention.op not in ("attention", "sink_attention"):
        return None
    state = attention.inputs[1].name
    users = [node for node in graph.nodes if any(x.kind == "state" and x.name == state for x in node.inputs)]
    appends = [node for node in users if node.op == "kv_append"]
    if len(users) != 2 or len(appends) != 1 or _num_readers(graph, attention.outputs[0]) != 1:
        return None
    value = appends[0].inputs[1].name
    linear = makers.get(_root(graph, value))
    heads, queries = _sizes(graph, value), _sizes(graph, attention.outputs[0])
    weight, own = graph.weights[reader.inputs[1].name], None if linear is None else linear.inputs
    if own is None or linear is None or linear.op != "linear" or own[2].kind != "none" or len(heads) != 2:
        return None
    start, num_rows = graph.values[value].offset, heads[0] * heads[1]
    source = graph.weights[own[1].name]
    is_read_once = not any(
        x.kind == "value" and x.name != value and _overlaps(graph, x.name, _root(graph, value), start, num_rows)
        for node in graph.nodes
        for x in node.inputs
    )
    uses = [x.name for node in graph.nodes for x in node.inputs if x.kind == "weight"]
    if not is_read_once or max(uses.count(weight.name), uses.count(source.name)) > 1 or len(queries) != 2:
        return None
    if heads[1] != queries[1] or queries[0] % heads[0] or weight.cols != queries[0] * queries[1]:
        return None
    part = next((part.name for part in source.parts if (part.row_start, part.num_rows) == (start, num_rows)), None)
    if part is None or len(weight.parts) != 1:
        return None
    return ScaleFold((weight.parts[0].name,), part, (heads[0], queries[0] // heads[0], heads[1]))


def _root(graph: Graph, name: str) -> str:
    base = graph.values[name].base
    return name if base is None else _root(graph, base)


def _sizes(graph: Graph, name: str) -> list[int]:
    """Return the sizes of a value after the first, [heads, length of a head] of queries and values."""
    return [dim.offset for dim in graph.values[name].shape[1:]]


def _num_readers(graph: Graph, name: str) -> int:
    """Return the number of operands that are a value or a view of it; the output of the graph counts, too."""
    operands = [x.name for node in graph.nodes for x in node.inputs if x.kind == "value"]
    return sum(_root(graph, own) == name for own in (*operands, graph.output))


def _overlaps(graph: Graph, name: str, root: str, start: int, num_rows: int) -> bool:
    """Return True if a value has some of the ``num_rows`` columns from ``start`` on of the value ``root``."""
    if _root(graph, name) != root:
        return False
    begin, length = graph.values[name].offset, int(np.prod(_sizes(graph, name)))
    return begin < start + num_rows and start < begin + length


def scaling_of(
    checkpoint: Checkpoint,
    program: CalibrationProgram,
    plan: Mapping[str, Scheme],
    grid: Sequence[float],
    begin: Callable[[str, str], Callable[[int], None]],
) -> Smoothing:
    """Return the scales of each fold with the least error over the calibration inputs.

    ``plan``: the schemes of the weights that are rounded.  ``grid``: the exponents to try.  ``begin(stage, note)`` is
    called for each pass over the inputs, and returns what counts its tokens.
    """
    folds = [
        fold
        for fold in find_scale_folds(program.graph)
        if all(name in checkpoint.tensors for name in (*fold.readers, fold.producer))
        and any(name in plan for name in fold.readers)
    ]
    nodes = {name: linear for linear in program.linears for name in linear.names}
    by_linear = {nodes[fold.readers[0]]: fold for fold in folds if fold.readers[0] in nodes}
    groups = linear_groups([linear for linear in program.linears if linear in by_linear], program.max_len)
    columns: dict[str, NDArray[np.int32]] = {}
    rows: dict[str, NDArray[np.int32]] = {}
    with Context(program.threads) as context:
        for number, group in enumerate(groups, 1):
            means, hessians = _moments(program, group, begin("scales", f"pass {number} of {len(groups)}"))
            program.rest()
            for linear in group:
                fold = by_linear[linear]
                hessian = hessians[linear].matrix() / np.float32(program.data.num_tokens)
                search = _Search(context, checkpoint, plan, fold, hessian)
                exponents = search.best(fold.of_rows(means[linear]), grid)
                if exponents.any():
                    columns |= dict.fromkeys(fold.readers, fold.of_columns(exponents))
                    rows[fold.producer] = exponents
    return Smoothing(columns, rows)


def _moments(
    program: CalibrationProgram, linears: list[LinearNode], on_step: Callable[[int], None]
) -> tuple[dict[LinearNode, NDArray[np.float32]], dict[LinearNode, ProductSums]]:
    """Return the mean magnitude of each column, and the sum of ``x^T x``, by linear."""
    sizes = {linear: np.zeros(linear.cols) for linear in linears}
    hessians = {linear: ProductSums(linear.cols) for linear in linears}
    for inputs in program.inputs(linears, on_step):
        for linear, x in inputs.items():
            sizes[linear] += np.abs(x).sum(axis=0, dtype=np.float64)
            hessians[linear].add(x)
    count = program.data.num_tokens
    means = {linear: (total / count).astype(np.float32) for linear, total in sizes.items()}
    return means, hessians


class _Search:
    """The error of the outputs of a fold's weights, by the exponents of their scales."""

    def __init__(
        self,
        context: Context,
        checkpoint: Checkpoint,
        plan: Mapping[str, Scheme],
        fold: ScaleFold,
        hessian: NDArray[np.float32],
    ) -> None:
        self._context, self._checkpoint, self._plan = context, checkpoint, plan
        self._fold, self._hessian = fold, hessian
        self._weights = [(plan[name], self._floats(name)) for name in fold.readers if name in plan]

    def _floats(self, name: str) -> NDArray[np.float32]:
        values = to_float32(self._checkpoint.read(name), self._checkpoint.tensors[name].dtype)
        taken = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_ROWS)).astype(int))
        values = np.array(values[taken], np.float32)
        self._checkpoint.release(name)
        return values

    def best(self, means: NDArray[np.float32], grid: Sequence[float]) -> NDArray[np.int32]:
        """Return the exponents of two with the least error, and zeros if none is better than these."""
        best = np.zeros(len(means), np.int32)
        is_used = (means > 0) & np.isfinite(means)
        if not is_used.any() or len(means) != self._checkpoint.tensors[self._fold.producer].shape[0]:
            return best
        logs, least = np.log2(np.where(is_used, means, 1)), self.error(best)
        tried = {best.tobytes()}
        for power in grid:
            exponents = exact_exponents(
                self._checkpoint,
                self._fold.readers if self._fold.heads is None else (),
                self._fold.producer,
                centred_exponents(power * logs, is_used),
                self._plan,
            )
            if exponents.tobytes() in tried:
                continue
            tried.add(exponents.tobytes())
            error = self.error(exponents)
            if error < least:
                best, least = exponents, error
        return best

    def error(self, exponents: NDArray[np.int32]) -> float:
        """Return the mean squared error of the outputs, added up over the rows."""
        columns, total = self._fold.of_columns(exponents), 0.0
        for scheme, weight in self._weights:
            scaled = np.ldexp(weight, columns)
            rounded = values_of(concatenate_rows(list(quantize_rows(self._context, scheme, scaled, "f32"))), scheme)
            change = np.ldexp(rounded, -columns) - weight
            total += float(np.einsum("ij,ij->", change @ self._hessian, change, dtype=np.float64))
        return total
