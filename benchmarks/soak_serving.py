"""Runs clients of all kinds against a service, and checks that memory, descriptors, threads and processes are stable.

    python benchmarks/soak_serving.py MODEL.psm [--requests 20000] [--clients 24] [--switches 60]

Clients of ``penstock serve`` request answers and streams, several answers, log-probabilities, echoes, embeddings and
tokens; two in five use gRPC.  One in five disconnects at a random moment (after half a request, before the answer, or
during a stream), and one in twenty sends a request that must be refused.  With ``--switches`` the model is then
replaced that many times over the admin socket, under traffic.

The resources of the primary and of its workers are read at every hundredth of the run.  It checks that no request is
answered with 5xx or not at all; that a line through the last three quarters of the resident bytes grows by less than 2
% of their mean; that descriptors, threads and processes at the end, when all is quiet, equal those after the first
hundredth; and that after SIGTERM nothing is open and no processes, temporary files or shared memory are left.  The exit
status is 1 unless all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from serving_process import Held, Service, penstock_serve
from soak_grpc import GrpcTraffic

MAX_GROWTH = 0.02
WARM_UP = 2000
"""Requests until every page of keys and values was written once: until then memory grows."""
NUM_LONG, LONG_TOKENS = 600, 992
"""Prompts until the primary remembers as many beginnings of prompts as it may (16,384): 31 pages each."""


class AdminConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=300)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def switch(path: Path, model: Path) -> int:
    """Replace the model; return the status of the response."""
    admin = AdminConnection(path)
    body = json.dumps({"path": str(model.resolve())})
    admin.request("POST", "/admin/models/soak/update", body, {"Content-Type": "application/json"})
    answer = admin.getresponse()
    answer.read()
    admin.close()
    return answer.status


class Traffic:
    """Clients with one connection per request; counts how requests end."""

    def __init__(self, service: Service, seed: int) -> None:
        self.host, _, port = service.url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.num_sent = 0
        self.goal = 0
        self.grpc = GrpcTraffic(service.grpc_address, self.random, self.ends)

    def request(self) -> tuple[str, dict[str, Any], int]:
        """Return a path, a body and the expected status."""
        draw = self.random
        if draw.random() < 0.05:
            wrong = [{"prompt": ""}, {"prompt": [1], "n": 0}, {"prompt": "x", "tools": []}, {"prompt": [2**30]}]
            return "/v1/completions", draw.choice(wrong), 400
        prompt = [draw.randrange(300, 4000) for _ in range(draw.randrange(1, 60))]
        kind = draw.random()
        if kind < 0.1:
            return "/v1/embeddings", {"input": [prompt, prompt[:5]]}, 200
        if kind < 0.2:
            return "/tokenize", {"prompt": "def add(a, b):\n" * draw.randrange(1, 20)}, 200
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randrange(1, 24), "temperature": draw.random()}
        body |= draw.choice([{}, {"stream": True}, {"stream": True, "n": 3}, {"n": 2, "best_of": 3}])
        body |= draw.choice([{}, {}, {"logprobs": 3}, {"stop": ["x", "return"]}, {"cache_salt": str(draw.random())}])
        if "best_of" not in body and draw.random() < 0.1:
            body["echo"] = True
        return "/v1/completions", body, 200

    def long(self) -> tuple[str, dict[str, Any], int]:
        """Return a request of which the primary remembers 31 prefixes."""
        prompt = [self.random.randrange(300, 4000) for _ in range(LONG_TOKENS)]
        return "/v1/completions", {"prompt": prompt, "max_tokens": 1}, 200

    async def one(self) -> None:
        """Send one request, or a part of one."""
        if self.num_sent > NUM_LONG and self.random.random() < 0.4:
            await self.grpc.one()
            return
        path, body, expected = self.long() if self.num_sent <= NUM_LONG else self.request()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        message = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        leaves = self.random.random() < 0.2
        cut = self.random.choice([0, 20, len(message) - 3, len(message), len(message)]) if leaves else len(message)
        num_reads = self.random.randrange(0, 4) if leaves else -1
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(message[:cut])
            await writer.drain()
            if cut < len(message):
                self.ends["left while sending"] += 1
            elif leaves:
                for _ in range(num_reads):
                    await reader.read(200)
                self.ends["left while reading"] += 1
            else:
                answer = await reader.read()
                status = int(answer[9:12] or 0)
                is_whole = b"event-stream" not in answer or answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                self.ends["as expected" if status == expected and is_whole else f"status {status}"] += 1
        finally:
            if self.random.random() < 0.5:
                writer.transport.abort()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def client(self) -> None:
        """Send requests one after the other up to a number."""
        while self.num_sent < self.goal:
            self.num_sent += 1
            await self.one()

    async def run(self, count: int, num_clients: int) -> None:
        """Send a number of further requests."""
        self.goal += count
        await asyncio.gather(*(self.client() for _ in range(num_clients)))
        await self.grpc.close()


async def quiet(service: Service) -> tuple[Held, Held]:
    """Return the resources when nothing is open any more; end the run if that does not happen."""
    status: dict[str, Any] = {}
    for _ in range(600):
        status = await asyncio.to_thread(status_of, service)
        (model,) = status["models"]
        busy = model["num_running"] + model["num_waiting"] + sum(one["num_open"] for one in model["workers"])
        if not busy and len(model["workers"]) == 1:
            await asyncio.sleep(1.0)  # closed connections are forgotten
            return service.held()
        await asyncio.sleep(0.1)
    raise SystemExit(f"something stays open: {status}")


def status_of(service: Service) -> dict[str, Any]:
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/status")
    found: dict[str, Any] = json.load(connection.getresponse())
    connection.close()
    return found


def growth(values: Sequence[float]) -> float:
    """Return the growth of a line through the last three quarters, divided by their mean."""
    tail = np.array(values[len(values) // 4 :], float)
    return float(np.polyfit(np.arange(len(tail)), tail, 1)[0] * len(tail) / tail.mean())


class Verdict:
    """Prints checks and whether they hold."""

    def __init__(self) -> None:
        self.holds = True

    def say(self, text: str, holds: bool) -> None:
        self.holds &= holds
        print(f"{text:110} {'holds' if holds else 'DOES NOT HOLD'}", flush=True)


async def soak(service: Service, args: argparse.Namespace, admin: Path, verdict: Verdict) -> None:
    traffic = Traffic(service, args.seed)
    await traffic.run(NUM_LONG + WARM_UP, args.clients)
    before = await quiet(service)
    readings: list[tuple[Held, Held]] = []
    start = time.perf_counter()
    for _ in range(100):
        await traffic.run(max(1, args.requests // 100), args.clients)
        readings.append(service.held())
    seconds = time.perf_counter() - start
    after = await quiet(service)
    print(f"{traffic.num_sent} requests in {seconds:.0f} s: {dict(traffic.ends)}")
    for name, number in (("primary", 0), ("workers", 1)):
        grown = growth([one[number].num_bytes for one in readings])
        first, last = before[number], after[number]
        verdict.say(f"{name}: {first}; then {last}; {grown:+.2%}", grown < MAX_GROWTH)
        same = (first.num, first.num_files, first.num_threads) >= (last.num, last.num_files, last.num_threads)
        verdict.say(f"{name}: no more processes, descriptors and threads than before", same)
    if args.switches:
        await switches(service, args, admin, traffic, verdict)
    bad = {end: count for end, count in traffic.ends.items() if end.startswith("status")}
    verdict.say(f"ends that must not be: {bad or 'none'}", not bad)


async def switches(service: Service, args: argparse.Namespace, admin: Path, traffic: Traffic, verdict: Verdict) -> None:
    """Replace the model repeatedly under traffic; check that the resources of the primary do not grow."""
    going = asyncio.ensure_future(traffic.run(1 << 40, args.clients))
    before, statuses, readings = service.held()[0], Counter[int](), []
    for _ in range(args.switches):
        statuses[await asyncio.to_thread(switch, admin, args.model)] += 1
        readings.append(service.held()[0].num_bytes)
    traffic.goal = 0
    await going
    after = (await quiet(service))[0]
    grown = growth(readings) if len(readings) > 7 else 0.0
    verdict.say(f"{args.switches} switches: statuses {dict(statuses)}", set(statuses) == {200})
    verdict.say(f"primary: {before}; then {after}; {grown:+.2%}", grown < MAX_GROWTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--switches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    verdict, shared = Verdict(), set(os.listdir("/dev/shm"))  # noqa: S108 - looked at
    with tempfile.TemporaryDirectory() as folder:
        admin, made = Path(folder, "admin.sock"), Path(folder, "temporary")
        made.mkdir()
        sizes = ["--max-requests", 16, "--max-waiting", 256, "--admin-socket", admin, "--grpc-port", 0]
        with penstock_serve(f"soak={args.model}", *sizes, folder=made) as service:
            asyncio.run(soak(service, args, admin, verdict))
            wrong = service.stop()
        verdict.say(f"its end: {wrong or 'in good order'}", not wrong)
        left = [*os.listdir(made), *(set(os.listdir("/dev/shm")) - shared)]  # noqa: S108 - looked at
        verdict.say(f"files left: {left or 'none'}", not left)
    return int(not verdict.holds)


if __name__ == "__main__":
    sys.exit(main())
