"""Compares Penstock and llama.cpp on the same GGUF file: decode, prefill, and Penstock's start from its cache.

    python -m benchmarks.gguf_pairs FILE.gguf --llama-cpp PYTHON [--threads 2] [--stages 1] [--rounds 5]

PYTHON is the interpreter of an environment with llama-cpp-python; with ``--peer ik_llama.cpp``, of one with
ik-llama-cpp-python.  Both processes stay open and take turns, one measure
each, Penstock first in every other round; the figures are medians of the rounds, and the ratio that of the pairs.
With ``--stages 2`` the layers are divided over two processes of that many threads: a pipeline here, servers of the RPC
backend there, which llama-cpp-python has when it was built with GGML_RPC.  ``start`` is a whole ``penstock run`` up to
its first byte, with the bundle in the cache.  The load is the mean number of processes that want to run (1 minute).
``make_gguf.py`` makes files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.child import Child
from penstock.core.native import Context, probe_bandwidth

MEASURES = ("decode 1 16", "decode 8 8", "prefill 512")
PROMPT = "def fibonacci(n):\n    return n if n < 2 else"


class Side(Child):
    """The process of one side, which answers a measure at a time."""

    def __init__(self, python: str, name: str, file: Path, threads: int, stages: int) -> None:
        side = str(Path(__file__).with_name("gguf_sides.py"))
        super().__init__(name, [python, side, name, str(file), str(threads), str(stages)], subprocess.DEVNULL)
        self.answer()

    def measure(self, what: str) -> tuple[float, float]:
        """Return the seconds of a step, on the clock and on the cores."""
        found = self.ask(what)
        return found["wall_s"], found["cpu_s"]


def show_pairs(
    what: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]], load: float, clocks: int, peer: str
) -> None:
    """Print the medians of both sides and the ratio of the pairs: of the clock; with ``clocks`` 2 of the cores, too."""
    tokens = int(what.split()[1])
    for clock, label in enumerate(("clock", "cores")[:clocks]):
        ours, theirs = ([side[clock] for side in sides] for sides in zip(*pairs, strict=True))
        ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
        print(
            f"{what.rsplit(' ', 1)[0] if 'decode' in what else what:12s} {label}: Penstock "
            f"{statistics.median(ours) * 1e3:8.2f} ms ({tokens / statistics.median(ours):7.1f} tokens/s), {peer} "
            f"{statistics.median(theirs) * 1e3:8.2f} ms ({tokens / statistics.median(theirs):7.1f}), ratio "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), load {load:.1f}",
            flush=True,
        )


def start_s(file: Path) -> tuple[float, float]:
    """Return the seconds up to the first byte of an answer, and those of the whole process on the cores."""
    command = [sys.executable, "-m", "penstock", "run", str(file), PROMPT, "--max-tokens", "1", "--temperature", "0"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise SystemExit("penstock run printed nothing")
        seconds = time.perf_counter() - begin
        process.stdout.read()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    return seconds, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="default: only Penstock's start is measured")
    parser.add_argument("--peer", choices=["llama.cpp", "ik_llama.cpp"], default="llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="append", choices=[*MEASURES, "start"])
    args = parser.parse_args()
    chosen = args.measure or [*MEASURES, *(["start"] if args.stages == 1 else [])]
    context = Context(num_threads=args.threads)
    stages = f"{args.stages} stages of " if args.stages > 1 else ""
    print(f"{args.file.name}, {stages}{args.threads} threads, {context.cpu_level}, memory read ", end="")
    print(f"{probe_bandwidth(context) / 1e9:.1f} GB/s", flush=True)
    paired = [what for what in chosen if what != "start"] if args.llama_cpp else []
    if paired:
        ours = Side(sys.executable, "penstock", args.file, args.threads, args.stages)
        theirs = Side(args.llama_cpp, args.peer, args.file, args.threads, args.stages)
        for what in paired:
            pairs = []
            for number in range(args.rounds):
                figures = {}
                for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                    figures[side] = side.measure(what)
                pairs.append((figures[ours], figures[theirs]))
            show_pairs(what, pairs, os.getloadavg()[0], 2 if args.stages == 1 else 1, args.peer)
        ours.close()
        theirs.close()
    if "start" in chosen:
        start_s(args.file)
        clock, cores = zip(*(start_s(args.file) for _ in range(args.rounds)), strict=True)
        print(
            f"start: {statistics.median(clock) * 1e3:.0f} ms ({min(clock) * 1e3:.0f} to {max(clock) * 1e3:.0f}), "
            f"cores {statistics.median(cores) * 1e3:.0f} ms, load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
