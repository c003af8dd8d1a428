"""Progress on standard error: one line that updates on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from penstock.runtime.build import Progress

__all__ = ["ProgressLine", "format_bytes", "printable"]

_LABELS: Final = {
    "capture": "capturing the network",
    "pack": "packing weights",
    "quantize": "quantizing weights",
    "wait": "waiting for another process that is making the same bundle",
}
_UNITS: Final = ("kB", "MB", "GB", "TB")
_REDRAW_SECONDS: Final = 0.1


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


class ProgressLine:
    """A context manager that shows each Progress that it is called with, and removes the line at its end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._drawn = 0.0
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Show the start and the end of each stage and, on a terminal, an update ten times a second."""
        label = _LABELS.get(progress.stage, progress.stage)
        new_stage = progress.stage != self._stage
        self._stage = progress.stage
        if not self._terminal:
            if new_stage:
                total = f" ({format_bytes(progress.total)})" if progress.total else ""
                print(f"{label}{total}", file=self._stream, flush=True)
            return
        now = time.monotonic()
        finished = progress.total and progress.done >= progress.total
        if not new_stage and not finished and now - self._drawn < _REDRAW_SECONDS:
            return
        self._drawn = now
        share = f" {100 * progress.done // progress.total}% of {format_bytes(progress.total)}" if progress.total else ""
        self._write(f"{label}{share}")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._width:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text:<{self._width}}\r{text}" if self._width else text)
        self._stream.flush()
        self._width = len(text)
