"""The protocol between the runner and the processes that it measures.  No dependencies: runs in every environment.

The runner starts ``run_<peer>.py MODEL --mode M --threads N MEASURE...``.  For each measure the child prints
``{"ready": MEASURE}`` and waits for a line on standard input, while the runner probes the bandwidth; then it measures
and prints its figures as one line.  Everything else that a peer prints goes to standard error.

Measures: ``decode:B`` is decoding B different prompts of 128 tokens; ``prefill:N`` is one prompt of N tokens up to the
first new token; ``start`` is told by the runner's clock: the child prints ``{"first": true}`` once the first token of
the answer to a short text is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

CONTEXT_LEN = 128
DECODE_STEPS = 64
"""Steps at batch 1."""
BATCH_STEPS = 24
"""Steps at larger batches."""
RUNS = 3
"""Repetitions within a process, of which the median counts: of prefill and of decoding at batch 1."""
START_TEXT = "def fibonacci(n):\n    return n if n < 2 else"


class Peer(Protocol):
    """A peer whose model is open and warm."""

    def prefill_s(self, prompt: list[int]) -> float:
        """Return the seconds from a prompt of token ids to its first new token."""

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        """Return the seconds of a step that makes one token per prompt, over a number of steps after all prompts."""


@dataclass(frozen=True)
class Launch:
    """How a process was started; ``options`` are the peer's own."""

    model: Path
    mode: str
    threads: int
    measures: tuple[str, ...]
    options: dict[str, str]


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Return token ids from a fixed random stream, without special tokens and within every measured vocabulary."""
    stream = random.Random(seed)
    return [stream.randrange(300, 4000) for _ in range(num_tokens)]


def batch_of(measure: str) -> int:
    """Return the batch size: 8 for ``decode:8``, and 1 for other measures."""
    kind, _, size = measure.partition(":")
    return int(size) if kind == "decode" else 1


def steps_of(batch: int) -> int:
    return DECODE_STEPS if batch == 1 else BATCH_STEPS


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, not by getrusage, whose figure may be the parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure_one(peer: Peer, measure: str) -> dict[str, object]:
    """Return the figures of one measure: tokens per second of every run, and their median."""
    kind, _, size = measure.partition(":")
    if kind == "prefill":
        rates = [int(size) / peer.prefill_s(prompt(int(size), 100 + run)) for run in range(RUNS)]
    else:
        batch = batch_of(measure)
        runs = RUNS if batch == 1 else 1
        rates = []
        for run in range(runs):
            prompts = [prompt(CONTEXT_LEN, 1000 * (run + 1) + row) for row in range(batch)]
            rates.append(batch / decode_step_s(peer, prompts, steps_of(batch)))
    return {"tokens_per_s": statistics.median(rates), "runs": rates, "peak_rss_bytes": peak_rss_bytes()}


def decode_step_s(peer: Peer, prompts: list[list[int]], num_steps: int) -> float:
    """Return the seconds of a step.  A difference of two answers that is not positive is measured again."""
    for _ in range(3):
        seconds = peer.decode_step_s(prompts, num_steps)
        if seconds > 0:
            return seconds
    raise RuntimeError(f"a step of {len(prompts)} requests took {seconds} s, three times over: the machine is too busy")


def _take_standard_output() -> TextIO:
    """Keep the real standard output for the protocol; what libraries print goes to standard error."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept


def parse(arguments: Sequence[str] | None = None) -> Launch:
    parser = argparse.ArgumentParser(description="Measure one peer; started by run.py.")
    parser.add_argument("model", type=Path)
    parser.add_argument("measures", nargs="+", metavar="MEASURE")
    parser.add_argument("--mode", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(arguments)
    options = dict(option.split("=", 1) for option in args.option)
    return Launch(args.model, args.mode, args.threads, tuple(args.measures), options)


def serve(
    open_peer: Callable[[Launch], Peer],
    first_token: Callable[[Launch], None],
    measure: Callable[[Peer, str], dict[str, object]] = measure_one,
) -> None:
    """Run the main program of a ``run_<peer>.py``.

    ``open_peer`` imports the peer, opens the model and warms it up; ``first_token`` imports, opens and makes one
    token of ``START_TEXT``, which is all that ``start`` measures.
    """
    launch = parse()
    stream = _take_standard_output()
    if launch.measures == ("start",):
        first_token(launch)
        print(json.dumps({"first": True}), file=stream)
        return
    peer = open_peer(launch)
    for name in launch.measures:
        print(json.dumps({"ready": name}), file=stream)
        if not sys.stdin.readline():
            raise SystemExit("the runner went away")
        print(json.dumps({"measure": name, **measure(peer, name)}), file=stream)
