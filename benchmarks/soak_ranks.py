"""Opens groups of ranks, kills or stops one rank of each, and checks that nothing is left of any group.

    python benchmarks/soak_ranks.py demo/demo.psm --restarts 1000

Every group answers a request, which must be the same each time; then a rank fails in the middle of another request,
which must end with UnavailableError within two seconds.  The exit status is 1 if a request hangs or differs, or if
processes, descriptors, threads or files in /dev/shm are left at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.errors import UnavailableError

LIMITS = ProgramLimits(max_tokens=64, max_requests=4, context_len=256)
LAYOUTS = ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2})
PROMPT = [7, 8, 9, 10, 11]
LIMIT_S = 2.0


def left() -> tuple[int, int, int, int]:
    """Return the numbers of processes, descriptors, threads and shared files."""
    children, descriptors = len(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))
    return children, descriptors, threading.active_count(), len(os.listdir("/dev/shm"))  # noqa: S108


def restart(model: Path, rng: random.Random) -> tuple[list[int], float]:
    """Open a group, let a rank fail in a request; return the answer before it, and the seconds until the error."""
    with LLM(model, threads=1, limits=LIMITS, **rng.choice(LAYOUTS)) as llm:
        answer = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)).token_ids
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(rng.randint(1, 5)):
            next(stream)
        victim = rng.choice(psutil.Process().children())
        victim.send_signal(signal.SIGSTOP if rng.random() < 0.1 else signal.SIGKILL)
        start = time.monotonic()
        try:
            list(stream)
        except UnavailableError:
            return list(answer), time.monotonic() - start
        raise SystemExit(f"a request ended well although rank process {victim.pid} had failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--restarts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, start = random.Random(args.seed), time.monotonic()
    expected, _ = restart(args.model, rng)  # what is opened once stays
    before, seconds, num_different = left(), [], 0
    for _ in range(args.restarts):
        answer, took = restart(args.model, rng)
        seconds.append(took)
        num_different += answer != expected
    after, median = left(), sorted(seconds)[len(seconds) // 2]
    print(
        f"{args.restarts} restarts in {time.monotonic() - start:.0f} s; error after {median:.2f} s (median) "
        f"and {max(seconds):.2f} s (most); {num_different} other answers; processes, descriptors, threads and "
        f"shared files {before} before, {after} after"
    )
    return int(after != before or num_different > 0 or max(seconds) > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
