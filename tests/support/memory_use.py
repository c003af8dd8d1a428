"""What the process of a service holds, and takes for a while, under requests that it refuses."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable

import psutil

from tests.support.waiting import until

MIB = 1 << 20
HELD = 64 << 10
"""What Python and NumPy may hold more after some rounds: caches of names, not one of the requests."""
PEAK = 8
"""How often they may hold the largest request at once: as its client has it, as it came, and as it was taken apart."""


def check_flat(storm: Callable[[], None], *, warm_up: int, rounds: int, largest: int, grown: int) -> None:
    """``storm``, whose requests have up to ``largest`` bytes, is run until the process has what it takes, and then
    again: it grows by less than ``grown`` bytes, and what is Python's is gone afterwards and never was much.
    """
    for _ in range(warm_up):  # pools of threads and of memory: what the first take stays with the process
        storm()
    before = _resident()
    for _ in range(rounds):
        storm()
    found = _resident() - before
    assert found < grown, f"{found / MIB:.1f} MiB more in {rounds} rounds"
    peak = _of_python(storm, rounds)
    assert peak < PEAK * largest, f"Python held {peak / MIB:.1f} MiB more at once"


def _resident() -> int:
    """Of the whole process, without what the C library keeps for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    found: int = psutil.Process().memory_info().rss
    return found


def _of_python(storm: Callable[[], None], rounds: int) -> int:
    """Return the most that Python held more at once; what it holds more becomes less than ``HELD`` when all is over."""

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        storm()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(rounds):
            storm()
        _, peak = tracemalloc.get_traced_memory()
        # A connection that is about to close keeps its buffer of 64 KiB for a moment.
        until(lambda: held() < HELD, lambda: f"Python holds {held()} bytes more after {rounds} rounds")
        return peak - before
    finally:
        tracemalloc.stop()
