"""Waiting for what other threads and processes do.

Every wait counts looks, not time: a machine that stands still for a while fails no test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "until"]

_LOOK_S = 0.005
_LOOKS = 24_000


def until(
    condition: Callable[[], Any],
    what: Any = "it",
    *,
    process: Any = None,
    pause_s: float = _LOOK_S,
    num_looks: int = _LOOKS,
) -> None:
    """Wait until a condition holds, for two minutes or more.

    ``what``: its name in the failure, or a function that returns the text of the failure.  ``process``: one that must
    not end meanwhile.  ``pause_s``: longer for a condition that costs much; ``num_looks``: fewer then.
    """
    for _ in range(num_looks):
        if condition():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(pause_s)
    raise AssertionError(what() if callable(what) else f"{what} did not come true")


async def eventually(condition: Callable[[], Any], what: str = "it", seconds: float = 120.0) -> None:
    """Wait in an event loop until a condition holds."""
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(2 * _LOOK_S)
    raise AssertionError(f"{what} did not come true")
