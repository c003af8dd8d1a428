"""SmoothQuant (Xiao et al., arXiv 2211.10438): columns with large inputs become smaller, and their weights larger.

The factor of a column is divided out of what produces it: the weight of a norm, or the rows of ``up`` in a gated
feed-forward layer.  The graph shows where that is possible.  Factors are powers of two, so every product stays as it
was to the last bit, and the folded tensors keep their element type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_types import convert_floats, to_float32
from penstock.checkpoint.folder import Checkpoint
from penstock.graph.ir import Graph, Node, Weight
from penstock.quant.input_statistics import InputStatistics, WeightInputs

__all__ = [
    "NO_SMOOTHING", "STRENGTH", "Fold", "Smoothing", "centred_exponents", "exact_exponents", "find_folds",
    "smoothing_of",
]  # fmt: skip

STRENGTH: Final = 0.5
"""The share of the range of inputs that moves to the weights."""
_MAX_EXPONENT: Final = 8
_NORMS: Final = ("rms_norm", "add_rms_norm")
_GATES: Final = ("silu_mul", "sigmoid_mul")


@dataclass(frozen=True)
class Fold:
    """The weights that read the same columns, and the tensor whose elements or rows produce them."""

    readers: tuple[str, ...]
    producer: str


@dataclass(frozen=True)
class Smoothing:
    """Exponents of two by tensor: the columns of a matrix are multiplied by 2^e, its rows or a vector by 2^-e."""

    columns: Mapping[str, NDArray[np.int32]]
    rows: Mapping[str, NDArray[np.int32]]

    def apply(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Return a tensor of the checkpoint, folded; f16 and bf16 as their bits."""
        if name not in self.columns and name not in self.rows:
            return data
        return convert_floats(self.values(name, data, dtype), "f32", dtype)

    def values(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
        """Return a tensor of the checkpoint, folded, in float32: float16 would lose bits of small values."""
        values = to_float32(data, dtype)
        if name in self.columns:
            values = np.ldexp(values, self.columns[name])
        if name in self.rows:
            exponents = -self.rows[name]
            values = np.ldexp(values, exponents[:, None] if values.ndim == 2 else exponents)
        return values

    def inputs_of(self, name: str, inputs: WeightInputs) -> WeightInputs:
        """Return the statistics of the inputs after folding."""
        if name not in self.columns:
            return inputs
        exponents = self.columns[name]
        maxima = None if inputs.maxima is None else np.ldexp(inputs.maxima, -exponents)
        return WeightInputs(np.ldexp(inputs.squares, -2 * exponents), inputs.count, maxima)

    def hessian_of(self, name: str, hessian: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of products of the inputs after folding."""
        if name not in self.columns:
            return hessian
        factors = self.factors_of(name, len(hessian))
        return (hessian * factors) * factors[:, None]

    def factors_of(self, name: str, cols: int) -> NDArray[np.float32]:
        """Return what folding multiplies the columns of the inputs of a weight by."""
        exponents = self.columns.get(name)
        return np.ones(cols, np.float32) if exponents is None else np.ldexp(np.float32(1), -exponents)


def find_folds(graph: Graph) -> list[Fold]:
    """Return where smoothing can be folded: behind norms without bias, and behind gated products."""
    readers: dict[str, list[Node]] = defaultdict(list)
    makers: dict[str, Node] = {}
    uses: dict[str, int] = defaultdict(int)
    for node in graph.nodes:
        for operand in node.inputs:
            if operand.kind == "value":
                readers[_root(graph, operand.name)].append(node)
            elif operand.kind == "weight":
                uses[operand.name] += 1
        makers |= dict.fromkeys(node.outputs, node)
    folds = []
    for value, nodes in readers.items():
        weights = [graph.weights[node.inputs[1].name] for node in nodes if node.op == "linear"]
        maker = makers.get(value)
        if maker is None or len(weights) != len(nodes) or any(uses[weight.name] > 1 for weight in weights):
            continue
        if value in (graph.output, *maker.outputs[1:]) or len({weight.cols for weight in weights}) > 1:
            continue
        producer = _producer(graph, maker, makers, uses, weights[0].cols)
        if producer is not None:
            folds.append(Fold(tuple(part.name for weight in weights for part in weight.parts), producer))
    return folds


def _root(graph: Graph, name: str) -> str:
    base = graph.values[name].base
    return name if base is None else _root(graph, base)


def _producer(graph: Graph, maker: Node, makers: Mapping[str, Node], uses: Mapping[str, int], cols: int) -> str | None:
    """Return the tensor that the factors of a node's output are divided out of."""
    if maker.op in _NORMS:
        weights = [graph.weights[operand.name] for operand in maker.inputs if operand.kind == "weight"]
        return _only_part(weights[0]) if len(weights) == 1 and uses[weights[0].name] == 1 else None
    if maker.op not in _GATES:
        return None
    up = maker.inputs[1].name
    linear = makers.get(_root(graph, up))
    if linear is None or linear.op != "linear" or linear.inputs[2].kind != "none":
        return None
    weight = graph.weights[linear.inputs[1].name]
    if uses[weight.name] > 1:
        return None
    rows = graph.values[up].offset, cols
    return next((part.name for part in weight.parts if (part.row_start, part.num_rows) == rows), None)


def _only_part(weight: Weight) -> str | None:
    return weight.parts[0].name if len(weight.parts) == 1 else None


NO_SMOOTHING: Final = Smoothing({}, {})


def smoothing_of(
    checkpoint: Checkpoint,
    folds: list[Fold],
    statistics: InputStatistics,
    strength: float = STRENGTH,
    quantized: Collection[str] = (),
) -> Smoothing:
    """Return the factors ``max|x|^a / max|w|^(1-a)`` of each fold, rounded to powers of two.

    ``quantized``: the tensors that are rounded to integers after folding; others keep their element type.
    A fold is left out if a tensor of it is not in the checkpoint, or its inputs were not recorded.
    """
    columns: dict[str, NDArray[np.int32]] = {}
    rows: dict[str, NDArray[np.int32]] = {}
    for fold in folds:
        inputs = [statistics.weights.get(name) for name in fold.readers]
        names = (*fold.readers, fold.producer)
        if any(name not in checkpoint.tensors for name in names) or inputs[0] is None or inputs[0].maxima is None:
            continue
        largest = np.max([_column_maxima(checkpoint, name) for name in fold.readers], axis=0)
        exponents = _exponents(inputs[0].maxima, largest, strength)
        if len(exponents) != checkpoint.tensors[fold.producer].shape[0]:
            continue
        exponents = exact_exponents(checkpoint, fold.readers, fold.producer, exponents, quantized)
        columns |= dict.fromkeys(fold.readers, exponents)
        rows[fold.producer] = exponents
    return Smoothing(columns, rows)


def exact_exponents(
    checkpoint: Checkpoint,
    readers: Sequence[str],
    producer: str,
    exponents: NDArray[np.int32],
    quantized: Collection[str],
) -> NDArray[np.int32]:
    """Return the exponents, with 0 where a float16 tensor that stays one would lose bits or overflow."""
    exponents = exponents.copy()
    for name in (*readers, producer):
        dtype = checkpoint.tensors[name].dtype
        if dtype != "f16" or name in quantized:
            continue
        values = to_float32(checkpoint.read(name), dtype)
        values = values.T if name == producer and values.ndim == 2 else values
        folded = np.ldexp(values, -exponents if name == producer else exponents)
        with np.errstate(over="ignore"):
            is_exact = folded.astype(np.float16).astype(np.float32) == folded
        exponents[~(is_exact if is_exact.ndim == 1 else is_exact.all(axis=0))] = 0
        checkpoint.release(name)
    return exponents


def _column_maxima(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    values = np.abs(to_float32(checkpoint.read(name), checkpoint.tensors[name].dtype)).max(axis=0)
    checkpoint.release(name)
    return np.asarray(values, np.float32)


def _exponents(inputs: NDArray[np.float32], weights: NDArray[np.float32], strength: float) -> NDArray[np.int32]:
    """Return the exponents of the factors; 0 for columns without inputs or weights."""
    is_used = (inputs > 0) & (weights > 0) & np.isfinite(inputs) & np.isfinite(weights)
    if not is_used.any():
        return np.zeros(len(inputs), np.int32)
    logs = strength * np.log2(np.where(is_used, inputs, 1)) - (1 - strength) * np.log2(np.where(is_used, weights, 1))
    return centred_exponents(logs, is_used)


def centred_exponents(logs: NDArray[Any], is_used: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return logarithms as exponents of two whose median is 0; 0 for columns that are not used."""
    logs = np.where(is_used, logs - np.median(logs[is_used]), 0)
    exponents: NDArray[np.int32] = np.clip(np.rint(logs), -_MAX_EXPONENT, _MAX_EXPONENT).astype(np.int32)
    return exponents
