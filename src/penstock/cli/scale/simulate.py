"""``penstock simulate TRACE``: what many replicas of a model would do with a trace of requests."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import add_parser_of, check_writable, write_file
from penstock.cli.progress import format_seconds
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.cluster.autoscale import ScalePolicy
    from penstock.cluster.simulate import Report

__all__ = ["add_parser", "run"]

_LIMITS: Final = {
    "pages": ("num_pages", "KV pages of 32 tokens per replica (default: 2048)"),
    "max-requests": ("max_requests", "requests in a step (default: 32)"),
    "max-tokens": ("max_tokens", "tokens of a step without decodes (default: 512)"),
    "max-mixed-tokens": ("max_mixed_tokens", "prompt tokens of a step that decodes, too (default: 128)"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "simulate",
        "Simulate many replicas of a model that serve a trace: the real scheduler, pages, prefix cache and router "
        "under a virtual clock, with the costs of steps in place of a model. A trace is JSON lines in order of time, "
        '{"time": SECONDS, "segments": [[NAME, TOKENS], ...], "output_tokens": N}; segments of one name have the same '
        "content.",
        "penstock simulate trace.jsonl --replicas 1000\n"
        "penstock simulate trace.jsonl --replicas 8 --policy least-loaded --json\n"
        "penstock simulate trace.jsonl --replicas 4,8,16 --policy prefix,least-loaded --svg policies.svg\n"
        "penstock simulate trace.jsonl --replicas 8,1..8 --scale-down-seconds 60\n"
        "penstock simulate trace.jsonl --costs costs.json",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace, JSON lines (required)")
    parser.add_argument(
        "--replicas",
        default="1",
        metavar="N[,N...]",
        help="number of replicas, or MIN..MAX: it follows the load, as in penstock serve; several are compared in one "
        "table (default: 1)",
    )
    parser.add_argument(
        "--policy",
        default="prefix",
        metavar="NAME[,NAME...]",
        help="which replica gets a request; prefix (default): where it costs the least time; least-loaded: the one "
        "with the fewest open requests; round-robin: each in turn; several are compared in one table",
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="ranks of a replica; for another number than that of the costs, an estimate (default: that of the costs)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="costs of steps, written by penstock bench --costs (default: 348M in w8a8 on two cores)",
    )
    for option, (_, text) in _LIMITS.items():
        parser.add_argument(f"--{option}", type=int, metavar="N", help=text)
    _add_faults(parser)
    _add_scaling(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help='print one JSON object (default: a table); of several simulations, {"runs": [...]}',
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        type=Path,
        help="write a chart of the first token and of the cached tokens over the replicas (default: none)",
    )
    parser.set_defaults(run=run)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mtbf",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="mean time between failures of a replica; its requests start again on others (default: 0, never)",
    )
    parser.add_argument(
        "--restart",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time until a failed replica is back, with an empty cache (default: 10)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of failures (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Simulate; print the report, and the progress to standard error."""
    from dataclasses import asdict
    from functools import partial

    from penstock.cluster.costs import COSTS_348M, read_costs
    from penstock.cluster.replica import ReplicaLimits
    from penstock.cluster.simulate import Simulation, simulate
    from penstock.cluster.trace import read_trace

    given = {name: getattr(args, option.replace("-", "_")) for option, (name, _) in _LIMITS.items()}
    limits = ReplicaLimits(**{name: value for name, value in given.items() if value is not None})
    costs = COSTS_348M if args.costs is None else read_costs(args.costs)
    tp = costs.tp if args.tp is None else args.tp
    runs = [
        Simulation(replicas, policy, costs, tp, limits, args.mtbf, args.restart, args.seed, scale, args.start_seconds)
        for replicas, scale in map(partial(_replicas_of, args), args.replicas.split(","))
        for policy in args.policy.split(",")
    ]
    if args.svg is not None:
        check_writable("svg", args.svg)
    reports = [simulate(read_trace(args.trace), settings, _Progress()) for settings in runs]
    if args.svg is not None and reports[0].requests:
        from penstock.bench.latency_chart import draw_policies

        write_file("svg", args.svg, draw_policies(reports, f"{args.trace.name} on simulated replicas"))
    if args.json:
        print(json.dumps(asdict(reports[0]) if len(reports) == 1 else {"runs": [asdict(one) for one in reports]}))
    else:
        print(_table(reports[0]) if len(reports) == 1 else _comparison(reports))
    return 0


