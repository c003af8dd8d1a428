"""The ranges of activations: what a network computes on samples, and the scale that int8 gets from it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgumentError
from penstock.networks.int8.stored import StoredNetwork
from penstock.networks.predictor import open_predictor

__all__ = ["METHODS", "Range", "collect_ranges"]

METHODS: Final = ("mse", "minmax", "percentile", "kl")
_BINS: Final = 2048
_LEVELS: Final = 128
_FEW_NUMBERS: Final = 10_000
_PERCENTILE: Final = 0.9999
_AT_ONCE: Final = 60
"""Values that are observed in one run: a program has at most 64 outputs."""
_MOST: Final = 127.0
_LEAST_SCALE: Final = 1e-30
Sample = Mapping[str, NDArray[Any]]


@dataclass
class Range:
    """The numbers of a tensor in all samples: the least, the most, and the counts of magnitudes in 2,048 bins."""

    least: float = np.inf
    most: float = -np.inf
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    @property
    def magnitude(self) -> float:
        """The largest magnitude; 0 without numbers."""
        return max(-self.least, self.most, 0.0)

    @property
    def is_signed(self) -> bool:
        """True if a number was below 0."""
        return self.least < 0

    def see(self, array: NDArray[Any]) -> None:
        """Widen the range; raises InvalidArgumentError for a NaN or an infinity."""
        if not array.size:
            return
        least, most = float(array.min()), float(array.max())
        if not np.isfinite(least) or not np.isfinite(most):
            raise InvalidArgumentError(
                "calibration: expected samples whose activations are finite, got NaN or infinity", param="calibration"
            )
        self.least, self.most = min(self.least, least), max(self.most, most)

    def count(self, array: NDArray[Any]) -> None:
        """Count magnitudes, after ``see`` saw all samples."""
        if self.magnitude:
            self.counts += np.histogram(np.abs(array), _BINS, (0, self.magnitude))[0]

    def merge(self, other: Range) -> None:
        """Make this the range of both tensors, which share one scale."""
        most = max(self.magnitude, other.magnitude)
        counts = np.zeros(_BINS, np.int64)
        for part in (self, other):
            places = (np.arange(_BINS) + 0.5) * part.magnitude / max(most, _LEAST_SCALE)
            np.add.at(counts, np.minimum(places.astype(np.int64), _BINS - 1), part.counts)
        self.least, self.most, self.counts = min(self.least, other.least), max(self.most, other.most), counts

    def scale(self, method: str) -> float:
        """Return the scale of int8: a magnitude of 127 times it is the largest one that is not clipped."""
        part = 1.0
        if method == "percentile":
            part = _percentile_bins(self.counts) / _BINS
        elif method == "kl":
            part = _divergence_bins(self.counts) / _BINS
        elif method == "mse":
            part = _least_error_bins(self.counts) / _BINS
        return max(self.magnitude * part / _MOST, _LEAST_SCALE)


def _percentile_bins(counts: NDArray[np.int64]) -> int:
    """Return the bins that hold 99.99 % of the numbers."""
    sums = np.cumsum(counts)
    return int(np.searchsorted(sums, _PERCENTILE * sums[-1])) + 1 if sums[-1] else _BINS


def _least_error_bins(counts: NDArray[np.int64]) -> int:
    """Return the bins with the least sum of squared errors: those of rounding within them, and of clipping beyond.

    Rounding to a step s costs s^2 / 12 for each number if numbers are spread evenly within a step, so few numbers keep
    their whole range.  Those of the first bin cost next to nothing: they are zeros, as ReLU gives, or round to 0.
    """
    if counts.sum() < _FEW_NUMBERS:
        return _BINS
    inside = np.cumsum(counts)
    centers = np.arange(_BINS) + 0.5
    sums, squares = (np.cumsum(counts * centers**power) for power in (1, 2))
    bins = np.arange(_LEVELS, _BINS + 1, 4)
    last = bins - 1
    beyond, linear = inside[-1] - inside[last], sums[-1] - sums[last]
    clipping = squares[-1] - squares[last] - 2 * bins * linear + bins.astype(np.float64) ** 2 * beyond
    rounding = (inside[last] - counts[0]) * (bins / _MOST) ** 2 / 12
    return int(bins[len(bins) - 1 - np.argmin((clipping + rounding)[::-1])])


def _divergence_bins(counts: NDArray[np.int64]) -> int:
    """Return the bins whose clipped distribution is nearest to its own in 128 levels.

    The distance is the Kullback-Leibler divergence.  Source: S. Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    if not counts.sum():
        return _BINS
    counts = counts.copy()
    counts[0] = counts[1]  # zeros, which any scale represents exactly, would outweigh all others
    best, fewest = np.inf, _BINS
    for bins in range(_LEVELS, _BINS + 1, 16):
        kept = counts[:bins].astype(np.float64)
        clipped = kept.copy()
        clipped[-1] += counts[bins:].sum()
        levels = np.arange(bins) * _LEVELS // bins
        sums, filled = np.zeros(_LEVELS), np.zeros(_LEVELS)
        np.add.at(sums, levels, kept)
        np.add.at(filled, levels, kept > 0)
        spread = np.where(kept > 0, (sums / np.maximum(filled, 1))[levels], 0)
        known = (clipped > 0) & (spread > 0)
        lost = clipped[(clipped > 0) & ~known].sum() / max(clipped.sum(), 1)
        p, q = clipped[known] / clipped[known].sum(), spread[known] / spread[known].sum()
        distance = float((p * np.log(p / q)).sum()) + lost
        if distance < best:
            best, fewest = distance, bins
    return fewest


def collect_ranges(
    network: StoredNetwork, values: Sequence[str], samples: Iterable[Sample], method: str, threads: int
) -> dict[str, Range]:
    """Run the network on samples and return the ranges of some of its f32 values."""
    ranges = {name: Range() for name in values}
    rounds = ("see",) if method == "minmax" else ("see", "count")
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "probe.psm"
        for at in range(0, len(values), _AT_ONCE):
            probe = StoredNetwork(network.graph.copy(), network.weights)
            probe.graph.outputs = list(values[at : at + _AT_ONCE])
            probe.write(path)
            with open_predictor(path, threads=threads) as predictor:
                for step in rounds:
                    for sample in samples:
                        for name, array in predictor.predict(sample).items():
                            getattr(ranges[name], step)(array)
    return ranges
