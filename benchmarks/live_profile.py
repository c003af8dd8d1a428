"""Measures what the profile of a running service costs: milliseconds per decode step with and without a recorder.

    python benchmarks/live_profile.py [BUNDLE] [--threads 1] [--batch 1] [--steps 600] [--pairs 5]

Turns with and without a recorder alternate in one process, and each pair begins with the other kind.  A turn is a
prompt, which is not measured, and then ``--steps`` decode steps of ``--batch`` requests; each turn with a recorder has
a new one.  Recording is off between most steps, so the mean counts, not the median: noise of the machine is in it too,
which the spread of the ratios shows.  A recorder may record its share of the time at once, so that a turn of few steps
costs more than a long one.  Making the report is not part of this.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import NamedTuple

from penstock.bench.live_profile import MAX_STEPS, StepRecorder
from penstock.bench.measure import EngineSteps
from penstock.errors import PenstockError
from penstock.runtime.native import NativeProgram
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits, pages_for

PROMPT_LEN = 128


class TimedTurn(NamedTuple):
    """The seconds of each decode step, and how many steps were recorded."""

    times: list[float]
    num_recorded: int

    @property
    def mean_ms(self) -> float:
        """The mean of the steps, in milliseconds."""
        return statistics.fmean(self.times) * 1e3


def open_steps(path: str, threads: int, batch: int, length: int) -> tuple[NativeProgram, EngineSteps]:
    """Open a bundle with room for ``batch`` requests of ``length`` tokens."""
    limits = ProgramLimits(
        max_tokens=PROMPT_LEN * batch, max_requests=batch, num_pages=batch * pages_for(length), context_len=length
    )
    program = open_program(path, threads=threads, limits=limits).program
    if not isinstance(program, NativeProgram):
        raise SystemExit(f"{path}: expected a bundle that runs in graph mode on one rank")
    return program, EngineSteps(program)


def run_turn(program: NativeProgram, engine: EngineSteps, batch: int, num_steps: int, is_recorded: bool) -> TimedTurn:
    """Return the decode steps of one turn, all of which a recorder sees if ``is_recorded``."""
    requests = engine.start(batch, PROMPT_LEN)
    recorder = StepRecorder(program, MAX_STEPS, lambda: None) if is_recorded else None
    program.recorder = recorder
    try:
        times = [engine.decode(batch) for _ in range(num_steps)]
    finally:
        program.recorder = None
        engine.abort(requests)
    if recorder is None:
        return TimedTurn(times, 0)
    if recorder.error is not None:
        raise recorder.error
    return TimedTurn(times, len(recorder.recorded))


def run_pairs(
    program: NativeProgram, engine: EngineSteps, batch: int, num_steps: int, num_pairs: int
) -> list[tuple[TimedTurn, TimedTurn]]:
    """Return the pairs of a turn without a recorder and one with it, after a pair that is not counted."""
    pairs = []
    for number in range(num_pairs + 1):
        turns = {}
        for is_recorded in (False, True) if number % 2 else (True, False):
            turns[is_recorded] = run_turn(program, engine, batch, num_steps, is_recorded)
        pairs.append((turns[False], turns[True]))
    return pairs[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", default="demo/demo.psm")
    for name, default in (("threads", 1), ("batch", 1), ("steps", 600), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    args = parser.parse_args()
    for name in ("threads", "batch", "steps", "pairs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    try:
        program, engine = open_steps(args.bundle, args.threads, args.batch, PROMPT_LEN + args.steps + 1)
        pairs = run_pairs(program, engine, args.batch, args.steps, args.pairs)
    except PenstockError as error:
        raise SystemExit(str(error)) from None
    print(f"{'without':>9s} {'with':>9s} {'ratio':>7s} {'recorded':>9s}   ms per decode step, mean of {args.steps}")
    for plain, recorded in pairs:
        ratio = recorded.mean_ms / plain.mean_ms
        print(f"{plain.mean_ms:9.4f} {recorded.mean_ms:9.4f} {ratio:7.4f} {recorded.num_recorded:9d}")
    ratios = sorted(recorded.mean_ms / plain.mean_ms for plain, recorded in pairs)
    medians = [statistics.median(time for pair in pairs for time in pair[kind].times) * 1e3 for kind in (0, 1)]
    print(
        f"cost of recording: {statistics.median(ratios) - 1:+.2%} (median of {len(ratios)} pairs, "
        f"{ratios[0] - 1:+.2%} to {ratios[-1] - 1:+.2%}); median step {medians[0]:.4f} and {medians[1]:.4f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
