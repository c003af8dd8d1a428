"""Measures what each shortcut of the service saves: requests to a service with it and to one without, in close pairs.

    python benchmarks/serving_shortcuts.py MODEL.psm [--pairs 5] [--threads 0] [--shortcuts take_now,pause]

The service without a shortcut runs the same code with a change of ``CHANGES``, made when Python starts; "control" is a
second service as it is.  Loads: "live" are probes of ``/health/live``, "small" completions of one token, "first"
streams of four tokens, all one after the other on an open connection; "streams" are 16 streams at once on new
connections.  Times are medians: of a request, for "first" until its first text, for "streams" of all of them.
``cpu`` is the processor time of the service and its worker, ``gateway`` that of the service without its worker, and
``steps`` the mean number of engine steps.  A ratio is the median over pairs of without / with: above 1, it saves.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serving import messages_of
from serving_client import Answer, Connection, Server, hang_up, play
from serving_figures import outcome_of
from serving_overhead import requests_of

from penstock.serving.workers.worker import HEARTBEAT_S

CHANGES = {
    "none": "",
    "control": "",
    "take_now": "from penstock.llm.answer import EventAnswer as m; m._offer = lambda *_: False",
    "arrivals": "from penstock.serving.arrivals import Arrivals as m; m.settle = lambda self, callback: callback()",
    "pause": "import penstock.llm.engine_thread as m; m._FIRST_TOKEN_PAUSE_S = 0",
}
LOADS = {"live": 400, "small": 60, "first": 40, "streams": 16}


class Service:
    """A service that was started with a change."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.server = process, Server(url + "/v1")
        self.kept: list[Connection] = []

    def cpu_ms(self) -> tuple[float, float]:
        """Return the processor time of all processes and that of the gateway."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        gateway, *workers = (_cpu_ms(Path(f"/proc/{one}/task")) for one in (pid, *children))
        return gateway + sum(workers), gateway

    def num_steps(self) -> int:
        """Return the number of engine steps so far."""
        time.sleep(2 * HEARTBEAT_S)  # the worker tells it with its heartbeats
        connection = http.client.HTTPConnection(*self.server.address)
        connection.request("GET", "/metrics")
        found = re.search(rb"penstock:steps_total\S* (\d+)", connection.getresponse().read())
        connection.close()
        return int(found[1]) if found else 0


def _cpu_ms(threads: Path) -> float:
    return sum(int(file.read_text().split()[0]) for file in threads.glob("*/schedstat")) / 1e6


@contextmanager
def service(bundle: Path, change: str, threads: int) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(change + "\n")
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "penstock", "serve", f"bench={bundle}", "--port", "0", "--log", "warning"]
        process = subprocess.Popen(
            [*command, "--threads", str(threads)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        try:
            found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
            if found is None:
                raise SystemExit("the service did not start")
            yield Service(process, found[0])
        finally:
            process.terminate()
            process.communicate(timeout=60)


def play_load(runner: asyncio.Runner, one: Service, load: str, new: int, seed: int) -> list[float]:
    """Return the median time of a request (of all of them for "streams") and the processor times, in milliseconds."""
    count = LOADS[load]
    requests = requests_of(seed, count, 16, {"streams": new, "first": 4}.get(load, 1))
    messages = messages_of(one.server, requests, {}, load == "small")
    host, port = one.server.address
    if load == "live":
        messages = [f"GET /health/live HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()] * count
    before = one.cpu_ms()
    if load == "streams":
        start = time.perf_counter()
        _, answers = runner.run(play(one.server, messages, [0.0] * count))
        taken = [time.perf_counter() - start]
    else:
        found = [runner.run(play(one.server, [message], [0.0], kept=one.kept)) for message in messages]
        answers = [answer for _, some in found for answer in some]
        taken = [_time_of(answer, load) for answer in answers]
    if lost := [answer.lost for answer in answers if answer.lost]:
        raise SystemExit(f"{load}: {lost[0]}")
    used = [now - then for now, then in zip(one.cpu_ms(), before, strict=True)]
    return [1e3 * statistics.median(taken), *used]


def _time_of(answer: Answer, load: str) -> float:
    if load != "first":
        return answer.ended_s - answer.sent_s
    outcome = outcome_of(answer, answer.sent_s)
    return outcome.pieces_s[0] if outcome.pieces_s else answer.ended_s - answer.sent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64, help='tokens of each of "streams" (default: 64)')
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (default: 1); 0: all cores")
    parser.add_argument("--shortcuts", default=",".join(CHANGES), help="default: all of them")
    parser.add_argument("--loads", default=",".join(LOADS), help="default: all of them")
    args = parser.parse_args()
    names = ["none", *(name for name in args.shortcuts.split(",") if name != "none")]
    with ExitStack() as stack, asyncio.Runner() as runner:
        services = {name: stack.enter_context(service(args.bundle, CHANGES[name], args.threads)) for name in names}
        for one in services.values():
            for load in LOADS:
                play_load(runner, one, load, 8, 1)
        for load in args.loads.split(","):
            rows: dict[str, list[list[float]]] = {name: [] for name in names}
            before = {name: one.num_steps() for name, one in services.items()}
            for pair in range(args.pairs):
                for name in names[:: 1 if pair % 2 == 0 else -1]:
                    rows[name].append(play_load(runner, services[name], load, args.new_tokens, 1000 + pair))
            print(f"{load}: {LOADS[load]} requests, {args.pairs} pairs")
            for name in names:
                steps = (services[name].num_steps() - before[name]) / args.pairs
                ms, cpu, gateway = (statistics.median(values) for values in zip(*rows[name], strict=True))
                pairs = [
                    [b / max(a, 1e-3) for a, b in zip(*both, strict=True)]
                    for both in zip(rows["none"], rows[name], strict=True)
                ]
                ratios = ", ".join(f"{statistics.median(values):.3f}" for values in zip(*pairs, strict=True))
                told = f"{ms:8.3f} ms, cpu {cpu:.1f}, gateway {gateway:.1f}, {steps:.1f} steps"
                print(f"  without {name:9} {told}: {ratios}", flush=True)
        for one in services.values():
            runner.run(_hang_up(one.kept))


async def _hang_up(connections: list[Connection]) -> None:
    hang_up(connections)


if __name__ == "__main__":
    main()
