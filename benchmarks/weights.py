"""Compares decode with weights copied into huge pages and with the mapped file, and measures the cost of the copy.

    python benchmarks/weights.py BUNDLE... [--rounds 5] [--steps 40] [--context 128] [--threads N]

Both programs of a bundle stay open and alternate.  The read bandwidth is probed before and after each turn.  The share
of a turn is its bytes of weights per second divided by the higher of its two probes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from penstock.core import native
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import WEIGHTS, ProgramLimits, pages_for


def step_of(position: int, num_tokens: int, num_pages: int) -> native.StepBatch:
    """Return a step of one request from ``position`` that computes the logits of its last token."""
    return native.StepBatch(
        token_ids=np.arange(1, num_tokens + 1, dtype=np.int32),
        positions=np.arange(position, position + num_tokens, dtype=np.int32),
        request_starts=np.array([0, num_tokens], np.int32),
        page_tables=np.arange(num_pages, dtype=np.int32).reshape(1, 1, num_pages),
        output_rows=np.array([num_tokens - 1], np.int32),
    )


def turn(program: NativeProgram, context_len: int, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step of one token after ``context_len``, and the higher of two bandwidths."""
    num_pages = program.limits.num_pages
    before = native.probe_bandwidth(program.context, passes=3)
    times = []
    for step in range(steps):
        start = time.perf_counter()
        program.run(step_of(context_len + step, 1, num_pages))
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(before, native.probe_bandwidth(program.context, passes=3))


def compare(bundle: Path, args: argparse.Namespace) -> None:
    pages = pages_for(args.context + args.steps)
    programs: dict[str, NativeProgram] = {}
    for weights in WEIGHTS:
        limits = ProgramLimits(
            max_tokens=args.context, max_requests=1, num_pages=pages, context_len=pages * 32, weights=weights
        )
        programs[weights], _ = NativeProgram.open(bundle, threads=args.threads, limits=limits)
        programs[weights].run(step_of(0, args.context, pages))  # loads the pages of the file
    huge = programs["huge"]
    size = huge.info.weight_bytes
    print(f"{bundle.name}: {size / 1e6:,.0f} MB copied in {huge.populate_s * 1e3:,.0f} ms", flush=True)
    turns: dict[str, list[tuple[float, float]]] = {weights: [] for weights in WEIGHTS}
    for _ in range(args.rounds):
        for weights, program in programs.items():
            turns[weights].append(turn(program, args.context, args.steps))
    for weights, found in turns.items():
        rates = [1 / seconds for seconds, _ in found]
        read = huge.info.weight_bytes_per_token
        shares = [read / seconds / bandwidth for seconds, bandwidth in found]
        print(
            f"  {weights}: {statistics.median(rates):7.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}), share "
            f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}), probed "
            f"{min(b for _, b in found) / 1e9:.0f} to {max(b for _, b in found) / 1e9:.0f} GB/s"
        )
    ratios = [m[0] / h[0] for m, h in zip(turns["mmap"], turns["huge"], strict=True)]
    pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"  huge is {statistics.median(ratios):.3f} times as fast (pairs: {pairs})", flush=True)
    for program in programs.values():
        program.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    for bundle in args.bundles:
        compare(bundle, args)


if __name__ == "__main__":
    main()
