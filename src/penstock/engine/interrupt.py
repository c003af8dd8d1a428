"""Defer KeyboardInterrupt to a safe point between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupt_after"]


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
