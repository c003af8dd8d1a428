"""Samples of each model since the service started, for the charts of the page."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.llm.backend import Models

__all__ = ["MAX_SAMPLES", "History", "Series"]

MAX_SAMPLES: Final = 720  # even, so that pairs can be merged
"""The number of samples of a model.  Twelve minutes have a sample a second; a day has one every two minutes."""
_SAMPLE_S: Final = 1.0
_RATES: Final = ("output_tokens_per_s", "prompt_tokens_per_s", "finished_per_s")
_COLUMNS: Final = (*_RATES, "num_running", "num_waiting", "held_pages_share")


@dataclass
class Series:
    """Samples of one model at equal intervals, each the mean of its interval.

    ``at_s``: the ends of the intervals in seconds since the service started.  ``columns``: the values by name.  At
    MAX_SAMPLES, each two become one and the interval doubles.
    """

    interval_s: float = _SAMPLE_S
    at_s: list[float] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    _sums: list[float] = field(default_factory=lambda: [0.0] * len(_COLUMNS))
    _seconds: float = 0.0

    def add(self, at_s: float, seconds: float, values: tuple[float, ...]) -> None:
        """Add the values of the last ``seconds``, in the order of the columns."""
        self._sums = [total + seconds * value for total, value in zip(self._sums, values, strict=True)]
        self._seconds += seconds
        if self._seconds < self.interval_s - _SAMPLE_S / 2:
            return
        for column, total in zip(self.columns.values(), self._sums, strict=True):
            column.append(total / self._seconds)
        self.at_s.append(at_s)
        self._sums, self._seconds = [0.0] * len(_COLUMNS), 0.0
        if len(self.at_s) == MAX_SAMPLES:
            self._halve()

    def _halve(self) -> None:
        self.interval_s *= 2
        self.at_s = self.at_s[1::2]
        for name, values in self.columns.items():
            self.columns[name] = [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]


class History:
    """The series of each model.  ``started``: the time of ``time.perf_counter`` at which the service started."""

    def __init__(self, models: Models, started: float) -> None:
        self._models = models
        self._started = self._sampled = started
        self._counts: dict[str, tuple[int, ...]] = {}
        self.series: dict[str, Series] = {}

    async def run(self) -> None:
        """Take a sample every second until cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.sample(time.perf_counter())

    def sample(self, now: float) -> None:
        """Add a sample of each model that has been loaded; a model that has left loses its series."""
        seconds, self._sampled = now - self._sampled, now
        backends = {backend.name: backend for backend in self._models.list()}
        for name in self.series.keys() - backends.keys():
            del self.series[name], self._counts[name]
        for name, backend in backends.items():
            figures = backend.figures()
            if figures is None:
                continue
            counts = (figures.num_output_tokens, figures.num_prompt_tokens, sum(figures.num_finished.values()))
            before = self._counts.get(name, counts)
            self._counts[name] = counts
            # A worker that was replaced counts from 0 again.
            rates = [max(0, count - old) / seconds for count, old in zip(counts, before, strict=True)]
            share = figures.num_held_pages / figures.num_pages if figures.num_pages else 0.0
            values = (*rates, figures.num_running, figures.num_waiting, share)
            self.series.setdefault(name, Series()).add(now - self._started, seconds, values)
