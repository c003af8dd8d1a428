"""Progress on standard error: a bar on a terminal, elsewhere a line per stage and another every 30 seconds."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

from penstock.validation import printable

if TYPE_CHECKING:
    from penstock.runtime.build import Progress

__all__ = ["ProgressLine", "format_bytes", "format_seconds", "printable"]

_LABELS: Final = {
    "answer": "answering",
    "capture": "capturing the network",
    "checksum": "computing the checksum of the file",
    "convert": "converting tensors",
    "download": "downloading",
    "first": "first run: capturing and packing the model, next time it opens at once",
    "hessians": "adding up products of inputs",
    "measure": "measuring",
    "merge": "merging weights",
    "methods": "trying methods",
    "pack": "packing weights",
    "quantize": "quantizing weights",
    "sensitivity": "measuring what each unit of weights costs",
    "shard": "cutting weights",
    "statistics": "computing statistics of inputs",
    "verify": "verifying checksums",
    "wait": "waiting for another process that is making the same bundle",
}
_UNITS: Final = ("kB", "MB", "GB", "TB")
_LINE_SECONDS: Final = 30.0
"""Seconds between two lines about a long stage where there is no terminal."""
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
    """A context manager that shows each Progress that it is called with, and removes the bar at its end.

    ``ticks``: draw the bar ten times a second, so that the time of a long stage moves.  Without it only a call draws,
    which leaves the cores to a measurement.
    """

    def __init__(self, stream: TextIO | None = None, *, ticks: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._ticks = ticks
        self._stage = ""
        self._start = (0.0, 0)  # the time of a stage's first report, and what was done then
        self._printed = 0.0
        self._bars: Any = None  # rich's, from the first report on

    def __call__(self, progress: Progress) -> None:
        """Show the start of a stage, its progress and what is left of it."""
        now = time.monotonic()
        label = _LABELS.get(progress.stage, progress.stage)
        if progress.rank is not None:
            label += f" of rank {progress.rank}"
        new_stage = label != self._stage
        if new_stage:
            self._stage, self._start = label, (now, progress.done)
        if self._terminal:
            self._draw(progress, label, self._share(progress, now), new_stage)
        elif new_stage:
            self._printed = now
            total = f" ({_amount(progress.total, progress.unit)})" if progress.total else ""
            print(f"{label}{total}", file=self._stream, flush=True)
        elif now - self._printed >= _LINE_SECONDS:
            self._printed = now
            print(f"{label} {self._share(progress, now)}", file=self._stream, flush=True)

    def _draw(self, progress: Progress, label: str, share: str, new_stage: bool) -> None:
        if self._bars is None:
            self._bars = _bars(self._stream, self._ticks)
            self._bars.start()
        if new_stage:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._bars.add_task(label, total=None, share="")
        task = self._bars.task_ids[0]
        self._bars.update(
            task, total=progress.total or None, completed=progress.done, share=share, refresh=not self._ticks
        )

    def _share(self, progress: Progress, now: float) -> str:
        """Return the share that is done, and after a second the rate and the time left."""
        if not progress.total:
            return progress.note
        parts = [f"{100 * progress.done // progress.total}% of {_amount(progress.total, progress.unit)}"]
        parts += [progress.note] if progress.note else []
        seconds, done = now - self._start[0], progress.done - self._start[1]
        if seconds >= _RATE_SECONDS and done > 0:
            rate = done / seconds
            parts += [f"{format_bytes(int(rate))}/s"] if progress.unit == "bytes" else []
            parts.append(f"{format_seconds(math.ceil((progress.total - progress.done) / rate))} left")
        return ", ".join(parts)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def _amount(number: int, unit: str) -> str:
    return format_bytes(number) if unit == "bytes" else f"{number:,} {unit}"


def _bars(stream: TextIO, ticks: bool) -> Any:
    """Return rich's bars.  It is imported here, where work takes long and a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    class VisibleCursor(Console):
        """Keeps the cursor, which a process that a signal ends could not bring back."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[share]")]
    ticking = [SpinnerColumn("line"), TimeElapsedColumn()] if ticks else []
    return Progress(
        *ticking[:1],
        texts[0],
        BarColumn(24),
        texts[1],
        *ticking[1:],
        console=VisibleCursor(file=stream),
        auto_refresh=ticks,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
