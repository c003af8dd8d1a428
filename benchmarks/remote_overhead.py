"""Measures what a worker that joined over TLS costs a request, beside one that joined over a unix socket.

    python benchmarks/remote_overhead.py demo/demo.psm [--requests 300] [--threads 1]

Both workers run on this machine, so no network counts: the difference is the router's and that of TLS over loopback.
Each request asks for one token, alone; the engine in this process is the third row.  The three take turns request by
request.  The goal is a difference under 1 ms, as the median over pairs of requests; the exit status is 1 if it is
missed.  Needs the package ``cryptography``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.cluster.placement.certificate import OwnCertificate
from penstock.cluster.placement.local import LocalPlacement
from penstock.llm.backend import Backend
from penstock.llm.local_backend import LocalBackend
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerModelOptions

ONE = SamplingParams(max_tokens=1, temperature=0)
GOAL_S = 0.001


class OverTls(LocalPlacement):
    """Workers of this machine that join as those of another one do."""

    is_local = False


async def seconds_of(backend: Backend, prompt: list[int]) -> float:
    """Return the time from a request to its only token."""
    start = time.perf_counter()
    async with await backend.submit(prompt, ONE) as answer:
        async for _ in answer:
            pass
    return time.perf_counter() - start


async def measure(path: Path, num_requests: int, threads: int) -> dict[str, list[float]]:
    """Return the seconds of each request, by where it ran."""
    own = OwnCertificate("127.0.0.1")
    tls = RemoteWorkerSettings("127.0.0.1", 0, own.certificate, own.key, os.urandom(32).hex())
    limits = ProgramLimits(context_len=256, max_requests=4)
    primaries = {"local worker": Primary(), "worker over TLS": Primary(remote=tls, placement=OverTls())}
    options, draw = WorkerModelOptions(threads=threads, limits=limits), random.Random(0)
    workers = {name: RemoteBackend("bench", primary, options) for name, primary in primaries.items()}
    in_process = LocalBackend(LLM(path, threads=threads, limits=limits))
    seconds: dict[str, list[float]] = {"in process": [], **{name: [] for name in workers}}
    try:
        for name, primary in primaries.items():
            await primary.open()
            await workers[name].load(str(path))
        for number in range(num_requests + 20):
            prompt = [draw.randrange(300, 4000) for _ in range(16)]
            for name, backend in {"in process": in_process, **workers}.items():
                taken = await seconds_of(backend, prompt)
                if number >= 20:
                    seconds[name].append(taken)
    finally:
        for name, primary in primaries.items():
            await workers[name].close()
            await primary.close()
        await in_process.close()
        own.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    seconds = asyncio.run(measure(args.bundle, args.requests, args.threads))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, values in seconds.items():
        print(f"{name:16} p50 {statistics.median(values) * 1e3:7.3f} ms   best {min(values) * 1e3:7.3f} ms")
    pairs = zip(seconds["worker over TLS"], seconds["local worker"], strict=True)
    added = statistics.median(remote - local for remote, local in pairs)
    print(f"over TLS {added * 1e3:+.3f} ms, the median of pairs; the goal is under {GOAL_S * 1e3:g} ms")
    return int(added >= GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
