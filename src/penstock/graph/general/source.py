"""The module or file that a draft was made from, which can be run beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["DraftSource"]


class DraftSource(Protocol):
    """A module or a file that computes what the draft computes.

    ``examples``: the inputs that it was captured with, if there are any.  ``tolerance``: how far two correct results
    may be from each other, as a part of the largest number of a tensor.
    """

    name: str
    tolerance: float
    examples: Sequence[NDArray[Any]] | None

    def run(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs for arrays in the order of the draft's inputs."""

    def values(self, arrays: Sequence[NDArray[Any]], keys: Collection[str]) -> dict[str, NDArray[Any]]:
        """Return the values of ``Origin.key``."""
