"""Sends load to a service with OpenAI's completions in an open loop, and prints percentiles of what its clients see.

    penstock serve MODEL.psm &
    python benchmarks/serving.py http://127.0.0.1:8000/v1 --rate 1,2,4
    python benchmarks/serving.py a=http://127.0.0.1:8000/v1 b=http://127.0.0.1:8080/v1 --rate 1,2 --json out.jsonl

Requests are sent when they are due, with Poisson arrivals at each rate (0: all at once), whether or not earlier ones
are answered.  A latency counts from when a request was due.  The requests are those of ``peers/traces.py``: token ids,
lognormal lengths, and a fixed number of new tokens (``ignore_eos``, which vLLM and llama.cpp also support).  With
several URLs, each rate runs on one after the other with the same requests; other rates and rounds have other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serving_client import Server, play
from serving_figures import figures, outcome_of

sys.path.append(str(Path(__file__).parent / "peers"))

import traces

HEAD = (
    "server               rate, 1/s   done  not done        tokens/s   first token, ms         between, ms"
    "             whole, s              late, ms"
)


def messages_of(server: Server, requests: Sequence[traces.Request], extra: dict[str, Any], whole: bool) -> list[bytes]:
    """Return the requests as HTTP messages, without the fields of ``extra`` that are None."""
    stream = {} if whole else {"stream": True, "stream_options": {"include_usage": True}}
    made = []
    for one in requests:
        body = {"prompt": one.prompt, "max_tokens": one.num_new, "temperature": 0, "ignore_eos": True}
        body = body | stream | extra
        made.append(server.message("/completions", {name: value for name, value in body.items() if value is not None}))
    return made


async def measure(
    server: Server,
    requests: Sequence[traces.Request],
    extra: dict[str, Any] | None = None,
    *,
    whole: bool = False,
    patience_s: float = 600.0,
) -> dict[str, Any]:
    """Return the figures of one run of a trace.  Answers are parsed at the end, without garbage collection before."""
    messages = messages_of(server, requests, extra or {}, whole)
    gc.collect()
    gc.disable()
    try:
        start_s, answers = await play(server, messages, [one.due_s for one in requests], patience_s)
    finally:
        gc.enable()
    return figures([outcome_of(answer, start_s) for answer in answers])


def trace_of(name: str, rate: float, seed: int, count: int) -> list[traces.Request]:
    """Return the trace "mixed", "shared", or that of a file with its own arrival times."""
    if name == "mixed":
        return traces.mixed(rate, seed, count)
    if name == "shared":
        return traces.shared(seed, count)
    return traces.read(Path(name))


def runs_of(args: argparse.Namespace) -> Iterator[tuple[float, list[traces.Request]]]:
    """Return rates and their requests.  Each run has its own prompts, which are not in a prefix cache."""
    for number in range(args.rounds * len(args.rates)):
        rate = args.rates[number % len(args.rates)]
        yield rate, trace_of(args.trace, rate, args.seed + number, args.requests)


def line_of(name: str, rate: float, found: dict[str, Any]) -> str:
    """Return a row of the table: 50th, 90th and 99th percentiles."""

    def times(key: str, scale: float, form: str) -> str:
        return " / ".join(form.format(scale * found[key][p]) for p in ("50", "90", "99"))

    lost = " ".join(f"{count}x{kind}" for kind, count in found["not_done"].items()) or "0"
    return (
        f"{name:20} {rate or 'all':>9} {found['done']:6d}  {lost:15} {found['tokens_per_s']:8.1f}   "
        f"{times('first_token_s', 1e3, '{:.0f}'):23} {times('between_tokens_s', 1e3, '{:.1f}'):21} "
        f"{times('request_s', 1, '{:.2f}'):21} {times('late_s', 1e3, '{:.1f}')}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="[NAME=]URL", help="base URL, including /v1")
    parser.add_argument(
        "--rate", default="0", help="requests per second, separated by commas; 0 (default): all at once"
    )
    parser.add_argument("--requests", type=int, default=traces.NUM_REQUESTS, metavar="N")
    parser.add_argument(
        "--trace", default="mixed", help="mixed (default), shared, or a file in the format of peers/traces.py"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="repetitions of all rates and servers (default: 1)"
    )
    parser.add_argument("--whole", action="store_true", help="request complete answers (default: streams)")
    parser.add_argument(
        "--warm-up", action="store_true", help="send a full batch first, which is not measured (default: do not)"
    )
    parser.add_argument("--key-file", type=Path, help="file with an API key (default: none)")
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="S", help="seconds until an answer is given up (default: 600)"
    )
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="field of each request; null removes it; may be repeated",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the figures to this file, one line each (default: none)"
    )
    args = parser.parse_args(arguments)
    args.rates = [float(rate) for rate in args.rate.split(",")]
    args.extra = {name: json.loads(value) for name, _, value in (one.partition("=") for one in args.field)}
    if min(args.rates) < 0:
        parser.error("--rate must not be negative")
    return args


def main() -> None:
    args = parse()
    key = args.key_file.read_text().split()[0] if args.key_file else ""
    servers = {}
    for one in args.urls:
        name, _, url = one.rpartition("=")
        servers[name or url.split("//")[-1].split("/")[0]] = Server(url, key)
    for server in servers.values() if args.warm_up else ():
        asyncio.run(measure(server, traces.warm_up(), args.extra, whole=args.whole))
    print(HEAD, flush=True)
    for rate, requests in runs_of(args):
        for name, server in servers.items():
            found = asyncio.run(measure(server, requests, args.extra, whole=args.whole, patience_s=args.patience))
            print(line_of(name, rate, found), flush=True)
            if args.json:
                with args.json.open("a") as out:
                    out.write(json.dumps({"server": name, "rate": rate, "whole": args.whole, **found}) + "\n")


if __name__ == "__main__":
    main()
