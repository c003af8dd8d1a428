"""Progress on standard error: one line that updates on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from penstock.runtime.build import Progress

__all__ = ["ProgressLine", "format_bytes", "format_seconds", "printable"]

_LABELS: Final = {
    "capture": "capturing the network",
    "download": "downloading",
    "pack": "packing weights",
    "quantize": "quantizing weights",
    "wait": "waiting for another process that is making the same bundle",
}
_UNITS: Final = ("kB", "MB", "GB", "TB")
_REDRAW_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 30.0
"""Between two lines about a long stage where there is no terminal."""
_RATE_SECONDS: Final = 1.0
"""A stage shows no rate before it has run this long."""


def format_bytes(num_bytes: int) -> str:
    """Format a size for reading: 999 B, 12.3 MB, 4.56 GB (decimal units)."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1000, 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def printable(text: str, keep: str = "") -> str:
    """Return the text with a question mark for each character that a terminal cannot show; ``keep`` stays."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def format_seconds(seconds: float) -> str:
    """Format a time for reading: 1.2 ms, 34 ms, 1.2 s, 38 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if 0 < seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds % 1 else f"{whole} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class ProgressLine:
    """A context manager that shows each Progress that it is called with, and removes the line at its end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._start = (0.0, 0)  # the time of a stage's first report, and the bytes that were done then
        self._drawn = 0.0
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Show the start of each stage and updates: on a terminal ten a second, elsewhere a line every 30 s."""
        label = _LABELS.get(progress.stage, progress.stage)
        now = time.monotonic()
        new_stage = progress.stage != self._stage
        if new_stage:
            self._stage, self._start = progress.stage, (now, progress.done)
        finished = progress.total and progress.done >= progress.total
        pause = _REDRAW_SECONDS if self._terminal else _LINE_SECONDS
        if not new_stage and now - self._drawn < pause and not (finished and self._terminal):
            return
        self._drawn = now
        if self._terminal:
            self._write(f"{label}{self._share(progress, now)}")
        elif new_stage:
            total = f" ({format_bytes(progress.total)})" if progress.total else ""
            print(f"{label}{total}", file=self._stream, flush=True)
        else:
            print(f"{label}{self._share(progress, now)}", file=self._stream, flush=True)

    def _share(self, progress: Progress, now: float) -> str:
        """Return the share that is done, and after a second the rate and the time left."""
        if not progress.total:
            return ""
        share = f" {100 * progress.done // progress.total}% of {format_bytes(progress.total)}"
        seconds, num_bytes = now - self._start[0], progress.done - self._start[1]
        if seconds < _RATE_SECONDS or num_bytes <= 0:
            return share
        rate = num_bytes / seconds
        left = (progress.total - progress.done) / rate
        return f"{share}, {format_bytes(int(rate))}/s, {format_seconds(math.ceil(left))} left"

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._width:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text:<{self._width}}\r{text}" if self._width else text)
        self._stream.flush()
        self._width = len(text)
