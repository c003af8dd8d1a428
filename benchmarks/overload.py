"""Checks a service under more load than it can serve: accepted requests keep their budget, others are refused at once.

    python benchmarks/overload.py MODEL.psm [--times 3] [--seconds 60] [--max-waiting 64] [--grpc]

The script starts ``penstock serve`` and measures its capacity: one client per slot sends its next request at once.
Then it sends ``--times`` that rate in an open loop with Poisson arrivals, and measures the capacity again.  It checks
that

- each request ends with an answer or with 429 and ``Retry-After``;
- the 99th percentile of refusals is under 50 ms;
- the 99th percentile of first tokens is under what the queue implies: as many requests as there are slots and waiting
  ones, at the measured rate, plus a quarter;
- the service completes at least nine tenths of its capacity, which is the lesser of the two measurements;
- the memory of the primary is stable: the maximum of the second half is at most 2 % above that of the first (the memory
  of a worker grows to its plan while pages of keys and values are written for the first time);
- within 5 s after the last request, a request gets its first token as soon as in an idle service (twice the 99th
  percentile).

With ``--grpc`` requests go to the gRPC port.  One in eight is a stream, and its first token is timed; a refusal is
RESOURCE_EXHAUSTED with ``retry-after``.

Times count from when a request was sent.  The output also shows how late the client sent requests, how late its event
loop woke up every 5 ms (this is part of every measured time), and the processor time of each part.  The exit status is
1 unless all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_client import Answer, Connection, Server, hang_up, play
from serving_figures import Outcome, outcome_of
from serving_grpc import Client, message
from serving_load import Machine
from serving_process import Service, penstock_serve

REFUSAL_S, NORMAL_S = 0.05, 5.0


def share(values: Sequence[float], part: float) -> float:
    """Return the quantile of some values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


class Asking:
    """Different requests of one kind, and their outcomes."""

    def __init__(self, server: Server, num_prompt: int, num_new: int) -> None:
        self.server, self.kept = server, list[Connection]()
        self.without_hint = 0
        self._stream, self._sizes = random.Random(1), (num_prompt, num_new)

    def prompt(self) -> list[int]:
        return [self._stream.randrange(300, 4000) for _ in range(self._sizes[0])]

    def message(self, part: float = 1.0) -> bytes:
        """Return a request for a part of the tokens."""
        prompt, num_new = self.prompt(), max(1, int(part * self._sizes[1]))
        body = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True, "stream": True}
        return self.server.message("/completions", body)

    async def play(self, messages: Sequence[bytes], due: Sequence[float]) -> list[Outcome]:
        """Send each request when it is due, in seconds from now."""
        start_s, answers = await play(self.server, messages, due, kept=self.kept)
        self.without_hint += refusals_without_hint(answers)
        return [outcome_of(one, start_s) for one in answers]

    async def one(self, part: float = 1.0) -> Outcome:
        """Run one request as a stream while no other is open."""
        return (await self.play([self.message(part)], [0.0]))[0]

    async def close(self) -> None:
        """Close the connections."""
        hang_up(self.kept)

    async def first_s(self) -> float:
        """Return the seconds to the first token of a single request; infinite without one."""
        found = await self.one()
        return found.pieces_s[0] - found.sent_s if found.pieces_s else float("inf")

    async def rate(self, num_clients: int, seconds: float) -> float:
        """Return the requests per second that are completed for a number of clients; the first fifth is not counted.

        Each client begins with a different part of a request.  Otherwise all would end together, and the result would
        be a whole number of such waves.
        """
        begin = time.perf_counter()
        ends: list[float] = []

        async def client(number: int) -> None:
            part = (number + 1) / num_clients
            while time.perf_counter() < begin + seconds:
                found, part = await self.one(part), 1.0
                if found.kind != "done":
                    raise SystemExit(f"a request below the limit ended as {found.kind}")
                ends.append(time.perf_counter())

        await asyncio.gather(*(client(number) for number in range(num_clients)))
        counted = [one for one in ends if begin + seconds / 5 <= one <= begin + seconds]
        if not counted:
            raise SystemExit(f"no request was done in {seconds:g} s: --measure longer")
        return len(counted) / (0.8 * seconds)


class GrpcAsking(Asking):
    """The same over gRPC."""

    def __init__(self, address: str, num_prompt: int, num_new: int) -> None:
        super().__init__(Server(""), num_prompt, num_new)
        self._address = address
        self._made: Client | None = None

    @property
    def _client(self) -> Client:
        """Create the client in the event loop that uses it."""
        self._made = self._made or Client(self._address)
        return self._made

    def message(self, part: float = 1.0) -> bytes:
        """Return a request for a part of the tokens."""
        return message(self.prompt(), max(1, int(part * self._sizes[1])), temperature=0.0, ignore_eos=True)

    async def play(self, messages: Sequence[bytes], due: Sequence[float]) -> list[Outcome]:
        """Send each request when it is due, in seconds from now."""
        found = await self._client.play(messages, due)
        self.without_hint = self._client.without_hint
        return found

    async def first_s(self) -> float:
        """Return the seconds to the first token of a single stream; infinite without one."""
        (found,) = await self._client.play([self.message()], [0.0], stream_every=1)
        return found.pieces_s[0] - found.sent_s if found.pieces_s else float("inf")

    async def close(self) -> None:
        """Close the connections."""
        if self._made is not None:
            await self._made.close()


async def watch(service: Service, readings: list[float]) -> None:
    """Record the resident bytes of the primary every quarter of a second."""
    while True:
        readings.append(float(service.held()[0].num_bytes))
        await asyncio.sleep(0.25)


