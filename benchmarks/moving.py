"""Measures the pause of an answer whose worker is drained: with its pages copied to the next one, and computed again.

    python benchmarks/moving.py BUNDLE [--lengths 256,512,900] [--turns 5] [--threads 1] [--tls]

One request runs in a worker.  The same weights are loaded again, and the new worker goes on with the answer, in turns
with a copy of its pages and without.  The pause is the longest time between two tokens from the moment the new worker
is ready; "alone" is the longest one in as many tokens without a move.  ``copied`` is the size of the pages that went,
and ``copy`` the time of their transfer, during which the first worker goes on.  With ``--tls`` the workers join over
TLS, as those of another machine do, which needs the package ``cryptography``.  Both workers run on this machine and
share its cores.  The context has to hold the tokens of the time in which a worker loads: the demo's is too short.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

from penstock import ProgramLimits, SamplingParams
from penstock.cluster.placement.certificate import OwnCertificate
from penstock.cluster.placement.local import LocalPlacement
from penstock.serving.workers import failover
from penstock.serving.workers.moving import copy_pages as copying
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.worker_config import ModelOptions

NUM_TOKENS = 100_000
REST_TOKENS = 48


class OverTls(LocalPlacement):
    """Workers of this machine that join as those of another one do."""

    is_local = False


class Copies:
    """Times the transfers of pages; with ``is_on`` False there are none."""

    def __init__(self) -> None:
        self.is_on, self.seconds, self.num_parts = True, 0.0, 0
        self._honest = copying.copy_pages
        failover.copy_pages = self

    async def __call__(self, *arguments: object) -> int:
        start = time.perf_counter()
        self.num_parts = await self._honest(*arguments) if self.is_on else 0
        self.seconds = time.perf_counter() - start
        return self.num_parts


async def pause_of(backend: RemoteBackend, path: str, length: int, moves: bool) -> float:
    """Return the longest time between two tokens of an answer after ``length`` tokens."""
    prompt = [5 + index % 190 for index in range(length)]
    times: list[float] = []

    async def read() -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1, seed=length, ignore_eos=True)
        async with await backend.submit(prompt, params) as answer:
            async for _ in answer:
                times.append(time.perf_counter())

    reading = asyncio.ensure_future(read())
    while len(times) < 2:
        await asyncio.sleep(0.001)
    update = asyncio.ensure_future(backend.load(path)) if moves else None
    version = backend.card.version
    while update is not None and backend.card.version == version and not update.done():
        await asyncio.sleep(0.001)
    first = len(times)
    while len(times) < first + REST_TOKENS and not reading.done():
        await asyncio.sleep(0.001)
    if update is not None:
        await update
    if reading.done():
        raise SystemExit(f"{length} tokens: the answer ended before the move. Use a bundle with a longer context.")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return max(after - before for before, after in zip(times[first - 1 :], times[first:], strict=False))


async def measure(path: Path, lengths: list[int], turns: int, threads: int, over_tls: bool) -> None:
    """Print a row for each length."""
    primary = Primary()
    if over_tls:
        own = OwnCertificate("127.0.0.1")
        tls = RemoteWorkerSettings("127.0.0.1", 0, own.certificate, own.key, os.urandom(32).hex())
        primary = Primary(remote=tls, placement=OverTls())
    copies = Copies()
    await primary.open()
    options = ModelOptions(threads=threads, limits=ProgramLimits(max_requests=4))
    backend = RemoteBackend("bench", primary, options)
    try:
        await backend.load(str(path))
        plan = backend.plans()[0]
        page_bytes = plan.kv_bytes / max(1, plan.num_pages)
        print(f"{'tokens':>8} {'alone ms':>10} {'copied ms':>10} {'computed ms':>12} {'copy ms':>8} {'copied MiB':>11}")
        for length in lengths:
            pauses: dict[str, list[float]] = {"alone": [], "copied": [], "computed": []}
            seconds, parts = [], 0
            for _ in range(turns):
                for name, taken in pauses.items():
                    copies.is_on = name == "copied"
                    taken.append(await pause_of(backend, str(path), length, name != "alone"))
                    if name == "copied":
                        seconds.append(copies.seconds)
                        parts = copies.num_parts
            alone, copied, computed = (1000 * statistics.median(taken) for taken in pauses.values())
            size = parts * page_bytes / 2**20
            print(
                f"{length:8} {alone:10.1f} {copied:10.1f} {computed:12.1f} {1000 * statistics.median(seconds):8.1f}"
                f" {size:11.2f}"
            )
    finally:
        await backend.close()
        await primary.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--lengths", default="256,512,768", help="tokens of the prompts (default: 256,512,768)")
    parser.add_argument("--turns", type=int, default=5, help="moves of each kind (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker (default: 1)")
    parser.add_argument("--tls", action="store_true", help="workers join over TLS (default: a unix socket)")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    asyncio.run(measure(args.bundle, lengths, args.turns, args.threads, args.tls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
