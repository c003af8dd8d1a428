"""Einstein's sums as permutes, matmuls and reductions, for every reader."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.errors import InvalidArgumentError
from penstock.graph.general.draft import NUMPY_TYPES, Draft, Tensor
from penstock.graph.general.sizes import SizeLike, product

__all__ = ["EinsumWriter", "einsum"]


class EinsumWriter(Protocol):
    """The writer of a reader, which adds calls under the name of a node."""

    draft: Draft

    def add(self, op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Add a call."""

    def binary(self, kind: str, a: Tensor, b: Tensor) -> Tensor:
        """Add ``a <kind> b``."""

    def reshape(self, x: Tensor, sizes: Sequence[SizeLike]) -> Tensor:
        """Return x with another shape."""

    def permute(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Return x with its axes in another order."""


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"equation: expected {what}", param="equation")


def _zero(w: EinsumWriter, x: Tensor) -> Tensor:
    return w.draft.constant(np.zeros((), NUMPY_TYPES.get(x.dtype, np.dtype(np.float32))))


def einsum(w: EinsumWriter, equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Write the product of an equation such as "bij,bjk->bik", with ellipses and repeated letters, as matmuls.

    Raises InvalidArgumentError for an equation that does not fit the operands.
    """
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    _expect(len(terms) == len(operands) and bool(operands), "as many terms as inputs")
    labels = [_labels(w, term, tensor.rank) for term, tensor in zip(terms, operands, strict=True)]
    dots = max((tuple(label for label in item if label.isdigit()) for item in labels), key=len)
    if arrow:
        result = _with_dots(w, right, dots)
    else:
        flat = [label for item in labels for label in item if not label.isdigit()]
        result = [*dots, *sorted(label for label in set(flat) if flat.count(label) == 1)]
    _expect(len(set(result)) == len(result), "different letters in the result")
    pairs = [_without_diagonals(w, tensor, item) for tensor, item in zip(operands, labels, strict=True)]
    x, have = pairs[0]
    for at, (y, others) in enumerate(pairs[1:], 1):
        kept = {*result, *(label for _, item in pairs[at + 1 :] for label in item)}
        x, have = _contracted(w, (x, have), (y, others), kept)
    x, have = _summed(w, x, have, set(result))
    _expect(set(have) == set(result), "letters of the inputs in the result")
    return w.permute(x, [have.index(label) for label in result])


def _labels(w: EinsumWriter, term: str, rank: int) -> list[str]:
    """Return a letter for each axis; those of an ellipsis are numbers that count from its last axis."""
    count = rank - len(term.replace("...", ""))
    _expect(count == 0 or (count > 0 and "..." in term), f"{rank} letters in {term!r}")
    return _with_dots(w, term, tuple(str(count - 1 - i) for i in range(count)))


def _with_dots(w: EinsumWriter, term: str, dots: Sequence[str]) -> list[str]:
    before, mark, after = term.partition("...")
    letters = before + after
    _expect(all(letter in string.ascii_letters for letter in letters), "an equation of letters")
    return [*before, *(dots if mark else ()), *after]


def _without_diagonals(w: EinsumWriter, x: Tensor, labels: list[str]) -> tuple[Tensor, list[str]]:
    for label in list(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            size = x.shape[first]
            place = w.add("iota", range=(0, 1, size))
            rows = w.reshape(place, [size if at == first else 1 for at in range(x.rank)])
            columns = w.reshape(place, [size if at == second else 1 for at in range(x.rank)])
            x = w.add("where", w.binary("eq", rows, columns), x, _zero(w, x))
            x = w.add("reduce", x, kind="sum", axes=(second,), keep=False)
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _summed(w: EinsumWriter, x: Tensor, labels: list[str], kept: set[str]) -> tuple[Tensor, list[str]]:
    axes = tuple(at for at, label in enumerate(labels) if label not in kept)
    if axes:
        x = w.add("reduce", x, kind="sum", axes=axes, keep=False)
    return x, [label for label in labels if label in kept]


def _contracted(
    w: EinsumWriter, first: tuple[Tensor, list[str]], second: tuple[Tensor, list[str]], kept: set[str]
) -> tuple[Tensor, list[str]]:
    """Return the product of two terms, summed over the letters that nothing else has."""
    (x, a), (y, b) = first, second
    x, a = _summed(w, x, a, kept | set(b))
    y, b = _summed(w, y, b, kept | set(a))
    batch = [label for label in a if label in b and label in kept]
    inner = [label for label in a if label in b and label not in kept]
    rows = [label for label in a if label not in b]
    columns = [label for label in b if label not in a]
    sizes = dict(zip(a, x.shape, strict=True))
    for label, size in zip(b, y.shape, strict=True):
        sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    x, y = (
        w.add("expand", tensor, sizes=tuple(sizes[label] for label in labels))
        if tuple(sizes[label] for label in labels) != tensor.shape else tensor
        for tensor, labels in ((x, a), (y, b))
    )  # fmt: skip
    shape = [product(sizes[label] for label in group) for group in (batch, rows, inner, columns)]
    left = w.reshape(w.permute(x, [a.index(label) for label in (*batch, *rows, *inner)]), shape[:3])
    right = w.reshape(
        w.permute(y, [b.index(label) for label in (*batch, *columns, *inner)]), (shape[0], shape[3], shape[2])
    )
    made = w.add("matmul", left, right, transpose_b=True)
    labels = [*batch, *rows, *columns]
    return w.reshape(made, [sizes[label] for label in labels]), labels
