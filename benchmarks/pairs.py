"""Compares the times of two kinds of step: both alternate in one process; the result is the median ratio of neighbours.

    python -m benchmarks.pairs FIRST SECOND [--case b1] [--threads 2] [--steps 40]

A side is a bundle with optional settings: ``w4a8.psm``, ``w4a8.psm,cpu=avx2``, ``long.psm,kv=int8,context=8000``.
``cpu`` is the instruction level, ``kv`` the type of keys and values (default: bf16), and ``context`` the tokens before
a decode step (default: 128).  Only the native step is measured, without sampling and the engine; ``--case`` as in
steps.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

from benchmarks.steps import make_batch
from penstock.core.native import ALL_THREADS, Context, CoreProgram, Model, ProgramOptions, StepBatch, probe_bandwidth
from penstock.errors import PenstockError
from penstock.graph.ir import KvLayout

SETTINGS = {"cpu": "", "kv": "bf16", "context": "128"}


class Side(NamedTuple):
    """A program and the step that it repeats."""

    name: str
    program: CoreProgram
    batch: StepBatch
    context: Context


def open_side(text: str, case: str, threads: int) -> Side:
    path, *changes = text.split(",")
    settings = dict(SETTINGS)
    for change in changes:
        name, _, value = change.partition("=")
        if name not in settings or not value:
            raise SystemExit(f"{text}: expected {', '.join(f'{known}=...' for known in SETTINGS)} after the bundle")
        settings[name] = value
    if not settings["context"].isdecimal() or settings["kv"].upper() not in KvLayout.__members__:
        raise SystemExit(f"{text}: expected context=N, and kv=f32, bf16, int8 or int4")
    model, context = Model.open(path), Context(num_threads=threads, cpu_level=settings["cpu"] or None)
    if (most := int(settings["context"]) + 1) > model.info.context_len:
        raise SystemExit(f"{text}: {most} tokens are over the model's context of {model.info.context_len}")
    batch = make_batch(case, int(settings["context"]), model.info.num_page_groups)
    options = ProgramOptions(
        max_tokens=len(batch.token_ids),
        max_requests=len(batch.request_starts) - 1,
        max_rows=len(batch.request_starts) - 1,
        num_pages=int(batch.page_tables.max()) + 1,
        kv_layout=int(KvLayout[settings["kv"].upper()]),
        flags=ALL_THREADS,
    )
    return Side(text, CoreProgram(model, context, options), batch, context)


def step_s(side: Side) -> float:
    begin = time.perf_counter()
    side.program.run(side.batch)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs=2, metavar="SIDE")
    parser.add_argument("--case", default="b1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {args.steps}")
    try:
        first, second = (open_side(side, args.case, args.threads) for side in args.sides)
    except PenstockError as error:
        raise SystemExit(str(error)) from None
    for side in (first, second, first, second):
        step_s(side)
    before = probe_bandwidth(first.context)
    pairs = [(step_s(first), step_s(second)) for _ in range(args.steps)]
    after = probe_bandwidth(first.context)
    for side, times in zip((first, second), zip(*pairs, strict=True), strict=True):
        print(f"{side.name}: {statistics.median(times) * 1e3:.2f} ms a step ({min(times) * 1e3:.2f} at least)")
    ratios = sorted(one / other for one, other in pairs)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(
        f"{args.case}, speed of the second to the first: {statistics.median(ratios):.2f} "
        f"(80 % of {len(ratios)} pairs between {low:.2f} and {high:.2f}); "
        f"memory read {before / 1e9:.0f} and {after / 1e9:.0f} GB/s"
    )


if __name__ == "__main__":
    main()
