"""Compares what ``penstock simulate`` says with what a worker does, at shares of its capacity.

    python benchmarks/simulator.py demo/demo.psm [--seconds 20] [--rounds 5] [--shares 0.3,0.5,0.8] [--threads 1]

``penstock bench --costs`` measures the steps before and after each round; the simulator uses the means, because a
shared machine changes its speed within seconds.  The capacity is the rate of the simulated worker when all requests
come at once.  Requests then arrive at random (Poisson) at each share of it, at a worker of its own and at the
simulator.  The differences are medians over the rounds.  The goals: means per token and to the end within 10 %, the
median of first tokens within 15 %; the exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from penstock import ProgramLimits, SamplingParams
from penstock.cluster.costs import StepCosts, read_costs
from penstock.cluster.replica import ReplicaLimits
from penstock.cluster.simulate import Simulation, simulate
from penstock.cluster.trace import TraceRequest
from penstock.llm.backend import Backend
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerModelOptions

LIMITS = ReplicaLimits(num_pages=1024, max_requests=16)
GOALS = {"first token, p50": 0.15, "per token, mean": 0.1, "whole answer, mean": 0.1}
Times = tuple[float, float, float]
"""The seconds to the first token, per further token and to the end."""


def trace_of(rate: float, num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Return requests that arrive at ``rate`` per second, all at once if it is infinite."""
    draw, now, trace = random.Random(seed), 0.0, []
    for number in range(num_requests):
        now += draw.expovariate(1.0) / rate
        trace.append(TraceRequest(now, [(f"user {number}", draw.randint(16, 160))], draw.randint(16, 112)))
    return trace


def measured_costs(path: Path, threads: int) -> StepCosts:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        command = [sys.executable, "-m", "penstock", "bench", path, "-n", 48, "--batch", "1,4,16", "--costs", file]
        subprocess.run([*map(str, command), "--threads", str(threads)], check=True, stdout=subprocess.DEVNULL)
        return read_costs(file)


async def one(backend: Backend, request: TraceRequest, start: float) -> Times:
    await asyncio.sleep(max(0.0, start + request.time - time.perf_counter()))
    draw, began, first = random.Random(request.time), time.perf_counter(), 0.0
    prompt = [draw.randrange(300, 4000) for _ in range(request.prompt_tokens)]
    params = SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True)
    async with await backend.submit(prompt, params) as answer:
        async for _ in answer:
            first = first or time.perf_counter()
    end = time.perf_counter()
    return first - began, (end - first) / (request.output_tokens - 1), end - began


async def serve(path: Path, threads: int, trace: list[TraceRequest]) -> list[Times]:
    """Return the times of the requests of a trace at a worker."""
    limits = ProgramLimits(context_len=512, max_tokens=512, max_requests=16, num_pages=1024)
    primary = Primary()
    backend = RemoteBackend("bench", primary, WorkerModelOptions(threads=threads, limits=limits))
    await primary.open()
    try:
        await backend.load(str(path))
        start = time.perf_counter() + 0.2
        return await asyncio.gather(*(one(backend, request, start) for request in trace))
    finally:
        await backend.close()
        await primary.close()


def mean_costs(before: StepCosts, after: StepCosts) -> StepCosts:
    """Return the costs half-way between those of two measurements."""
    names = ("prefill_step_s", "prefill_token_s", "prefill_context_s", "decode_context_s", "request_s")
    means = {name: (getattr(before, name) + getattr(after, name)) / 2 for name in names}
    decode = {batch: (seconds + after.decode_step_s[batch]) / 2 for batch, seconds in before.decode_step_s.items()}
    return replace(before, decode_step_s=decode, **means)


def compare(args: argparse.Namespace, share: float) -> list[dict[str, tuple[float, float]]]:
    """Return the measured and the simulated seconds of each round, by figure."""
    rounds = []
    before = measured_costs(args.bundle, args.threads)
    for number in range(args.rounds):
        capacity = 1000 / simulate(trace_of(float("inf"), 1000), Simulation(costs=before, limits=LIMITS)).seconds
        trace = trace_of(share * capacity, max(20, round(share * capacity * args.seconds)), number)
        first, token, end = zip(*asyncio.run(serve(args.bundle, args.threads, trace)), strict=True)
        after = measured_costs(args.bundle, args.threads)
        report = simulate(trace, Simulation(costs=mean_costs(before, after), limits=LIMITS))
        before = after
        rounds.append(
            {
                "first token, p50": (statistics.median(first), report.ttft["p50"]),
                "per token, mean": (statistics.mean(token), report.tpot["mean"]),
                "whole answer, mean": (statistics.mean(end), report.e2e["mean"]),
                "first token, p99": (statistics.quantiles(first, n=100)[98], report.ttft["p99"]),
            }
        )
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", default="0.3,0.5,0.8")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    is_met = True
    for share in map(float, args.shares.split(",")):
        rounds = compare(args, share)
        for name in rounds[0]:
            real, simulated = (statistics.median(values[name][side] for values in rounds) for side in (0, 1))
            ratios = sorted(values[name][1] / values[name][0] - 1 for values in rounds)
            off = statistics.median(ratios)
            is_met &= abs(off) <= GOALS.get(name, float("inf"))
            print(
                f"{share:4.0%}  {name:18} {real * 1e3:9.2f} ms  simulated {simulated * 1e3:9.2f} ms  {off:+7.1%} "
                f"({ratios[0]:+.0%} to {ratios[-1]:+.0%})  load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
