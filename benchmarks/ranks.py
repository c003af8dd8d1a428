"""Measures ranks on this host: exchanges between processes, and tokens/s of ranks and stages against one process.

    python benchmarks/ranks.py [--model demo/demo.psm] [--world 2] [--rounds 5] [--context 4096]
    python benchmarks/ranks.py --model FOLDER --scheme w8a8 --svg docs/assets/ranks.svg

Each rank of the exchanges is a process on a core of its own, if there are as many.  Speeds: ``world`` ranks of one
thread (tensor, pipeline and context parallel) against one process with as many threads, in turns; the best of the
rounds counts, because other work on the machine only makes them slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.bench.charts.svg import Box, Canvas, Scale, fitted, number
from penstock.bench.rank_layout import model_graph, predict
from penstock.core.comm import SharedComm, shared_bytes
from penstock.core.rank_layout import RankLayout
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


def speeds(model: Path, scheme: str | None, world: int, rounds: int, context: int) -> dict[str, dict[str, float]]:
    """Return tokens/s by the kind of work and the layout; ``context``: tokens before those of one more row, or 0."""
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    limits = ProgramLimits(max_tokens=512, max_requests=8, context_len=max(1024, context + 256))
    prompts = [[11 + i, 12, 13, 14] for i in range(8)]

    def decode(llm: LLM, batch: int) -> float:
        results = llm.generate(prompts[:batch], params)
        return sum(result.timings["decode_tokens_per_s"] for result in results)

    def prefill(llm: LLM, num_tokens: int) -> float:
        start = time.perf_counter()
        llm.generate(long_prompt(num_tokens), SamplingParams(max_tokens=1))
        return num_tokens / (time.perf_counter() - start)

    def decode_behind(llm: LLM, num_tokens: int) -> float:
        return llm.generate(long_prompt(num_tokens), params).timings["decode_tokens_per_s"]

    work: dict[str, Callable[[LLM], float]] = {
        "decode, batch 1": lambda llm: decode(llm, 1),
        "decode, batch 8": lambda llm: decode(llm, 8),
        "prefill of 512": lambda llm: prefill(llm, 512),
    }
    if context:
        work[f"prefill of {context}"] = lambda llm: prefill(llm, context)
        work[f"decode behind {context}"] = lambda llm: decode_behind(llm, context)
    layouts = {
        "one process": {"threads": world},
        f"tp {world}": {"tensor_parallel_size": world},
        f"pp {world}": {"pipeline_parallel_size": world},
        f"cp {world}": {"context_parallel_size": world},
    }
    print(f"tokens/s: one process of {world} threads; {world} ranks of one thread; the best of {rounds} rounds")
    print(f"  {'':<20}" + "".join(f"{name:>18}" for name in layouts))
    figures: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        open_llms = {
            name: stack.enter_context(
                LLM(model, scheme, limits=limits, prefix_cache=False, **{"threads": 1, **options})
            )
            for name, options in layouts.items()
        }
        for title, speed in work.items():
            rows = [{name: speed(llm) for name, llm in open_llms.items()} for _ in range(rounds)]
            best = figures[title] = {name: max(row[name] for row in rows) for name in layouts}
            one = best["one process"]
            print(f"  {title:<20}" + "".join(f"{rate:11.1f} ({rate / one:4.2f})" for rate in best.values()), flush=True)
    return figures


def long_prompt(num_tokens: int) -> list[int]:
    return [5 + i % 200 for i in range(num_tokens)]


def predictions(folder: Path, scheme: str, world: int) -> dict[str, float]:
    """Return what ``penstock plan`` predicts, in milliseconds a token of one request."""
    layouts = (RankLayout(), RankLayout(world), RankLayout(1, world), RankLayout(1, 1, world))
    rows = predict(model_graph(folder, scheme), layouts)
    return {str(row.layout): row.token_ms for row in rows}


def draw(predicted: Mapping[str, float], measured: Mapping[str, float], about: str) -> str:
    """Return a picture: for each layout the predicted and the measured milliseconds of a token."""
    height = 96 + 44 * len(measured) + 52
    canvas = Canvas(760, height)
    canvas.text(24, 26, "Milliseconds a token: predicted and measured", size=16, bold=True)
    canvas.text(24, 46, fitted(about, 12, 712), "faint", size=12)
    x = 24.0
    for color, name in (("c0", "penstock plan"), ("c1", "measured")):
        canvas.bar(Box(x, 62, x + 12, 74), color)
        x = canvas.text(x + 18, 73, name, size=12).right + 18
    scale = Scale(0.0, max(*predicted.values(), *measured.values()) * 1.05, 120, 736)
    bottom = height - 44.0
    for tick in scale.ticks():
        canvas.line([(scale(tick), 88), (scale(tick), bottom)], "grid")
        canvas.text(scale(tick), bottom + 16, number(tick), "faint", size=11, anchor="middle")
    canvas.text(428, bottom + 34, "ms/token, one request", "faint", size=12, anchor="middle")
    for row, name in enumerate(measured):
        y = 96.0 + 44 * row
        canvas.text(112, y + 18, name, size=12, anchor="end")
        for place, (color, values) in enumerate((("c0", predicted), ("c1", measured))):
            if name in values:
                top = y + 15 * place
                canvas.bar(Box(scale(0), top, scale(values[name]), top + 13), color, f"{values[name]:.2f} ms")
    return canvas.svg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo/demo.psm"), help="a bundle or a checkpoint folder")
    parser.add_argument("--scheme", help="of a checkpoint folder (default: its own)")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=0, help="measure a prompt of so many tokens too (default: none)")
    parser.add_argument("--svg", type=Path, help="draw predicted and measured times; the model is a checkpoint folder")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(measure_exchanges(args.rank, args.world, args.fd)))
        return
    exchanges(args.world, args.rounds)
    if args.svg is None:
        speeds(args.model, args.scheme, args.world, args.rounds, args.context)
        return
    before = predictions(args.model, args.scheme, args.world)
    rates = speeds(args.model, args.scheme, args.world, args.rounds, args.context)["decode, batch 1"]
    after = predictions(args.model, args.scheme, args.world)
    predicted = {name: (before[name] + after[name]) / 2 for name in before}  # memory changes its speed
    measured = {name: 1e3 / rate for name, rate in rates.items()}
    for name, ms in measured.items():
        print(f"  {name:<12}  predicted {predicted.get(name, math.nan):7.2f}  measured {ms:7.2f} ms/token")
    about = f"{args.model.name}, {args.scheme}; {args.world} cores; one process of {args.world} threads, ranks of one"
    args.svg.write_text(draw(predicted, measured, about), "utf-8")


if __name__ == "__main__":
    main()
