"""How long a service is away when a worker is killed, or stops, under load.

    python benchmarks/recovery.py MODEL.psm [--times 4] [--hang-seconds 3]

Starts ``penstock serve`` with one worker, which some clients keep busy with streams.  A load is timed as often as
asked for: a second copy of the model through the admin socket, which is a process, its imports and the reading of the
weights, beside the same traffic.  Then the worker is killed (SIGKILL) so often, and stopped (SIGSTOP: it lives and
says nothing), each time ten seconds after it was ready, so that it counts as the first death in a row.  Times are from
the signal until another process is ready, and until a request that was sent then is answered.

It must hold that the median time until ready is at most that of a load and 2 s, behind a stop ``--hang-seconds`` more;
that each death is counted under its cause and no other; and that streams end whole or with a retriable error.  Ends
with 1 unless all hold.
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
"""Beyond the time of a load."""
QUIET_S = 10.5
"""A worker that lives longer than ten seconds is replaced without a pause."""
NUM_CLIENTS = 4


class Clients:
    """Streams one after the other, and how each ended."""

    def __init__(self, service: Service) -> None:
        self.host, _, port = service.url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.ends: Counter[str] = Counter()

    async def one(self, num_new: int) -> str:
        """How a stream of so many tokens ended: "whole", "retriable" or what else came."""
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
        """Streams until it is cancelled."""
        while True:
            end = await self.one(200)
            self.ends[end] += 1
            if end != "whole":
                await asyncio.sleep(0.1)


def ready_worker(service: Service) -> int:
    """The process of the worker that is ready; 0 when none is."""
    (model,) = status_of(service)["models"]
    return next((one["pid"] for one in model["workers"] if one["status"] == "ready"), 0)


def change(socket: Path, route: str, body: dict[str, str] | None) -> None:
    """Ask the admin socket, and wait until it is done."""
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
    """Seconds that another copy takes until it is ready."""
    start = time.perf_counter()
    await asyncio.to_thread(change, socket, "load", {"path": str(model.resolve()), "name": "again"})
    seconds = time.perf_counter() - start
    await asyncio.to_thread(change, socket, "again/unload", None)
    return seconds


async def away_s(service: Service, clients: Clients, number: signal.Signals) -> tuple[float, float]:
    """Seconds from a signal to the worker until the next one is ready, and until it has answered."""
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
