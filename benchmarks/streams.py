"""Measures what open streams cost the primary of a service: 2,000 streams of 20 tokens/s each on one core.

    python benchmarks/streams.py [BUNDLE] [--streams 2000] [--rate 20] [--seconds 20]

The primary runs on one core (``paced_worker.py``), and all other processes on the others.  Its workers compute nothing
and send a token at each stream's rate, so that neither they nor a network is the limit.  The clients, in processes of
their own, hold a stream of OpenAI's completions each and check that every token arrives once and in order.  A token's
text has the time at which the worker made it: the delay is from there to the read of its client, and includes the
worker's message, which holds a token of each of its streams.

Streams open at 400 per second.  What is measured begins two seconds after the last one and takes ``--seconds``.  The
processor time is that of the primary only, without its children.  "Memory" is the growth of its resident memory from
before the first stream.  The exit status is 1 if a stream failed or a token is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import psutil
from serving_client import Answer, Server, body_of, events_of, play
from serving_process import penstock_serve

OPEN_RATE, SETTLE_S = 400.0, 2.0
MAX_TOKENS = 960
"""The context of the demo, less the prompt."""


@dataclass
class Seen:
    """The tokens that the clients of a process received in the time that is measured."""

    num_held: int = 0
    num_tokens: int = 0
    delays_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def tokens_of(answer: Answer) -> list[tuple[int, float, float]]:
    """Return each token of an answer: its number, when it was made and when it arrived.  ValueError for a refusal."""
    status, body = body_of(answer.reads)
    if status != 200:
        raise ValueError(f"status {status}")
    found = []
    for at_s, data in events_of(body):
        choices = [] if data == b"[DONE]" else json.loads(data)["choices"]
        for token in choices[0]["text"].split() if choices else ():
            number, made_us = token.split(":")
            found.append((int(number), int(made_us) / 1e6, at_s))
    return found


def seen_by(answers: Iterable[Answer], num_tokens: int, begin_s: float, end_s: float) -> Seen:
    """Return what came between two times, and what is wrong with the answers."""
    seen = Seen()
    for answer in answers:
        if not answer.ended_s:
            seen.errors[answer.lost or "not complete"] += 1
        try:
            tokens = tokens_of(answer)
        except (ValueError, KeyError) as error:
            seen.errors[str(error) or type(error).__name__] += 1
            continue
        if [number for number, _, _ in tokens] != [*range(num_tokens)]:
            seen.errors[f"expected tokens 0 to {num_tokens - 1} in order, got {len(tokens)}"] += 1
        if tokens and tokens[0][2] <= begin_s and tokens[-1][2] >= end_s:
            seen.num_held += 1
        delays = [at_s - made_s for _, made_s, at_s in tokens if begin_s <= at_s < end_s]
        seen.num_tokens += len(delays)
        seen.delays_s += delays
    return seen


def hold_streams(url: str, due: list[float], num_tokens: int, core: int, pipe: Pipe) -> None:
    """Hold a stream from each due time on, and send what was seen; the process of a client."""
    os.sched_setaffinity(0, other_cores(core))
    server = Server(url + "/v1")
    body = {"model": "bench", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    messages = [server.message("/completions", body | {"prompt": [5, 6, 7, 8]}) for _ in due]
    start_s, begin_s, end_s = pipe.recv()
    gc.disable()
    ahead_s = start_s - time.perf_counter()
    _, answers = asyncio.run(play(server, messages, [ahead_s + one for one in due]))
    pipe.send(seen_by(answers, num_tokens, begin_s, end_s))


def other_cores(core: int) -> set[int]:
    """Return the cores that the primary leaves."""
    return os.sched_getaffinity(0) - {core} or {core}


def wait_until(at_s: float) -> None:
    """Sleep until a time of ``time.perf_counter``."""
    time.sleep(max(0.0, at_s - time.perf_counter()))


def measure(args: argparse.Namespace) -> bool:
    """Print the figures; return True if every token arrived."""
    num_tokens = int(args.rate * (args.streams / OPEN_RATE + 2 * SETTLE_S + args.seconds))
    if num_tokens > MAX_TOKENS:
        raise SystemExit(f"--seconds: a stream would have {num_tokens} tokens, more than {MAX_TOKENS}")
    program = [str(Path(__file__).with_name("paced_worker.py")), "primary", f"{args.rate:g}", str(args.core)]
    room = ["--max-requests", 4, "--max-waiting", args.streams, "--max-open", 2 * args.streams]
    few = ["--workers", args.workers, "--threads", 1, "--context-len", 1024, "--weights", "mmap"]
    spawn = multiprocessing.get_context("spawn")
    with penstock_serve(f"bench={args.bundle}", *room, *few, program=program) as service:
        primary = psutil.Process(service.process.pid)
        due = [number / OPEN_RATE for number in range(args.streams)]
        pipes, clients = [], []
        for number in range(args.clients):
            here, there = spawn.Pipe()
            mine = (service.url, due[number :: args.clients], num_tokens, args.core, there)
            clients.append(spawn.Process(target=hold_streams, args=mine, daemon=True))
            clients[-1].start()
            pipes.append(here)
        time.sleep(SETTLE_S)  # their imports
        before_bytes = primary.memory_info().rss
        start_s = time.perf_counter() + 0.5
        begin_s = start_s + due[-1] + SETTLE_S
        for pipe in pipes:
            pipe.send((start_s, begin_s, begin_s + args.seconds))
        wait_until(begin_s)
        cpu_s, at_s = sum(primary.cpu_times()[:2]), time.perf_counter()
        wait_until(begin_s + args.seconds)
        cpu_s, took_s = sum(primary.cpu_times()[:2]) - cpu_s, time.perf_counter() - at_s
        grown = primary.memory_info().rss - before_bytes
        seen = [pipe.recv() for pipe in pipes]
        for client in clients:
            client.join()
    return report(args, seen, cpu_s / took_s, grown)


def report(args: argparse.Namespace, seen: list[Seen], share: float, grown: int) -> bool:
    """Print the figures; ``share``: processor time of the primary per second, ``grown``: its new resident bytes."""
    held, num_tokens = sum(one.num_held for one in seen), sum(one.num_tokens for one in seen)
    errors = sum((one.errors for one in seen), Counter[str]())
    delays = np.concatenate([np.array(one.delays_s) for one in seen])
    rate = num_tokens / args.seconds
    print(f"streams held all the time  {held:,} of {args.streams:,}, over {args.workers} workers")
    print(f"tokens delivered           {rate:,.0f}/s of {args.streams * args.rate:,.0f}/s")
    print(f"processor time             {1e6 * share / max(rate, 1e-9):.1f} us a token, {share:.1%} of one core")
    if len(delays):
        p50, p99 = np.percentile(1e3 * delays, (50, 99))
        print(f"delay, worker to client    p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {1e3 * delays.max():.1f} ms")
    print(f"memory                     {grown / args.streams / 1024:.1f} KiB a stream")
    print(f"errors                     {sum(errors.values())} {dict(errors) or ''}")
    return not errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("demo/demo.psm"), help="default: demo/demo.psm")
    parser.add_argument("--streams", type=int, default=2000, help="default: 2000")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second of each stream (default: 20)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time that is measured (default: 20)")
    parser.add_argument("--workers", type=int, default=8, help="workers that share the streams (default: 8)")
    parser.add_argument("--clients", type=int, default=4, help="processes of clients (default: 4)")
    parser.add_argument("--core", type=int, default=0, help="the core of the primary (default: 0)")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return int(not measure(args))


if __name__ == "__main__":
    sys.exit(main())
