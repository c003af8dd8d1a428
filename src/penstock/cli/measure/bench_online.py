"""``penstock bench MODEL --online``: measure latencies of requests that arrive over time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import check_writable, write_file
from penstock.cli.progress import ProgressLine
from penstock.cli.stage_server import stage_server
from penstock.config import check_integer
from penstock.errors import InvalidArgumentError
from penstock.validation import refusal

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
    """Add --online and the options that require it, whose default is None."""
    group = parser.add_argument_group("requests that arrive over time")
    group.add_argument(
        "--online", action="store_true", help="measure latencies of Poisson arrivals at given rates (default: offline)"
    )
    group.add_argument(
        "--rate",
        metavar="R,R...",
        help="requests per second, or N%% of the capacity; none: only all requests at once (default: 50%%,80%%)",
    )
    group.add_argument("--requests", type=int, metavar="N", help="requests per rate (default: 64)")
    group.add_argument(
        "--spread",
        type=float,
        metavar="S",
        help="sigma of the lognormal distribution of lengths; 0: equal lengths (default: 0.6)",
    )
    group.add_argument("--shared-tokens", type=int, metavar="N", help="tokens that all prompts start with (default: 0)")
    group.add_argument("--max-requests", type=int, metavar="N", help="requests per step (default: 32)")
    group.add_argument(
        "--kv-cache", choices=("auto", "f32", "bf16", "int8", "int4"), help="type of keys and values (default: auto)"
    )
    group.add_argument(
        "--no-prefix-cache",
        action="store_true",
        default=None,
        help="compute equal beginnings of prompts each time (default: once, then reuse their pages)",
    )
    group.add_argument("--svg", metavar="FILE", type=Path, help="write a chart of latency over rate (default: none)")


def refuse_online_options(args: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if an option is set that requires --online."""
    for name in _DEFAULTS:
        if getattr(args, name) is not None:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} requires --online")


def run_online(args: argparse.Namespace) -> int:
    """Measure and print the figures."""
    from dataclasses import asdict

    from penstock.bench.online import OnlineBench, SyntheticTrace, bench_online
    from penstock.engine.options import EngineOptions
    from penstock.runtime.program import ProgramLimits

    options = {name: value if (value := getattr(args, name)) is not None else _DEFAULTS[name] for name in _DEFAULTS}
    rates, shares = _rates(options["rate"])
    check_integer("requests", options["requests"], 1, 1 << 20)
    if options["svg"] is not None:
        check_writable("svg", options["svg"])
    prompt_tokens = 256 if args.prompt_tokens is None else args.prompt_tokens
    new_tokens = 64 if args.new_tokens is None else args.new_tokens
    settings = OnlineBench(
        downloaded_path(args.model),
        SyntheticTrace(options["requests"], prompt_tokens, new_tokens, options["spread"], options["shared_tokens"]),
        rates,
        shares,
        scheme=args.scheme,
        threads=args.threads,
        network=args.network,
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        context_parallel_size=args.cp,
        stage_server=stage_server(args),
        limits=ProgramLimits(
            max_tokens=max(512, options["max_requests"]),
            max_requests=options["max_requests"],
            kv_layout=options["kv_cache"],
            weights=args.weights,
        ),
        options=EngineOptions(prefix_cache=not options["no_prefix_cache"]),
        verify=args.verify,
    )
    with ProgressLine(ticks=False) as progress:
        report = bench_online(settings, progress)
    if options["svg"] is not None:
        from penstock.bench.charts.latency_chart import draw_latency

        write_file("svg", options["svg"], draw_latency(report, f"{args.model} under load"))
    print(json.dumps(asdict(report)) if args.json else _table(args.model, report))
    return 0


def _rates(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the rates in requests per second, and the rates that are shares of the capacity."""
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
        raise refusal("rate", "none, or numbers or percentages separated by commas", text) from None
    return tuple(rates), tuple(shares)


def _table(model: str, report: OnlineReport) -> str:
    from penstock.bench.open_model import describe_threads

    trace, threads = report.trace, describe_threads(report.num_threads, report.num_ranks)
    shared = f"; prompts share {trace.shared_tokens} tokens" if trace.shared_tokens else ""
    lines = [
        f"{model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}",
        f"{trace.num_requests} requests, {report.prompt_tokens} prompt tokens, {report.output_tokens} generated tokens"
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
    capacity = report.runs[0].requests_per_s  # of all requests at once
    if any(run.rate and run.rate > capacity for run in report.runs):
        lines += ["", f"above the capacity of {capacity:.2f} requests/s, latencies grow for as long as requests arrive"]
    return "\n".join(lines)
