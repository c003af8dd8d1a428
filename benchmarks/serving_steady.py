"""Measures the cost of a stream in steady state: steps of a full batch in the service and in the engine in process.

    python benchmarks/serving_steady.py MODEL.psm [--threads 1] [--seconds 60]

Both run a batch of long answers at the same time, in turns of 0.3 s: a signal stops the one that has no turn.  The
figure of a turn is the mean time between its steps.  The loss is the median over pairs of neighbouring turns, so that a
change of the machine's speed affects both.  Starts and ends of answers are not included (``serving_overhead.py`` has
them); the client is, and counts for the service.  The last line is processor time per step.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from serving import messages_of
from serving_client import Answer, Connection, Server, hang_up
from serving_overhead import requests_of, sampling, service
from traces import Request

from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits, pages_for

PROMPT_TOKENS = 16
TURN_S = 0.3
SETTLE_S = 0.08
"""Of a turn, for what was stopped to find its way back into the caches."""
BEGIN_S = 3.0
"""For prompts."""


def limits_of(batch: int, num_new: int) -> ProgramLimits:
    context = PROMPT_TOKENS + num_new + 32
    return ProgramLimits(
        max_requests=batch, max_tokens=max(512, batch), context_len=context, num_pages=batch * pages_for(context)
    )


def run_engine(bundle: Path, threads: int, requests: list[Request], pipe: Pipe) -> None:
    """Answer the batch in a separate process, and report on request when each step ended."""
    ended: list[float] = []
    with LLM(bundle, threads=threads, limits=limits_of(len(requests), requests[0].num_new)) as llm:
        llm.engine.observer = lambda _: ended.append(time.perf_counter())
        prompts = [one.prompt for one in requests]
        threading.Thread(target=llm.generate, args=(prompts, sampling(requests[0].num_new)), daemon=True).start()
        pipe.send(None)
        pipe.recv()
        pipe.send(ended)
        os._exit(0)  # in the middle of its answers


def processes_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes_of(int(child))
    return found


def is_served(pid: int) -> bool:
    """Return True for a process of ``penstock serve``."""
    return b"\0penstock" in Path(f"/proc/{pid}/cmdline").read_bytes()


def busy_s(pids: Sequence[int]) -> list[float]:
    """Return the processor time of each process in seconds."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return [sum(map(int, pair)) / os.sysconf("SC_CLK_TCK") for pair in ticks]


class Streams:
    """A client of the whole batch in a separate thread, which records when each part of one answer arrived."""

    def __init__(self, server: Server, requests: list[Request]) -> None:
        self.answers = [Answer(0.0) for _ in requests]
        self._loop = asyncio.new_event_loop()
        self._connections: list[Connection] = []
        messages = messages_of(server, requests, {}, False)
        reading = self._read(server, messages)
        threading.Thread(target=self._loop.run_until_complete, args=(reading,), daemon=True).start()

    async def _read(self, server: Server, messages: list[bytes]) -> None:
        async def one(message: bytes, answer: Answer) -> None:
            _, connection = await self._loop.create_connection(lambda: Connection([]), *server.address)
            self._connections.append(connection)
            await connection.ask(message, answer)

        await asyncio.gather(*(one(*pair) for pair in zip(messages, self.answers, strict=True)))

    @property
    def ended(self) -> list[float]:
        return [at_s for at_s, _ in self.answers[-1].reads]

    def close(self) -> None:
        """Close the streams before their end."""
        self._loop.call_soon_threadsafe(hang_up, self._connections)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def take_turns(sides: dict[str, list[int]], seconds: float) -> list[tuple[str, float, float]]:
    """Return the turns as (system, start, end)."""
    turns: list[tuple[str, float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name in [*sides][:: 1 if len(turns) % 4 else -1]:
            send(sides[name], signal.SIGCONT)
            begin = time.perf_counter()
            time.sleep(TURN_S)
            turns.append((name, begin + SETTLE_S, time.perf_counter()))
            send(sides[name], signal.SIGSTOP)
    return turns


def report(turns: list[tuple[str, float, float]], ended: dict[str, list[float]], busy: dict[str, list[float]]) -> None:
    found: dict[str, list[float]] = {name: [] for name in ended}
    for name, begin, end in turns:
        steps = [at_s for at_s in ended[name] if begin < at_s < end]
        found[name].append((steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 2 else 0.0)
    pairs = [(a, b) for a, b in zip(found["engine"], found["service"], strict=True) if a and b]
    if len(pairs) < 4:
        raise SystemExit(f"only {len(pairs)} pairs of turns have steps enough")
    lost = sorted(100 * (1 - a / b) for a, b in pairs)
    low, high = lost[len(lost) // 4], lost[3 * len(lost) // 4]
    median = statistics.median(lost)
    print(f"lost: {median:.1f} % of the engine's steps a second (quartiles {low:.1f} to {high:.1f}, {len(lost)} pairs)")
    for name in ended:
        step_s = statistics.median(one for one in found[name] if one)
        num_steps = sum(
            sum(begin - SETTLE_S < at_s < end for at_s in ended[name]) for n, begin, end in turns if n == name
        )
        of_each = ", ".join(f"{1e3 * one / max(1, num_steps):.2f}" for one in busy[name])
        print(f"{name}: {1e3 * step_s:.2f} ms a step; processor time a step of each process: {of_each} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="threads of each engine; 0 (default): all cores")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=900)
    parser.add_argument("--seconds", type=float, default=50.0)
    args = parser.parse_args()
    requests = requests_of(1, args.batch, PROMPT_TOKENS, args.new_tokens)
    here, there = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(args.bundle, args.threads, requests, there), daemon=True
    )
    engine.start()
    here.recv()
    time.sleep(BEGIN_S)
    sides = {"engine": [engine.pid or 0]}
    send(sides["engine"], signal.SIGSTOP)
    with service(args.bundle, args.threads, limits_of(args.batch, args.new_tokens), "--hang-seconds", "3600") as server:
        streams = Streams(server, requests)
        time.sleep(BEGIN_S)
        served = [pid for pid in processes_of(os.getpid()) if is_served(pid)]
        sides["service"] = served
        send(served, signal.SIGSTOP)
        try:
            before = {name: busy_s(pids) for name, pids in sides.items()}
            turns = take_turns(sides, args.seconds)
            after = {name: busy_s(pids) for name, pids in sides.items()}
        finally:
            for pids in sides.values():
                send(pids, signal.SIGCONT)
            streams.close()
        here.send(None)
        ended = {"engine": here.recv(), "service": streams.ended}
        engine.join()
    busy = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in sides}
    report(turns, ended, busy)


if __name__ == "__main__":
    main()