def refusals_without_hint(answers: Sequence[Answer]) -> int:
    heads = [b"".join(data for _, data in one.reads).split(b"\r\n\r\n")[0].lower() for one in answers]
    return sum(head.startswith(b"http/1.1 429") and b"\r\nretry-after: " not in head for head in heads)


async def overload(service: Service, asking: Asking, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run."""
    idle = [await asking.first_s() for _ in range(20)]
    rate = await asking.rate(args.max_requests, args.measure)
    count, stream = int(args.times * rate * args.seconds), random.Random(2)
    due = list(itertools.accumulate(stream.expovariate(args.times * rate) for _ in range(count)))
    messages = [asking.message() for _ in range(count)]
    readings: list[float] = []
    machine = Machine(service.process.pid, [one.pid for one in service.workers()])
    watching = [asyncio.ensure_future(watch(service, readings)), asyncio.ensure_future(machine.look())]
    gc.freeze()  # otherwise the collector sometimes stops this client for a tenth of a second, which would be measured
    outcomes = await asking.play(messages, due)
    for task in watching:
        task.cancel()
    taken = machine.taken()
    ended, normal_s = time.perf_counter(), 0.0
    while await asking.first_s() > 2 * share(idle, 0.99) and normal_s < 10 * NORMAL_S:
        normal_s = time.perf_counter() - ended
    after = await asking.rate(args.max_requests, args.measure)
    done = [one for one in outcomes if one.kind == "done"]
    ends = [one.ended_s for one in done if args.seconds / 5 <= one.ended_s <= args.seconds]
    half = len(readings) // 2
    return {
        "idle": idle,
        "rates": (rate, after),
        "kinds": Counter(one.kind for one in outcomes),
        "without_hint": asking.without_hint,
        "refusals": [one.ended_s - one.sent_s for one in outcomes if one.kind == "429"],
        "firsts": [one.pieces_s[0] - one.sent_s for one in done if one.pieces_s],
        "bound_s": share(idle, 0.99) + 1.25 * (args.max_requests + args.max_waiting) / rate,
        "done_rate": len(ends) / (0.8 * args.seconds),
        "late": [one.sent_s - one.due_s for one in outcomes],
        "own_late": machine.late,
        "taken": taken,
        "growth": max(readings[half:]) / max(readings[:half]) - 1,
        "bytes": readings[-1],
        "normal_s": normal_s,
    }


def judge(found: dict[str, Any]) -> bool:
    """Print the figures; return True if all checks hold."""

    def ms(name: str) -> str:
        p50, p99, most = (1e3 * share(found[name], part) for part in (0.5, 0.99, 1.0))
        return f"{p50:.1f} / {p99:.1f} / {most:.1f} ms"

    kinds, checks = found["kinds"], []

    def say(text: str, holds: bool) -> None:
        checks.append(holds)
        print(f"{text:100} {'holds' if holds else 'DOES NOT HOLD'}")

    print(
        f"idle: first token {ms('idle')} (50th, 99th percentile, most); it can do "
        f"{found['rates'][0]:.2f} requests/s, afterwards {found['rates'][1]:.2f}"
    )
    print(f"{sum(kinds.values())} requests, the client late by {ms('late')}, its event loop by {ms('own_late')}")
    for name, taken in found["taken"].items():
        print(f"{name}: {taken}")
    num_other = sum(kinds.values()) - kinds["done"] - kinds["429"]
    say(
        f"{kinds['done']} done, {kinds['429']} refused, other ends {num_other}, "
        f"refused without Retry-After {found['without_hint']}",
        set(kinds) <= {"done", "429"} and not found["without_hint"] and kinds["429"] > 0,
    )
    say(f"refused in {ms('refusals')}", share(found["refusals"], 0.99) < REFUSAL_S)
    say(
        f"first token in {ms('firsts')}; the queue implies {1e3 * found['bound_s']:.0f}",
        share(found["firsts"], 0.99) < found["bound_s"],
    )
    say(f"{found['done_rate']:.2f} requests/s are done", found["done_rate"] > 0.9 * min(found["rates"]))
    say(
        f"the primary's memory {found['bytes'] / 1e6:.0f} MB, {found['growth']:+.2%} between the halves",
        found["growth"] < 0.02,
    )
    say(f"back to normal {found['normal_s']:.2f} s after the last answer", found["normal_s"] <= NORMAL_S)
    return all(checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=float, default=3.0, help="multiple of the capacity to send (default: 3)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--measure", type=float, default=10.0, help="seconds to measure the capacity, before and after (default: 10)"
    )
    parser.add_argument("--max-requests", type=int, default=32)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--grpc", action="store_true", help="send requests to the gRPC port (default: HTTP)")
    args = parser.parse_args()
    sizes = ["--max-requests", args.max_requests, "--max-waiting", args.max_waiting, "--threads", args.threads]
    door = ["--grpc-port", 0] if args.grpc else []
    with penstock_serve(args.model, *sizes, "--weights", "mmap", *door) as service:
        asking = (
            GrpcAsking(service.grpc_address, args.prompt_tokens, args.new_tokens)
            if args.grpc
            else Asking(Server(service.url + "/v1"), args.prompt_tokens, args.new_tokens)
        )

        async def run() -> dict[str, Any]:
            await asyncio.gather(*(asking.one() for _ in range(args.max_requests)))
            try:
                return await overload(service, asking, args)
            finally:
                await asking.close()

        holds = judge(asyncio.run(run()))
        wrong = service.stop()
    print(wrong or "it ended in good order")
    return int(not holds or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
