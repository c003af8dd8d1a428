"""Progress of many prompts, one line on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from penstock.engine.request import Request, Status

__all__ = ["PromptProgress"]

_REDRAW_SECONDS = 0.2


class PromptProgress:
    """Counts finished requests: on a terminal drawn again five times a second, elsewhere once at the end."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._open = list(requests)
        self._total = len(requests)
        self._num_tokens = 0
        self._start = self._drawn = time.monotonic()

    def update(self, *, last: bool = False) -> None:
        """Look at the requests and draw, unless it was drawn a moment ago."""
        now = time.monotonic()
        if not last and (now - self._drawn < _REDRAW_SECONDS or not sys.stderr.isatty()):
            return
        self._drawn = now
        still = [request for request in self._open if request.status is not Status.FINISHED]
        self._num_tokens += sum(len(r.output_ids) for r in self._open if r.status is Status.FINISHED)
        self._open = still
        seconds = max(now - self._start, 1e-9)
        tokens = self._num_tokens + sum(len(request.output_ids) for request in still)
        done = self._total - len(still)
        line = f"{done:,}/{self._total:,} prompts, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {seconds:.0f} s"
        end = "\n" if last else ""
        sys.stderr.write((f"\r{line:<78}" if sys.stderr.isatty() else line) + end)
        sys.stderr.flush()
