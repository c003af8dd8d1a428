"""Compares what ``penstock simulate`` says with what a worker does, at shares of its capacity.

    python benchmarks/simulator.py demo/demo.psm [--seconds 60] [--shares 0.3,0.5,0.8] [--threads 1]

``penstock bench --costs`` measures the steps first.  The capacity is the rate of the simulated worker when all requests
come at once.  Requests then arrive at random (Poisson) at each share of it, at a worker of its own and at the
simulator.  The goals: means per token and to the end within 10 %, the median of first tokens within 15 %; the exit
status is 1 if one is missed.  Only an otherwise idle machine gives figures that mean anything.
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
from pathlib import Path

from penstock import ProgramLimits, SamplingParams
from penstock.cluster.costs import StepCosts, read_costs
from penstock.cluster.replica import ReplicaLimits
from penstock.cluster.simulate import Simulation, simulate
from penstock.cluster.trace import TraceRequest
from penstock.llm.backend import Backend
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import ModelOptions

LIMITS = ReplicaLimits(num_pages=1024, max_requests=16)
GOALS = {"first token, p50": 0.15, "per token, mean": 0.1, "whole answer, mean": 0.1}
Times = tuple[float, float, float]
"""The seconds to the first token, per further token and to the end."""


def trace_of(rate: float, num_requests: int) -> list[TraceRequest]:
    """Return requests that arrive at ``rate`` per second, all at once if it is infinite."""
    draw, now, trace = random.Random(1), 0.0, []
    for number in range(num_requests):
        now += draw.expovariate(1.0) / rate
        trace.append(TraceRequest(now, [(f"user {number}", draw.randint(16, 160))], draw.randint(16, 112)))
    return trace


def measured_costs(path: Path, threads: int) -> StepCosts:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        command = [sys.executable, "-m", "penstock", "bench", path, "--batch", "1,4,16", "--costs", file]
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
    backend = RemoteBackend("bench", primary, ModelOptions(threads=threads, limits=limits))
    await primary.open()
    try:
        await backend.load(str(path))
        start = time.perf_counter() + 0.2
        return await asyncio.gather(*(one(backend, request, start) for request in trace))
    finally:
        await backend.close()
        await primary.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shares", default="0.3,0.5,0.8")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    simulation = Simulation(costs=measured_costs(args.bundle, args.threads), limits=LIMITS)
    capacity = 1000 / simulate(trace_of(float("inf"), 1000), simulation).seconds
    print(
        f"capacity: {capacity:.1f} requests/s; load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    is_met = True
    for share in map(float, args.shares.split(",")):
        trace = trace_of(share * capacity, max(20, round(share * capacity * args.seconds)))
        first, token, end = zip(*asyncio.run(serve(args.bundle, args.threads, trace)), strict=True)
        report = simulate(trace, simulation)
        values = (
            (statistics.median(first), report.ttft["p50"]),
            (statistics.mean(token), report.tpot["mean"]),
            (statistics.mean(end), report.e2e["mean"]),
        )
        for (name, goal), (real, simulated) in zip(GOALS.items(), values, strict=True):
            off = simulated / real - 1
            is_met &= abs(off) <= goal
            print(f"{share:4.0%}  {name:18} {real * 1e3:9.2f} ms  simulated {simulated * 1e3:9.2f} ms  {off:+7.1%}")
        p99 = statistics.quantiles(first, n=100)[98]
        print(
            f"{share:4.0%}  {'first token, p99':18} {p99 * 1e3:9.2f} ms  simulated {report.ttft['p99'] * 1e3:9.2f} ms"
        )
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
