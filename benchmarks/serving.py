"""What the service costs beside the engine in process, and how it serves requests that arrive over time.

    python benchmarks/serving.py MODEL.psm                     overhead: pairs in turn, medians
    python benchmarks/serving.py MODEL.psm --rates 1 2 4       arrivals by an open loop, percentiles
    python benchmarks/serving.py --url http://host:port/v1 --model NAME --rates 2   any OpenAI-compatible server

The client is as cheap as can be: bare sockets, events counted and not parsed.  Latencies count from the moment a
request was due, not from when it could be sent (G. Tene's "coordinated omission").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from penstock import LLM

Pairs = list[tuple[float, float]]
VOCAB = 250  # low ids, which every vocabulary has


@dataclass
class Target:
    """A server and what to ask of it."""

    url: str
    model: str
    timeout_s: float = 600.0

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def request(self, prompt: list[int], max_tokens: int) -> bytes:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        path = urlsplit(self.url).path.rstrip("/") + "/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: {self.address[0]}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Outcome:
    """One request; times of ``perf_counter``."""

    due: float
    pieces: list[float] = field(default_factory=list)
    status: int = 0
    ended: float = 0.0
    is_done: bool = False


class Connection:
    """A kept connection, which asks one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, target: Target) -> Connection:
        return cls(*await asyncio.open_connection(*target.address))

    async def ask(self, data: bytes, due: float) -> Outcome:
        """Send one request and note when its pieces come."""
        found = Outcome(due)
        self._writer.write(data)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        found.status = int(head.split(b" ", 2)[1])
        if b"chunked" not in head:
            length = re.search(rb"content-length: (\d+)", head)
            await self._reader.readexactly(int(length[1]) if length else 0)
        else:
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                piece = await self._reader.read(1 << 16)
                if not piece:
                    break
                if b'"choices"' in piece:
                    found.pieces.append(time.perf_counter())
                tail = (tail + piece)[-64:]
            found.is_done = b"[DONE]" in tail
        found.ended = time.perf_counter()
        return found

    def close(self) -> None:
        self._writer.close()


async def ask(target: Target, data: bytes, due: float) -> Outcome:
    """One request over a connection of its own."""
    connection = await Connection.open(target)
    try:
        return await connection.ask(data, due)
    finally:
        connection.close()


class Service:
    """``penstock serve`` as a process of its own."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            f"bench={model}",
            "--port",
            "0",
            "--log",
            "warning",
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        while True:
            line = self.process.stdout.readline()  # type: ignore[union-attr]
            lines.append(line)
            found = re.search(r"https?://[\w.:\[\]]+", line)
            if found:
                break
            if not line:
                raise RuntimeError("".join(lines))
        self.target = Target(found[0] + "/v1", "bench")

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, VOCAB, (count, length)).tolist()


async def together(target: Target, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds for all of them at once."""
    requests = [target.request(prompt, max_tokens) for prompt in prompts]
    start = time.perf_counter()
    outcomes = await asyncio.gather(*(ask(target, data, start) for data in requests))
    if not all(one.is_done and one.status == 200 for one in outcomes):
        raise RuntimeError(f"statuses {[one.status for one in outcomes]}")
    return max(one.ended for one in outcomes) - start


