"""Measures how long a service is unavailable under load after its worker is killed or stopped.

    python benchmarks/recovery.py MODEL.psm [--times 4] [--hang-seconds 3]

The script starts ``penstock serve`` with one worker, which several clients keep busy with streams.  It times a load
``--times`` times: a second copy of the model is loaded over the admin socket, which includes a process, its imports and
reading the weights, with the same traffic.  Then the worker is killed (SIGKILL) as often, and stopped (SIGSTOP: it is
alive but silent) as often, each time ten seconds after it was ready, so that each death counts as the first in a row.
Times count from the signal until another process is ready, and until a request sent at that moment is answered.

It checks that the median time until ready is at most that of a load plus 2 s (after a stop, plus ``--hang-seconds``);
that each death is counted under its cause only; and that streams end complete or with a retriable error.  The exit
status is 1 unless all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from serving_process import Service, penstock_serve
from soak_serving import AdminConnection, status_of

MAX_S = 2.0
"""The allowed time in addition to that of a load."""
QUIET_S = 10.5
"""A worker that lived longer than ten seconds is restarted without a pause."""
NUM_CLIENTS = 4


class Clients:
    """A client that runs streams one after the other and counts how they end."""

    def __init__(self, service: Service) -> None:
        self.host, _, port = service.url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.ends: Counter[str] = Counter()

    async def one(self, num_new: int) -> str:
        """Run a stream; return how it ended: "whole", "retriable" or another outcome."""
        body = {
            "model": "one",
            "prompt": [7, 8, 9],
            "max_tokens": num_new,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read()
        writer.close()
        if b"data: [DONE]" in answer:
            return "whole"
        is_told = answer.startswith(b"HTTP/1.1 503 ") or b'"code": "unavailable"' in answer
        return "retriable" if is_told else answer[-200:].decode(errors="replace")

    async def client(self) -> None:
        """Run streams until cancelled."""
        while True:
            end = await self.one(200)
            self.ends[end] += 1
            if end != "whole":
                await asyncio.sleep(0.1)


def ready_worker(service: Service) -> int:
    """Return the process id of the ready worker, or 0."""
    (model,) = status_of(service)["models"]
    return next((one["pid"] for one in model["workers"] if one["status"] == "ready"), 0)


def change(socket: Path, route: str, body: dict[str, str] | None) -> None:
    """Send a request to the admin socket and wait for the response."""
    admin = AdminConnection(socket)
    admin.request(
        "POST", f"/admin/models/{route}", json.dumps(body) if body else None, {"Content-Type": "application/json"}
    )
    answer = admin.getresponse()
    text = answer.read()
    admin.close()
    if answer.status != 200:
        raise SystemExit(f"{route}: {text!r}")


async def load_s(socket: Path, model: Path) -> float:
    """Return the seconds until another copy is ready."""
    start = time.perf_counter()
    await asyncio.to_thread(change, socket, "load", {"path": str(model.resolve()), "name": "again"})
    seconds = time.perf_counter() - start
    await asyncio.to_thread(change, socket, "again/unload", None)
    return seconds


async def away_s(service: Service, clients: Clients, number: signal.Signals) -> tuple[float, float]:
    """Return the seconds from the signal until the next worker is ready, and until it has answered."""
    await asyncio.sleep(QUIET_S)
    victim = await asyncio.to_thread(ready_worker, service)
    start = time.perf_counter()
    psutil.Process(victim).send_signal(number)
    while (await asyncio.to_thread(ready_worker, service)) in (0, victim):
        await asyncio.sleep(0.02)
    ready = time.perf_counter() - start
    if (end := await clients.one(1)) != "whole":
        raise SystemExit(f"a request after it was ready: {end}")
    return ready, time.perf_counter() - start


async def run(service: Service, args: argparse.Namespace, socket: Path, say: Callable[[str, bool], None]) -> None:
    clients = Clients(service)
    tasks = [asyncio.ensure_future(clients.client()) for _ in range(NUM_CLIENTS)]
    loads = [await load_s(socket, args.model) for _ in range(args.times)]
    print(f"a load: {told(loads)}")
    for number, hang_s in ((signal.SIGKILL, 0.0), (signal.SIGSTOP, args.hang_seconds)):
        found = [await away_s(service, clients, number) for _ in range(args.times)]
        ready, answered = zip(*found, strict=True)
        bound = hang_s + median(loads) + MAX_S
        text = f"{number.name}: ready again after {told(ready)}, an answer after {told(answered)}; bound {bound:.2f}"
        say(text, median(ready) <= bound)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    (model,) = status_of(service)["models"]
    deaths: dict[str, Any] = {cause: count for cause, count in model["num_restarts"].items() if count}
    say(f"deaths by cause: {deaths}", deaths == {"signal": args.times, "hang": args.times})
    say(f"streams: {dict(clients.ends)}", set(clients.ends) <= {"whole", "retriable"})


def told(seconds: list[float] | tuple[float, ...]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--hang-seconds", type=float, default=3.0)
    args = parser.parse_args()
    checks: list[bool] = []

    def say(text: str, holds: bool) -> None:
        checks.append(holds)
        print(f"{text:130} {'holds' if holds else 'DOES NOT HOLD'}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "admin.sock")
        sizes = ["--max-requests", 8, "--admin-socket", socket, "--hang-seconds", args.hang_seconds]
        with penstock_serve(f"one={args.model}", *sizes, "--weights", "mmap") as service:
            asyncio.run(run(service, args, socket, say))
            wrong = service.stop()
    say(wrong or "it ended in good order", not wrong)
    return int(not all(checks))


if __name__ == "__main__":
    sys.exit(main())
