"""The statistics of the inputs of linear weights: what calibration yields, and what imatrix files hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["InputStatistics", "WeightInputs"]


@dataclass(frozen=True)
class WeightInputs:
    """The inputs of a weight: for each column the sum of squares (float64) and the largest magnitude (float32).

    ``count`` is the number of rows that were added up.  ``maxima`` is None in statistics of an imatrix file.
    """

    squares: NDArray[np.float64]
    count: int
    maxima: NDArray[np.float32] | None = None

    @property
    def mean_squares(self) -> NDArray[np.float32]:
        """The mean of the squares of each column."""
        return (self.squares / max(self.count, 1)).astype(np.float32)


@dataclass(frozen=True)
class InputStatistics:
    """Statistics by the name of the weight in the checkpoint.

    ``num_tokens`` and ``digest`` describe the calibration data: the SHA-256 of its token ids, or of the imatrix file.
    ``source``: the name of the file, or "samples" of the model's own.  ``expert_tokens``: of the weights of routed
    experts, how many tokens the expert saw; empty for an imatrix file, whose counts are of another kind in old files.
    ``heads``: the inputs of an output head that was not computed itself; ``weights`` has none for it.
    """

    weights: dict[str, WeightInputs] = field(default_factory=dict)
    num_tokens: int = 0
    digest: str = ""
    source: str = ""
    expert_tokens: dict[str, int] = field(default_factory=dict)
    heads: dict[str, WeightInputs] = field(default_factory=dict)