def overhead(args: argparse.Namespace) -> None:
    """The same requests in process and through the service, in turn."""
    from penstock import LLM
    from penstock.runtime.program import ProgramLimits

    batch, context = args.batch, args.prompt_tokens + args.new_tokens + 32
    pages = batch * (context // 32 + 2)
    limits = ProgramLimits(max_requests=batch, max_tokens=max(512, batch), context_len=context, num_pages=pages)
    options = ["--max-requests", batch, "--context-len", context, "--threads", args.threads]
    service = Service(args.bundle, *map(str, options))
    try:
        with LLM(args.bundle, limits=limits, threads=args.threads) as llm:
            pairs, firsts = asyncio.run(_in_turn(llm, service.target, args))
    finally:
        service.close()
    inside, outside = zip(*pairs[1:], strict=True)  # the first warms up
    lost = 1 - 1 / statistics.median(b / a for a, b in pairs[1:])
    tokens = batch * args.new_tokens
    threads = args.threads or "all"
    print(f"{batch} x {args.prompt_tokens} + {args.new_tokens} tokens, {threads} threads, {len(inside)} pairs")
    print(f"in process  {tokens / statistics.median(inside):8.1f} tokens/s (median)   {_listed(inside)} s")
    print(f"served      {tokens / statistics.median(outside):8.1f} tokens/s (median)   {_listed(outside)} s")
    print(f"overhead    {100 * lost:8.1f} % of throughput (median of pairs)")
    first = [1e3 * statistics.median(values) for values in zip(*firsts[4:], strict=True)]
    added = 1e3 * statistics.median(b - a for a, b in firsts[4:])
    print(f"first token {first[0]:.2f} ms in process, {first[1]:.2f} served, {added:.2f} added (median of pairs)")


async def _in_turn(llm: LLM, target: Target, args: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Seconds in process and served: of whole batches, and to the first token of one request on a kept connection."""
    from penstock import SamplingParams

    pairs, firsts = [], []
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    connection = await Connection.open(target)
    for turn in range(args.turns + 1):
        prompts = prompts_of(args.batch, args.prompt_tokens, turn)
        start = time.perf_counter()
        llm.generate(prompts, params)
        inside = time.perf_counter() - start
        pairs.append((inside, await together(target, prompts, args.new_tokens)))
        for prompt in prompts_of(4, 16, 1000 + turn):
            data = target.request(prompt, 1)
            start = time.perf_counter()
            next(llm.stream(prompt, one))
            inside = time.perf_counter() - start
            start = time.perf_counter()
            found = await connection.ask(data, start)
            firsts.append((inside, found.pieces[0] - start))
    connection.close()
    return pairs, firsts


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


async def arrivals(target: Target, rate: float, args: argparse.Namespace) -> list[Outcome]:
    """Poisson arrivals at a rate; nobody waits for anybody."""
    random = np.random.default_rng(int(rate * 1000))
    gaps = random.exponential(1 / rate, args.requests)
    prompts = prompts_of(args.requests, args.prompt_tokens, 7)
    start, due, tasks = time.perf_counter(), 0.0, []
    for prompt, gap in zip(prompts, gaps, strict=True):
        due += gap
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(target, target.request(prompt, args.new_tokens), start + due)))
    return await asyncio.gather(*tasks)


def load(target: Target, args: argparse.Namespace) -> None:
    """Print percentiles at each rate."""
    print("rate/s   done refused | first token ms p50 p90 p99 | between ms p50 p99 | whole s p50 p99 | tokens/s")
    for rate in args.rates:
        outcomes = asyncio.run(arrivals(target, rate, args))
        done = [one for one in outcomes if one.is_done]
        first = [1e3 * (one.pieces[0] - one.due) for one in done if one.pieces]
        between = [1e3 * (b - a) for one in done for a, b in zip(one.pieces, one.pieces[1:], strict=False)]
        whole = [one.ended - one.due for one in done]
        span = max(one.ended for one in outcomes) - min(one.due for one in outcomes)
        f, b, w = (np.percentile(values or [0], (50, 90, 99)) for values in (first, between, whole))
        print(
            f"{rate:6.2f} {len(done):6d} {len(outcomes) - len(done):7d} | {f[0]:14.0f} {f[1]:5.0f} {f[2]:5.0f} | "
            f"{b[0]:10.1f} {b[2]:7.1f} | {w[0]:7.2f} {w[2]:7.2f} | {len(done) * args.new_tokens / span:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--url", help="a server that runs, with /v1")
    parser.add_argument("--model", default="bench")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.url:
        load(Target(args.url, args.model), args)
    elif args.rates:
        service = Service(args.bundle, "--max-requests", str(args.batch), "--threads", str(args.threads))
        try:
            load(service.target, args)
        finally:
            service.close()
    else:
        overhead(args)


if __name__ == "__main__":
    main()
