"""Measures the pause of an answer whose worker is drained: with its pages copied to the next one, and computed again.

    python -m benchmarks.moving [BUNDLE] [--lengths 128,384,640] [--turns 5] [--threads 1] [--tls]

Two workers run a bundle, by default the demo's, and one of them answers a request.  That worker is drained, and the
other one goes on with the answer, in turns with a copy of its pages and without.  The pause is the longest time between
two tokens from the beginning of the drain; "alone" is the longest one in as many tokens before it.  ``copied`` is the
size of the pages that went, and ``copy`` the time of their transfer, during which the first worker goes on.  With
``--tls`` the workers join over TLS, as those of another machine do, which needs the package ``cryptography``.  Both
workers run on this machine and share its cores.  The context has to hold the prompt, and the tokens from the first one
to the end of the measurement: about 200, more if a token takes much less time than a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from penstock import ProgramLimits, SamplingParams
from penstock.cluster.placement.certificate import OwnCertificate
from penstock.cluster.placement.local import LocalPlacement
from penstock.serving.workers import failover
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.moving import copy_pages as copying
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerModelOptions

REST_TOKENS = 48
"""Tokens before the drain, and after the move."""


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


def longest_ms(times: list[float]) -> float:
    """Return the longest time between two tokens in milliseconds."""
    return 1000 * max(after - before for before, after in pairwise(times))


async def pauses_of(
    primary: Primary, options: WorkerModelOptions, path: Path, length: int
) -> tuple[float, float, float]:
    """Return the longest times between tokens before and after a drain in ms, and the size of a page part in bytes.

    The prompt has ``length`` tokens.  Ends the program if the answer did not move.
    """
    backend = RemoteBackend("bench", primary, options, 2)
    times: list[float] = []

    async def read() -> None:
        num_tokens = backend.card.max_len - length
        params = SamplingParams(max_tokens=num_tokens, temperature=1, seed=length, ignore_eos=True)
        async with await backend.submit([5 + index % 190 for index in range(length)], params) as answer:
            async for _ in answer:
                times.append(time.perf_counter())

    async def wait_for_tokens(number: int) -> None:
        while len(times) < number and not reading.done():
            await asyncio.sleep(0.001)
        if reading.done():
            reading.result()
            raise SystemExit(f"{length} tokens: the answer ended too early. Use a bundle with a longer context.")

    try:
        await backend.load(str(path))
        plan = backend.plans()[0]
        reading = asyncio.ensure_future(read())
        await wait_for_tokens(REST_TOKENS + 2)
        (worker,) = [one.name for one in backend.workers() if one.num_open]
        first = len(times)
        await backend.drain_worker(worker)
        await wait_for_tokens(max(len(times), first) + REST_TOKENS)
        if [one.num_open for one in backend.workers()] != [1]:
            raise SystemExit(f"{length} tokens: the answer did not move.")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return longest_ms(times[1:first]), longest_ms(times[first - 1 :]), plan.kv_bytes / max(1, plan.num_pages)
    finally:
        await backend.close()


async def measure(path: Path, lengths: list[int], turns: int, threads: int, over_tls: bool) -> None:
    """Print a row for each length."""
    primary = Primary()
    if over_tls:
        own = OwnCertificate("127.0.0.1")
        tls = RemoteWorkerSettings("127.0.0.1", 0, own.certificate, own.key, os.urandom(32).hex())
        primary = Primary(remote=tls, placement=OverTls())
    copies = Copies()
    await primary.open()
    options = WorkerModelOptions(threads=threads, limits=ProgramLimits(max_requests=4))
    try:
        print(f"{'tokens':>8} {'alone ms':>10} {'copied ms':>10} {'computed ms':>12} {'copy ms':>8} {'copied MiB':>11}")
        for length in lengths:
            alone, seconds, num_bytes = [], [], 0.0
            pauses: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(turns):
                for copies.is_on, taken in pauses.items():
                    before, after, part_bytes = await pauses_of(primary, options, path, length)
                    alone.append(before)
                    taken.append(after)
                    if copies.is_on:
                        seconds.append(1000 * copies.seconds)
                        num_bytes = copies.num_parts * part_bytes
            copied, computed = (statistics.median(taken) for taken in pauses.values())
            print(
                f"{length:8} {statistics.median(alone):10.1f} {copied:10.1f} {computed:12.1f}"
                f" {statistics.median(seconds):8.1f} {num_bytes / 2**20:11.2f}",
                flush=True,
            )
    finally:
        await primary.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("demo/demo.psm"), help="default: demo/demo.psm")
    parser.add_argument("--lengths", default="128,384,640", help="tokens of the prompts (default: 128,384,640)")
    parser.add_argument("--turns", type=int, default=5, help="moves of each kind (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker (default: 1)")
    parser.add_argument("--tls", action="store_true", help="workers join over TLS (default: a unix socket)")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    asyncio.run(measure(args.bundle, lengths, args.turns, args.threads, args.tls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
