"""Measures the cost of a step without its kernels: batch checks, walking the nodes, splitting over threads, barriers.

python benchmarks/executor.py BUNDLE [--threads 2] [--steps 10000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from penstock.core.native import ALL_THREADS, EMPTY_KERNELS, Context, CoreProgram, Model, ProgramOptions, StepBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    model, context = Model.open(args.bundle), Context(num_threads=args.threads)
    options = ProgramOptions(max_tokens=1, max_requests=1, max_rows=1, num_pages=1, flags=EMPTY_KERNELS | ALL_THREADS)
    program = CoreProgram(model, context, options)
    zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    tables = np.zeros((model.info.num_page_groups, 1, 1), np.int32)
    batch = StepBatch(zero, zero, one, tables, zero)
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        program.run(batch)
        times.append(time.perf_counter() - start)
    deciles = statistics.quantiles(times, n=10)
    print(
        f"{model.info.num_nodes} nodes, {args.threads} threads, {args.steps} steps: "
        f"median {statistics.median(times) * 1e6:.1f} us, p10 {deciles[0] * 1e6:.1f}, "
        f"p90 {deciles[-1] * 1e6:.1f} (the call from Python included)"
    )


if __name__ == "__main__":
    main()
