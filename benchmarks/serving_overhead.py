"""Measures the cost of the service over the engine: the same requests through both, alternately, when idle.

    python benchmarks/serving_overhead.py MODEL.psm [--threads 1] [--turns 5]

"engine" is ``LLM.generate`` of the whole batch; "async" is one ``AsyncLLM`` stream per request.  "streamed" and "whole"
are ``penstock serve`` with a client beside it (``serving_client.py``), whose work counts for the service.  "paused" is
streamed to a client that looks once per millisecond, so that it uses less.  A turn runs all of them, every second turn
in reverse order.  The loss is the median over turns of the ratio within a turn.  First tokens are of one request at a
time, on an open connection.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving import messages_of
from serving_client import Connection, Server, hang_up, pausing_loop, play
from serving_figures import figures, outcome_of
from traces import Request

from penstock.engine.params import SamplingParams
from penstock.llm.async_llm import AsyncLLM
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits, pages_for

FIRST_PROMPT, FIRST_NEW = 16, 4


def requests_of(seed: int, count: int, num_prompt: int, num_new: int) -> list[Request]:
    """Return requests with different prompts, all due at once."""
    stream = random.Random(seed)
    return [Request(0.0, [stream.randrange(300, 4000) for _ in range(num_prompt)], num_new) for _ in range(count)]


@contextmanager
def service(bundle: Path, threads: int, limits: ProgramLimits, *more: str) -> Iterator[Server]:
    """Run ``penstock serve`` on a free port, with ``more`` options."""
    command = [sys.executable, "-m", "penstock", "serve", f"bench={bundle}", "--port", "0", "--log", "warning"]
    command += ["--threads", threads, "--max-requests", limits.max_requests, "--context-len", limits.context_len]
    command += ["--weights", "mmap", *more]
    process = subprocess.Popen([str(one) for one in command], stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
        if found is None:
            raise SystemExit("the service did not start")
        yield Server(found[0] + "/v1")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def sampling(num_new: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)


class Ways:
    """Measures the seconds of a batch in each way."""

    def __init__(self, llm: LLM, other: LLM, server: Server) -> None:
        self.llm, self.server = llm, server
        self.kept: list[Connection] = []
        self.runner = asyncio.Runner()
        self.streams = self.runner.run(self._open(other))

    @staticmethod
    async def _open(llm: LLM) -> AsyncLLM:
        return AsyncLLM(llm)

    def engine(self, requests: list[Request]) -> float:
        start = time.perf_counter()
        self.llm.generate([one.prompt for one in requests], sampling(requests[0].num_new))
        return time.perf_counter() - start

    def asynchronous(self, requests: list[Request]) -> float:
        async def read(one: Request) -> None:
            async for _ in await self.streams.stream(one.prompt, sampling(one.num_new)):
                pass

        async def all_of_them() -> float:
            start = time.perf_counter()
            await asyncio.gather(*(read(one) for one in requests))
            return time.perf_counter() - start

        return self.runner.run(all_of_them())

    def streamed(self, requests: list[Request], runner: asyncio.Runner | None = None, whole: bool = False) -> float:
        messages = messages_of(self.server, requests, {}, whole)
        start_s, answers = (runner or self.runner).run(play(self.server, messages, [0.0] * len(messages)))
        found = figures([outcome_of(answer, start_s) for answer in answers])
        if found["tokens"] != sum(one.num_new for one in requests):
            raise SystemExit(f"the service made {found['tokens']} tokens; not done: {found['not_done']}")
        return float(found["seconds"])

    def paused(self, requests: list[Request]) -> float:
        with asyncio.Runner(loop_factory=pausing_loop) as runner:
            return self.streamed(requests, runner)

    def whole(self, requests: list[Request]) -> float:
        return self.streamed(requests, whole=True)

    def first_engine(self, one: Request) -> float:
        """Return the seconds to the first text."""
        start = time.perf_counter()
        for delta in self.llm.stream(one.prompt, sampling(one.num_new)):
            if delta.text:
                return time.perf_counter() - start
        raise SystemExit("an answer has no text")

    def first_streamed(self, one: Request) -> float:
        """Return the same through the service, on a connection that stays open."""
        messages = messages_of(self.server, [one], {}, False)
        start_s, answers = self.runner.run(play(self.server, messages, [0.0], kept=self.kept))
        outcome = outcome_of(answers[0], start_s)
        if not outcome.pieces_s:
            raise SystemExit(f"an answer has no text: {outcome.kind}")
        return outcome.pieces_s[0] - outcome.sent_s

    def close(self) -> None:
        hang_up(self.kept)
        self.runner.run(self.streams.close())
        self.runner.close()


def lost_of(base: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the loss of throughput in per cent, as the median over turns; negative for a gain."""
    return 100 * (1 - statistics.median(a / b for a, b in zip(base, seconds, strict=True)))


def report(args: argparse.Namespace, taken: dict[str, list[float]], firsts: list[tuple[float, float]]) -> None:
    tokens = args.batch * args.new_tokens
    print(
        f"{args.batch} x ({args.prompt_tokens} + {args.new_tokens}) tokens, {args.threads or 'all'} threads, "
        f"{args.turns} turns"
    )
    for name, seconds in taken.items():
        lost = [
            f"{lost_of(taken[base], seconds):6.1f} % of {base}"
            for base in ("engine", "async")
            if base in taken and base != name
        ]
        listed = " ".join(f"{one:.2f}" for one in seconds)
        print(f"{name:9} {tokens / statistics.median(seconds):7.0f} tokens/s  lost:{','.join(lost)}   ({listed} s)")
    inside, outside = (1e3 * statistics.median(values) for values in zip(*firsts, strict=True))
    added = 1e3 * statistics.median(b - a for a, b in firsts)
    print(f"first text: {inside:.2f} ms in process, {outside:.2f} served, {added:.2f} added, {len(firsts)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="threads of each engine; 0 (default): all cores")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--ways", default="async,streamed,paused,whole", help="ways to measure besides the engine (default: all)"
    )
    parser.add_argument("--firsts", type=int, default=30, help="number of pairs of first tokens (default: 30)")
    args = parser.parse_args()
    context = args.prompt_tokens + args.new_tokens + 32
    limits = ProgramLimits(
        max_requests=args.batch, max_tokens=max(512, args.batch), context_len=context,
        num_pages=args.batch * pages_for(context),
    )  # fmt: skip
    with (
        service(args.bundle, args.threads, limits) as server,
        LLM(args.bundle, threads=args.threads, limits=limits) as llm,
    ):
        ways = Ways(llm, LLM(args.bundle, threads=args.threads, limits=limits), server)
        every = {
            "engine": ways.engine,
            "async": ways.asynchronous,
            "streamed": ways.streamed,
            "paused": ways.paused,
            "whole": ways.whole,
        }
        calls = {name: every[name] for name in dict.fromkeys(["engine", *args.ways.split(",")])}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call(requests_of(1, args.batch, args.prompt_tokens, 8))
        for turn in range(args.turns):
            for number, name in enumerate([*calls][:: 1 if turn % 2 == 0 else -1]):
                requests = requests_of(1000 + 10 * turn + number, args.batch, args.prompt_tokens, args.new_tokens)
                taken[name].append(calls[name](requests))
        asked = [requests_of(9000 + i, 1, FIRST_PROMPT, FIRST_NEW)[0] for i in range(2 * args.firsts)]
        firsts = [
            (ways.first_engine(one), ways.first_streamed(other))
            for one, other in zip(asked[::2], asked[1::2], strict=True)
        ]
        ways.close()
    report(args, taken, firsts)


if __name__ == "__main__":
    main()
