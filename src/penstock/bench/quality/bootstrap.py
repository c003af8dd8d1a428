"""Intervals of means over tokens: windows are drawn with replacement, because the tokens of a window are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "MIN_WINDOWS", "Interval", "bootstrap_mean", "window_sums"]

DRAWS: Final = 10_000
MIN_WINDOWS: Final = 8
"""With fewer windows, an interval of a bootstrap misses the truth far more often than it says."""
_SEED: Final = 20_260
_DRAWN_VALUES: Final = 1 << 22
_DETECTABLE: Final = 1.959964 + 0.841621
"""Standard errors of an effect that a two-sided test at 5 % finds with a probability of 80 %."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean with its interval of 95 %.

    ``detectable``: the smallest effect that a measurement of this size finds with a probability of 80 %; the test is
    two-sided at 5 %.  The last four are None with fewer than MIN_WINDOWS windows.
    """

    value: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    detectable: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """True if zero lies outside of the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def window_sums(values: Floats, window: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the sum of the values of each window, and their number."""
    counts = np.bincount(window).astype(np.float64)
    return np.bincount(window, weights=values).astype(np.float64), counts


def bootstrap_mean(sums: Floats, counts: Floats, draws: int = DRAWS) -> Interval:
    """Return the mean over all tokens with the percentile interval of a bootstrap over windows.

    ``sums`` and ``counts``: those of each window.  A draw takes as many windows as there are, with replacement; its
    mean is the ratio of both sums.  Differences of two models are drawn as pairs when ``sums`` are those of the
    differences.  The draws have a fixed seed, so equal values give equal intervals.
    """
    mean, num = float(sums.sum() / counts.sum()), len(sums)
    if num < MIN_WINDOWS:
        return Interval(mean)
    random, means = np.random.default_rng(_SEED), []
    step = max(1, _DRAWN_VALUES // num)
    for begin in range(0, draws, step):
        picks = random.integers(0, num, (min(step, draws - begin), num))
        means.append(sums[picks].sum(axis=1) / counts[picks].sum(axis=1))
    drawn = np.concatenate(means)
    low, high = map(float, np.percentile(drawn, (2.5, 97.5)))
    wider = (num / (num - 1)) ** 0.5  # draws of n windows vary as if their mean were the true one
    error = wider * float(drawn.std(ddof=1))
    return Interval(mean, mean + wider * (low - mean), mean + wider * (high - mean), error, _DETECTABLE * error)
