"""Measures how long steps take when other work uses the cores: decode at batch 1, on a quiet and on a busy machine.

    python -m benchmarks.contention BUNDLE [--context 128] [--steps 200]

The goal: with 8 threads on 2 cores, or beside one busy process, no step takes more than 3 times the quiet median.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.steps import make_batch
from penstock.core.native import Context, CoreProgram, Model, ProgramOptions


def spin(cpu: int | None) -> None:
    """Keep a core busy until the process is terminated."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    while True:
        pass


@contextmanager
def busy(cpus: list[int | None]) -> Iterator[None]:
    """Run one busy process per entry, optionally pinned to a core."""
    others = [multiprocessing.Process(target=spin, args=(cpu,), daemon=True) for cpu in cpus]
    for other in others:
        other.start()
    time.sleep(0.3)
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def measure(model: Model, threads: int, context_len: int, steps: int) -> list[float]:
    """Return the milliseconds of each step, ascending."""
    batch = make_batch("b1", context_len, model.info.num_page_groups)
    options = ProgramOptions(max_tokens=1, max_requests=1, max_rows=1, num_pages=int(batch.page_tables.max()) + 1)
    with Context(threads) as context, CoreProgram(model, context, options) as program:
        for _ in range(10):
            program.run(batch)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            program.run(batch)
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    threads = len(cores)
    model = Model.open(args.bundle)
    cases: list[tuple[str, int, list[int | None]]] = [
        ("quiet", threads, []),
        (f"{4 * threads} threads", 4 * threads, []),
        ("one busy process", threads, [None]),
        ("one pinned to the first core", threads, [cores[0]]),
        ("one pinned to the last core", threads, [cores[-1]]),
        ("a busy process per core", threads, list(cores)),
        ("quiet again", threads, []),
    ]
    quiet = 0.0
    for name, count, others in cases:
        with busy(others):
            times = measure(model, count, args.context, args.steps)
        median = statistics.median(times)
        quiet = quiet or median
        print(
            f"{name:30s} median {median:8.2f} ms ({median / quiet:5.2f}x)  p99 {times[-len(times) // 100 - 1]:8.2f}  "
            f"worst {times[-1]:8.2f} ms ({times[-1] / quiet:5.2f}x)",
            flush=True,
        )


if __name__ == "__main__":
    main()