def _replicas_of(args: argparse.Namespace, text: str) -> tuple[int, ScalePolicy | None]:
    """Return the number of replicas at first, and how it changes; None: it does not."""
    from penstock.cluster.autoscale import ScalePolicy, parse_range

    if ".." not in text:
        if not text.strip().isdecimal():
            raise InvalidArgumentError(
                f"replicas: expected numbers or MIN..MAX, separated by commas, got {args.replicas!r:.100}",
                param="replicas",
            )
        return int(text), None
    low, high = parse_range(text)
    policy = ScalePolicy(low, high, args.scale_queue_seconds, down_after_s=args.scale_down_seconds)
    return max(1, low), policy


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("scale-queue-seconds", 2.0, "with MIN..MAX: seconds of prefill that may wait per replica"),
        ("scale-down-seconds", 120.0, "with MIN..MAX: end a replica when the others had room for so long"),
        ("start-seconds", 1.0, "with MIN..MAX: time until a replica that was started serves"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{text} (default: {default:g})"
        )


class _Progress:
    """Prints a line for each further 10,000 requests."""

    def __init__(self) -> None:
        self._next = 10_000

    def __call__(self, number: int, seconds: float) -> None:
        if number >= self._next:
            self._next = number + 10_000
            print(f"{number:,} requests, {seconds:,.1f} s simulated", file=sys.stderr, flush=True)


def _costs(report: Report) -> list[str]:
    return [f"costs of {report.costs['model']}, {report.costs['machine']}", f"({report.costs['source']})", ""]


def _comparison(reports: list[Report]) -> str:
    """Return a table with a line for each simulation."""
    first = reports[0]
    lines = [
        f"{first.requests:,} requests; {_costs(first)[0]}",
        *_costs(first)[1:],
        f"{'':23} {'first token, ms':>29} {'per token':>9} {'prompt tokens':>18}",
        f"replicas  policy        {'p50':>9} {'p90':>9} {'p99':>9} {'p50, ms':>9} {'computed':>11} cached  busy"
        "  busiest",
    ]
    for report in reports:
        shares = f"{report.hit_rate:6.0%} {report.utilisation:5.0%} {report.load_imbalance:+8.1%}"
        times = [report.ttft.get("p50"), report.ttft.get("p90"), report.ttft.get("p99"), report.tpot.get("p50")]
        cells = " ".join(f"{'-':>9}" if value is None else f"{value * 1e3:9,.1f}" for value in times)
        lines.append(f"{report.replicas:8,}  {report.policy:<13} {cells} {report.prefilled_tokens:11,} {shares}")
    return "\n".join(lines)


def _table(report: Report) -> str:
    number = f"{'up to ' * bool(report.scalings)}{report.replicas:,} replica{'s' if report.replicas > 1 else ''}"
    lines = [
        f"{number} of {report.tp} rank{'s' if report.tp > 1 else ''}, {report.policy}; {_costs(report)[0]}",
        *_costs(report)[1:],
        f"requests         {report.requests:14,}  in {format_seconds(report.seconds)}",
        f"prompt tokens    {report.prefilled_tokens:14,}  computed, {report.cached_tokens:,} from caches "
        f"({report.hit_rate:.0%})",
        f"answer tokens    {report.output_tokens:14,}",
        f"preemptions      {report.preemptions:14,}",
        f"failures         {report.failures:14,}  {report.retries:,} requests started again",
        f"replica time     {format_seconds(report.replica_seconds):>14}  number changed {report.scalings:,} times",
        f"utilisation      {report.utilisation:14.1%}  busiest replica {report.load_imbalance:+.1%}",
        "",
        f"{'ms':<16} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10}",
    ]
    for name, label in (("ttft", "first token"), ("tpot", "per token"), ("e2e", "whole answer")):
        values = getattr(report, name)
        cells = (
            f"{values[key] * 1e3:10,.1f}" if key in values else f"{'-':>10}" for key in ("mean", "p50", "p90", "p99")
        )
        lines.append(f"{label:<16} {' '.join(cells)}")
    return "\n".join(lines)
