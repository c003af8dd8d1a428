"""A limit of the time that PyTorch takes to trace a module.

With free sizes ``torch.export`` decides at each view whether sizes divide each other, and simplifies what it decided
before.  That takes longer with every view: MobileViT and RT-DETR with free heights and widths do not finish.
Only the calls of PyTorch's functions can be refused: one that runs is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from torch.overrides import TorchFunctionMode

from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = ["TimeLimit"]


class TimeLimit(TorchFunctionMode):
    """Refuses the calls of PyTorch's functions that come after ``seconds`` of this thread's processor time.

    The time counts from here on, over each entry of the context.  ``names`` are the free sizes, which the error names.
    """

    def __init__(self, seconds: float, names: Collection[str]) -> None:
        super().__init__()
        if not seconds > 0:
            raise InvalidArgumentError(
                f"max_seconds: expected a number of seconds above 0, got {seconds!r}", param="max_seconds"
            )
        self._seconds, self._names, self._end = seconds, names, time.thread_time() + seconds

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, if there is time left."""
        self.check()
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise UnsupportedError (code "capture_timeout") if the time is over."""
        if time.thread_time() < self._end:
            return
        what = "raise max_seconds"
        if self._names:
            what = (
                f"fix one of the free sizes {', '.join(sorted(self._names))} (a number in shapes), or raise max_seconds"
            )
        raise UnsupportedError(
            f"capture: PyTorch did not trace the module in {self._seconds:g} s of processor time; {what}",
            code="capture_timeout",
            param="sizes" if self._names else "max_seconds",
        )
