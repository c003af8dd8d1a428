"""A progress line on stderr for many prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from penstock.engine.request import Request, Status

__all__ = ["PromptProgress"]

_REDRAW_SECONDS = 0.2


class PromptProgress:
    """Counts finished requests.

    On a terminal the line is redrawn five times a second; elsewhere it is written at the end.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._open = list(requests)
        self._total = len(requests)
        self._num_tokens = 0
        self._start = self._drawn = time.monotonic()

    def update(self, *, last: bool = False) -> None:
        """Look at the requests and draw the line, unless it was drawn a moment ago."""
        now = time.monotonic()
        if not last and (now - self._drawn < _REDRAW_SECONDS or not sys.stderr.isatty()):
            return
        self._drawn = now
        unfinished = [request for request in self._open if request.status is not Status.FINISHED]
        self._num_tokens += sum(len(r.output_ids) for r in self._open if r.status is Status.FINISHED)
        self._open = unfinished
        seconds = max(now - self._start, 1e-9)
        tokens = self._num_tokens + sum(len(request.output_ids) for request in unfinished)
        done = self._total - len(unfinished)
        line = f"{done:,}/{self._total:,} prompts, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {seconds:.0f} s"
        end = "\n" if last else ""
        sys.stderr.write((f"\r{line:<78}" if sys.stderr.isatty() else line) + end)
        sys.stderr.flush()
