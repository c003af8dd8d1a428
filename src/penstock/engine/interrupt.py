"""Defer KeyboardInterrupt to a safe point between steps, and end a step that does not end by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["end_stuck_step", "interrupt_after"]

_STUCK_S: Final = 1.0


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that a step is never left half updated."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    interrupted: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _number, frame: interrupted.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            raise KeyboardInterrupt


def end_stuck_step(lock: Any, num_steps: Callable[[], int], end: Callable[[], None]) -> None:
    """Wait until no other thread holds the engine's ``lock``; call ``end`` if one is in the same step for a second.

    Other ranks that hang would hold it for the timeout of an exchange.
    """
    number = num_steps()
    while not lock.acquire(timeout=_STUCK_S):
        if num_steps() == number:
            end()
            return
        number = num_steps()
    lock.release()
