"""``penstock bench MODEL --online``: requests that arrive over time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.bench.online import OnlineReport

__all__ = ["add_online_options", "refuse_online_options", "run_online"]

_DEFAULTS: Final[dict[str, Any]] = {
    "rate": "50%,80%",
    "requests": 64,
    "spread": 0.6,
    "shared_tokens": 0,
    "max_requests": 32,
    "kv_cache": "auto",
    "no_prefix_cache": False,
    "svg": None,
}


def add_online_options(parser: argparse.ArgumentParser) -> None:
    """The options that go with --online; None until given."""
    group = parser.add_argument_group("requests that arrive over time")
    group.add_argument("--online", action="store_true", help="Poisson arrivals: latencies at given rates")
    group.add_argument(
        "--rate",
        metavar="R,R...",
        help="requests per second, or N%% of the capacity (50%%,80%%); none: all at once only",
    )
    group.add_argument("--requests", type=int, metavar="N", help="requests in the trace (64)")
    group.add_argument(
        "--spread", type=float, metavar="S", help="how far lengths differ: lognormal; 0: not at all (0.6)"
    )
    group.add_argument("--shared-tokens", type=int, metavar="N", help="equal tokens at the beginning of prompts (0)")
    group.add_argument("--max-requests", type=int, metavar="N", help="requests side by side (32)")
    group.add_argument("--kv-cache", choices=("auto", "f32", "bf16", "int8"), help="type of keys and values (auto)")
    group.add_argument(
        "--no-prefix-cache", action="store_true", default=None, help="compute equal beginnings of prompts each time"
    )
    group.add_argument("--svg", metavar="FILE", type=Path, help="write a picture of latency against rate")


def refuse_online_options(args: argparse.Namespace) -> None:
    """InvalidArgumentError when an option was given that only --online honours."""
    for name in _DEFAULTS:
        if getattr(args, name) is not None:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} goes with --online")


def run_online(args: argparse.Namespace) -> int:
    """Measure and print."""
    from dataclasses import asdict

    from penstock.bench.online import OnlineBench, Trace, bench_online
    from penstock.engine.options import EngineOptions
    from penstock.runtime.program import ProgramLimits

    given = {name: value if (value := getattr(args, name)) is not None else _DEFAULTS[name] for name in _DEFAULTS}
    rates, shares = _rates(given["rate"])
    if not 1 <= given["requests"] <= 1 << 20:
        raise InvalidArgumentError(f"--requests must be a whole number from 1 to {1 << 20}, not {given['requests']}")
    if given["svg"] is not None:
        _check_writable(given["svg"])
    prompt_tokens = 256 if args.prompt_tokens is None else args.prompt_tokens
    new_tokens = 64 if args.new_tokens is None else args.new_tokens
    report = bench_online(
        OnlineBench(
            args.model,
            Trace(given["requests"], prompt_tokens, new_tokens, given["spread"], given["shared_tokens"]),
            rates,
            shares,
            scheme=args.scheme,
            threads=args.threads,
            network=args.network,
            limits=ProgramLimits(
                max_tokens=max(512, given["max_requests"]),
                max_requests=given["max_requests"],
                kv_layout=given["kv_cache"],
                weights=args.weights,
            ),
            options=EngineOptions(prefix_cache=not given["no_prefix_cache"]),
            verify=args.verify,
        )
    )
    if given["svg"] is not None:
        from penstock.bench.latency_chart import draw_latency

        try:
            given["svg"].write_text(draw_latency(report, f"{args.model} under load"), encoding="utf-8")
        except OSError as error:
            raise FileAccessError(f"--svg {given['svg']}: {error.strerror}") from error
    print(json.dumps(asdict(report)) if args.json else _table(args.model, report))
    return 0


def _check_writable(path: Path) -> None:
    """FileAccessError before anything is measured for a picture that cannot be written."""
    is_there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise FileAccessError(f"--svg {path}: {error.strerror}") from error


def _rates(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rates in requests per second, and those given as shares of the capacity."""
    rates: list[float] = []
    shares: list[float] = []
    if text == "none":
        return (), ()
    try:
        for part in text.split(","):
            if part.strip().endswith("%"):
                shares.append(float(part.strip()[:-1]) / 100)
            else:
                rates.append(float(part))
    except ValueError:
        raise InvalidArgumentError(
            f"rate must be none, or numbers or percentages with commas between them, not {text!r}", param="rate"
        ) from None
    return tuple(rates), tuple(shares)


def _table(model: str, report: OnlineReport) -> str:
    trace = report.trace
    shared = f", {trace.shared_tokens} of a prompt's shared" if trace.shared_tokens else ""
    lines = [
        f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {report.num_threads} threads",
        f"{trace.num_requests} requests, {report.prompt_tokens} tokens of prompts, {report.output_tokens} of answers"
        + shared,
        "",
        "                                first token, ms         between tokens, ms      prompt tokens",
        "requests/s   done/s  tokens/s     p50     p90     p99     p50     p90     p99   from cache  preempted",
    ]
    for run in report.runs:
        first = "".join(f"{1e3 * value:8,.0f}" for value in run.first_token_s.values())
        between = "".join(f"{1e3 * value:8,.1f}" for value in run.between_tokens_s.values())
        rate = f"{run.rate:10.2f}" if run.rate else "   at once"
        lines.append(
            f"{rate} {run.requests_per_s:8.2f} {run.output_tokens_per_s:9,.1f}{first}{between}"
            f"{run.hit_rate:12.0%} {run.num_preemptions:10}"
        )
    most = report.runs[0].requests_per_s  # all at once: the capacity
    if any(run.rate and run.rate > most for run in report.runs):
        lines += ["", f"above the capacity of {most:.2f} requests/s latencies grow as long as requests arrive"]
    return "\n".join(lines)
