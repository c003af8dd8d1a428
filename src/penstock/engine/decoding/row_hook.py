"""The interface of what sees the rows and the tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RowHook"]


class RowHook(Protocol):
    """Sees the rows and the tokens of one request, a ``Request`` of the engine, in the thread of the step."""

    def join(self, request: Any) -> Sequence[Any]:
        """Take the new request.  Returns the list of those that end together, if there are several."""

    def process(self, request: Any, row: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return the row to choose the next token from; None leaves ``row``, which is valid during the call."""

    def accept(self, request: Any, token: int) -> None:
        """Take the token that was chosen."""
