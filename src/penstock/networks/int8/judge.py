"""The difference between the outputs of two networks on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OutputError", "output_errors"]

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class OutputError:
    """The error of one output in all samples.

    ``relative`` is the root of the mean squared error over that of the source's numbers, ``largest`` the largest
    difference over the largest number.  ``agreement`` is the part of rows, along the last axis, whose largest number
    has the same place; ``divergence`` the mean Kullback-Leibler divergence of their softmax, in nats.  These two are 1
    and 0 for rows of one number.
    """

    name: str
    relative: float
    largest: float
    agreement: float
    divergence: float


def output_errors(expected: Sequence[Arrays], found: Sequence[Arrays]) -> list[OutputError]:
    """Return the errors of the outputs that are floating-point, in order; arguments have an item for each sample."""
    errors = []
    for name, first in expected[0].items():
        if first.dtype.kind != "f":
            continue
        pairs = [(x[name].astype(np.float64), y[name].astype(np.float64)) for x, y in zip(expected, found, strict=True)]
        pairs = [(x, y) for x, y in pairs if x.size]
        if pairs:
            errors.append(_error(name, pairs))
    return errors


def _error(name: str, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> OutputError:
    gaps = [_difference(x, y) for x, y in pairs]
    finite = [x[np.isfinite(x)] for x, _ in pairs]
    gap = np.sqrt(sum(float(np.square(each).sum()) for each in gaps))
    norm = np.sqrt(sum(float(np.square(each).sum()) for each in finite))
    largest = max(float(each.max()) for each in gaps)
    most = max(float(np.abs(each).max(initial=0.0)) for each in finite)
    same, divergence, rows = 0.0, 0.0, 0
    for x, y in pairs:
        if x.ndim < 2 or x.shape[-1] < 2:
            continue
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])
        rows += len(x)
        same += float((x.argmax(-1) == y.argmax(-1)).sum())
        p, q = _log_softmax(x), _log_softmax(y)
        divergence += float(np.where((p == q) | np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum())
    agreement, mean = (same / rows, divergence / rows) if rows else (1.0, 0.0)
    tiny = np.finfo(np.float64).tiny
    return OutputError(name, float(gap / max(norm, tiny)), largest / max(most, tiny), agreement, max(mean, 0.0))


def _difference(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return the magnitudes of x - y; equal infinities, such as those of masks, and NaN in both differ by nothing."""
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        result: NDArray[Any] = np.where(is_same, 0.0, np.abs(x - y))
    return result


def _log_softmax(x: NDArray[Any]) -> NDArray[Any]:
    shifted = x - x.max(-1, keepdims=True)
    result: NDArray[Any] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
