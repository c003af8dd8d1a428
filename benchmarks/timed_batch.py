"""``penstock batch`` whose engines measure the time in steps; each process writes its own to a file in a folder.

    python benchmarks/timed_batch.py command FOLDER batch MODEL.psm IN.jsonl OUT.jsonl [OPTION ...]

The time in steps is that of the native calls that compute a step and sample its tokens.  ``FOLDER/PID.json`` is written
when the process closes its model.  Its times are of ``time.perf_counter``, and those of a worker include its warm-up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

from penstock.runtime.native import NativeProgram


class StepTimes:
    """The time in the steps of this process: ``seconds`` in all, of ``num`` steps, between two moments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds, self.num, self.first_s, self.last_s = 0.0, 0, 0.0, 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose calls count."""

        @wraps(method)
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.last_s = time.perf_counter()
                self.first_s = self.first_s or start
                self.seconds += self.last_s - start
                self.num += 1

        return call

    def written(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that closes a program; it writes the file first."""

        @wraps(method)
        def close(*arguments: object) -> object:
            facts = {"seconds": self.seconds, "num": self.num, "first_s": self.first_s, "last_s": self.last_s}
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(facts))
            return method(*arguments)

        return close


def measure_steps(folder: Path) -> None:
    """Measure the steps of every program of this process."""
    times = StepTimes(folder)
    program: Any = NativeProgram
    program.run, program.step = times.timed(program.run), times.timed(program.step)
    program.close = times.written(program.close)


def run_command(folder: str, arguments: Sequence[str]) -> int:
    """Run the command, with workers of this file."""
    from penstock.cli import main as cli
    from penstock.cluster.placement.local import LocalPlacement
    from penstock.serving.workers import primary

    placed: Any = partial(LocalPlacement, (sys.executable, __file__, "worker", folder))
    vars(primary)["LocalPlacement"] = placed
    return cli.main(arguments)


def run_worker() -> int:
    """Run the worker that standard input describes."""
    from penstock.serving.workers import worker

    return worker.main()


if __name__ == "__main__":
    role, own_folder, *rest = sys.argv[1:]
    measure_steps(Path(own_folder))
    sys.exit(run_command(own_folder, rest) if role == "command" else run_worker())
