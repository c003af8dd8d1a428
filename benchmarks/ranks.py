"""Measures ranks on this host: exchanges between processes, and tokens/s of ranks and stages against one process.

    python benchmarks/ranks.py [--model demo/demo.psm] [--world 2] [--rounds 5]

Each rank of the exchanges is a process on a core of its own, if there are as many.  Speeds: ``world`` ranks and
``world`` stages of one thread against one process with as many threads, in turns; the best of the rounds counts,
because other work on the machine only makes them slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.core.comm import SharedComm, shared_bytes
from penstock.env import child_environment
from penstock.runtime.program import ProgramLimits

PART_BYTES = 1 << 20
SIZES = (4 << 10, 16 << 10, 64 << 10)
COUNT = 20000


def pin(rank: int, world: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= world:
        os.sched_setaffinity(0, {cores[rank]})


def measure_exchanges(rank: int, world: int, fd: int) -> dict[int, tuple[float, float, float]]:
    """Least, median and 99th percentile in microseconds, by bytes of a part."""
    pin(rank, world)
    comm = SharedComm(rank, world, PART_BYTES, fd=fd)
    figures = {}
    for size in SIZES:
        times = sorted(comm.probe(size, COUNT)[COUNT // 10 :])
        figures[size] = (times[0] / 1000, statistics.median(times) / 1000, times[len(times) * 99 // 100] / 1000)
    return figures


def exchanges(world: int, rounds: int) -> None:
    print(f"exchanges between {world} processes, us (least, median, p99); the best median of {rounds} rounds")
    best: dict[int, tuple[float, float, float]] = {}
    for _ in range(rounds):
        fd = os.memfd_create("penstock-benchmark")
        os.ftruncate(fd, shared_bytes(world, PART_BYTES))
        command = [sys.executable, __file__, "--world", str(world), "--fd", str(fd), "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], pass_fds=(fd,), stdout=subprocess.PIPE, text=True, env=child_environment()
            )
            for rank in range(world)
        ]
        figures = json.loads(ranks[0].communicate()[0])
        for rank in ranks[1:]:
            rank.communicate()
        os.close(fd)
        for size, found in figures.items():
            best[int(size)] = min(best.get(int(size), found), found, key=lambda row: row[1])
    for size, (least, median, p99) in best.items():
        print(f"  {size >> 10:3} KB  {least:7.2f}  {median:7.2f}  {p99:8.2f}")


def speeds(model: Path, world: int, rounds: int) -> None:
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    limits = ProgramLimits(max_tokens=512, max_requests=8, context_len=1024)
    prompts = [[11 + i, 12, 13, 14] for i in range(8)]
    long_prompt = [5 + i % 200 for i in range(512)]

    def decode(llm: LLM, batch: int) -> float:
        results = llm.generate(prompts[:batch], params)
        return sum(result.timings["decode_tokens_per_s"] for result in results)

    def prefill(llm: LLM) -> float:
        start = time.perf_counter()
        llm.generate(long_prompt, SamplingParams(max_tokens=1))
        return len(long_prompt) / (time.perf_counter() - start)

    def open_llm(threads: int = 1, **ranks: int) -> LLM:
        return LLM(model, threads=threads, limits=limits, prefix_cache=False, **ranks)

    with (
        open_llm(world) as one,
        open_llm(tensor_parallel_size=world) as ranks,
        open_llm(pipeline_parallel_size=world) as stages,
    ):
        print(f"tokens/s: {world} threads of one process; {world} ranks of one thread, {world} stages of one thread")
        for name, speed in (
            ("decode, batch 1", lambda llm: decode(llm, 1)),
            ("decode, batch 8", lambda llm: decode(llm, 8)),
            ("prefill of 512", prefill),
        ):
            found = [(speed(one), speed(ranks), speed(stages)) for _ in range(rounds)]
            threads, tensor, pipeline = (max(column) for column in zip(*found, strict=True))
            print(
                f"  {name:<16}  {threads:9.1f}  {tensor:9.1f} ({tensor / threads:4.2f})  {pipeline:9.1f} "
                f"({pipeline / threads:4.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo/demo.psm"))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(measure_exchanges(args.rank, args.world, args.fd)))
        return
    exchanges(args.world, args.rounds)
    speeds(args.model, args.world, args.rounds)


if __name__ == "__main__":
    main()
