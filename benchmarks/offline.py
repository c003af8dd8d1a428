"""Measures ``penstock batch`` with many short requests: several workers against one process, on the same cores.

    python benchmarks/offline.py [BUNDLE] [--requests 100000] [--workers 4] [--threads 0]

A request has a prompt of 16 token ids and asks for 8 tokens.  Three runs answer the same file: one process with one
worker's share of the cores, one process with all of them, and the workers, each with its share.  The requests per
second are over the whole command, with the start of its processes and the opening of the model.

"Not inference" is the share of (time x engines) in which no step ran: over the whole command, and from the first step
of any engine to the last one.  A step is the native call that computes it and samples its tokens (``timed_batch.py``).
The exit status is 1 if a request has no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NUM_PROMPT, NUM_NEW = 16, 8


@dataclass(frozen=True)
class Way:
    """A way to run the command: in this process (``workers`` 0) or with workers; ``threads`` of each engine."""

    name: str
    workers: int
    threads: int


def write_requests(path: Path, count: int) -> None:
    """Write requests in OpenAI's batch format, each with a prompt of its own."""
    draw = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            prompt = [draw.randrange(300, 4000) for _ in range(NUM_PROMPT)]
            body = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps({"custom_id": str(number), "url": "/v1/completions", "body": body}) + "\n")


def num_answers(path: Path) -> int:
    """Return the number of requests that got all their tokens."""
    found = set()
    with path.open() as file:
        for line in file:
            result = json.loads(line)
            if result["error"] is None and result["response"]["body"]["usage"]["completion_tokens"] == NUM_NEW:
                found.add(result["custom_id"])
    return len(found)


def answer(args: argparse.Namespace, way: Way, requests: Path) -> bool:
    """Run the command and print its row; return True if every request was answered."""
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name), Path(name) / "answers.jsonl"
        script = Path(__file__).with_name("timed_batch.py")
        command = [sys.executable, script, "command", folder, "batch", args.bundle, requests, output]
        command += ["--threads", way.threads, "--max-requests", args.max_requests, "--context-len", 64]
        command += ["--workers", way.workers] if way.workers else []
        start = time.perf_counter()
        status = subprocess.run([str(one) for one in command], stderr=subprocess.PIPE, text=True)
        wall_s = time.perf_counter() - start
        if status.returncode:
            raise SystemExit(f"{way.name}: the command ended with {status.returncode}\n{status.stderr[-2000:]}")
        num_done = num_answers(output)
        engines = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    num_engines = max(1, way.workers)
    if len(engines) != num_engines:
        raise SystemExit(f"{way.name}: expected step times of {num_engines} engines, got {len(engines)}")
    in_steps = sum(one["seconds"] for one in engines)
    span_s = max(one["last_s"] for one in engines) - min(one["first_s"] for one in engines)
    print(
        f"{way.name:24} {way.threads:8}"
        f" {wall_s:9.1f} {num_done / wall_s:7,.0f} {1 - in_steps / (wall_s * num_engines):15.1%}"
        f" {span_s:9.1f} {num_done / span_s:7,.0f} {1 - in_steps / (span_s * num_engines):15.1%}"
        f" {1e3 * in_steps / sum(one['num'] for one in engines):8.2f}",
        flush=True,
    )
    return num_done == args.requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("demo/demo.psm"), help="default: demo/demo.psm")
    parser.add_argument("--requests", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (default: 4)")
    parser.add_argument("--threads", type=int, default=0, help="cores to use in all; 0 (default): all of the machine")
    parser.add_argument("--max-requests", type=int, default=32, help="requests per step of an engine (default: 32)")
    args = parser.parse_args()
    cores = args.threads or len(os.sched_getaffinity(0))
    share = max(1, cores // args.workers)
    ways = [
        Way("one process, one share", 0, share),
        Way("one process, all cores", 0, cores),
        Way(f"{args.workers} workers", args.workers, share),
    ]
    print(f"{args.requests:,} requests of {NUM_PROMPT} + {NUM_NEW} tokens on {cores} cores")
    print(
        f"{'':24} {'':8} {'whole command':>33} {'first to last step':>33}\n"
        f"{'':24} {'threads':>8} {'seconds':>9} {'1/s':>7} {'not inference':>15} {'seconds':>9} {'1/s':>7}"
        f" {'not inference':>15} {'ms/step':>8}"
    )
    with tempfile.TemporaryDirectory() as name:
        requests = Path(name) / "requests.jsonl"
        write_requests(requests, args.requests)
        return int(not all(answer(args, way, requests) for way in ways))


if __name__ == "__main__":
    sys.exit(main())
