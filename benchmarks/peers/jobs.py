"""The processes of a run, their order, and the figures that exist already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systems import PRECISIONS, System

Key = tuple[str, str, str, int]
"""Shape, system, measure, round: what a figure is of."""


@dataclass(frozen=True)
class Job:
    """One process, or the few processes that measure a start."""

    shape: str
    system: System
    measures: tuple[str, ...]
    round: int


@dataclass(frozen=True)
class Rounds:
    """How often each figure is taken: at batch 1, where pairs close in time count; otherwise; and of systems that
    take a minute to start."""

    batch_1: int = 5
    others: int = 3
    slow: int = 3


def plan(shapes: Sequence[str], systems: Sequence[System], measures: Sequence[str], rounds: Rounds) -> list[Job]:
    """Return the jobs in order, one complete round after the other.

    Systems of one precision follow each other in every measure, and in every second round the other way about, so
    that those which are compared are close in time.
    """
    jobs = []
    for shape in shapes:
        for round_ in range(max(rounds.batch_1, rounds.others, rounds.slow)):
            for precision in PRECISIONS:
                members = [system for system in systems if system.precision == precision]
                jobs += _of_precision(shape, members[:: -1 if round_ % 2 else 1], measures, round_, rounds)
    return jobs


def _of_precision(
    shape: str, members: Sequence[System], measures: Sequence[str], round_: int, rounds: Rounds
) -> list[Job]:
    jobs = []
    for measure in measures:
        if round_ < (rounds.batch_1 if measure == "decode:1" else rounds.others):
            jobs += [Job(shape, system, (measure,), round_) for system in members if not system.together]
    if round_ < rounds.slow:
        for system in members:
            if system.together:
                inside = tuple(measure for measure in measures if measure != "start")
                jobs += [
                    Job(shape, system, part, round_) for part in (inside, ("start",)) if set(part) <= set(measures)
                ]
    return [job for job in jobs if job.measures]


def missing(jobs: Iterable[Job], done: set[Key]) -> list[Job]:
    """Return the jobs without the figures that exist."""
    left = []
    for job in jobs:
        measures = tuple(m for m in job.measures if (job.shape, job.system.name, m, job.round) not in done)
        if measures:
            left.append(Job(job.shape, job.system, measures, job.round))
    return left


@dataclass
class Results:
    """A file of one JSON object a line: a figure, a failure, limits probed after the first, or a header (what is
    measured); the last one counts.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    later_limits: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the existing results.  An incomplete last line is dropped."""
        results = cls(path)
        if not path.exists():
            return results
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            if "header" in row:
                results.header = row["header"]
            elif "limits" in row:
                results.later_limits.append(row["limits"])
            else:
                results.rows.append(row)
        return results

    def begin(self, header: dict[str, Any]) -> None:
        """Start a file or continue one; SystemExit if it has figures of another configuration."""
        if not self.header:
            self.header = header
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"header": header}) + "\n")
            return
        self.check(header)
        whole = self.path.read_text()
        self.path.write_text(whole[: whole.rfind("\n") + 1])
        wide = ("versions", "weights_read", "layer_weights", "bits")
        wider = self.header | {name: self.header[name] | header[name] for name in wide}
        if wider != self.header:
            self.header = wider
            self._append({"header": wider})
        self.add_limits(header["limits"])

    def check(self, of_now: dict[str, Any]) -> None:
        """Raise SystemExit if existing figures are of another configuration; ``of_now`` is what the header has."""
        for name in ("penstock", "scripts", "threads", "options", "machine"):
            was, now = self.header.get(name), of_now.get(name)
            if self.header and was != now:
                raise SystemExit(
                    f"{self.path}: {name} was {was!r}, now it is {now!r}: figures of both cannot stand in one table; "
                    "give another --results (with make: ARGS='--results FILE'), or remove the file"
                )

    def add_limits(self, limits: dict[str, float]) -> None:
        """Keep the machine's limits as they are now, beside those that were probed before."""
        self.later_limits.append(limits)
        self._append({"limits": limits})

    @property
    def limits(self) -> list[dict[str, float]]:
        """Return all probed limits; the first are in the header."""
        return [self.header["limits"], *self.later_limits]

    def note(self, name: str, value: Any) -> None:
        """Add a fact to the header."""
        self.header = self.header | {name: value}
        self._append({"header": self.header})

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    def done(self) -> set[Key]:
        """Return the existing figures; failed ones are measured again."""
        return {(row["shape"], row["system"], row["measure"], row["round"]) for row in self.rows if "error" not in row}
