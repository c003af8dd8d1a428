"""``penstock simulate TRACE``: what many replicas of a model would do with a trace of requests."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import add_parser_of, check_writable, refuse_without, write_file
from penstock.cli.progress import format_seconds
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.cluster.autoscale import ScalePolicy
    from penstock.cluster.simulate import SimulationReport
    from penstock.cluster.trace import TraceRequest

__all__ = ["add_parser", "run"]

_PROGRESS_EVERY: Final = 10_000
_LIMITS: Final = {
    "pages": ("num_pages", "KV pages of 32 tokens per replica (default: 2048)"),
    "max-requests": ("max_requests", "requests in a step (default: 32)"),
    "max-tokens": ("max_tokens", "tokens of a step without decodes (default: 512)"),
    "max-mixed-tokens": ("max_mixed_tokens", "prompt tokens of a step that decodes, too (default: 128)"),
}

_GROUPS: Final = (
    ("", 1), ("", 1), ("first token, ms", 3), ("per token", 1), ("prompt tokens", 2), ("replica", 1), ("", 1), ("", 1)
)  # fmt: skip
"""The names above the columns of a comparison, and how many columns each one has."""


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
        "penstock simulate trace.jsonl --replicas 4 --prefill-workers 1 --decode-workers 3\n"
        "penstock simulate trace.jsonl --costs costs.json\n"
        "gunzip -c trace.jsonl.gz | penstock simulate - --replicas 4,8",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace, JSON lines; -: standard input (required)")
    parser.add_argument(
        "--replicas",
        metavar="N[,N...]",
        help="number of replicas, or MIN..MAX: it follows the load, as in penstock serve; several are compared in one "
        "table (default: 1, or only the replicas with roles)",
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
    _add_roles(parser)
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


def _add_roles(parser: argparse.ArgumentParser) -> None:
    for role, what in (("prefill", "compute prompts"), ("decode", "go on with the answers")):
        parser.add_argument(
            f"--{role}-workers",
            type=int,
            default=0,
            metavar="N",
            help=f"replicas that {what}, as in penstock serve; beside --replicas in one table (default: 0)",
        )
    for name, default, what in (("copy", 0.005, "each copy of pages"), ("page", 0.001, "each page of 32 tokens in it")):
        parser.add_argument(
            f"--{name}-seconds",
            type=float,
            metavar="S",
            help=f"with --prefill-workers: time of {what} to another replica (default: {default})",
        )


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
        metavar="SECONDS",
        help="with --mtbf: time until a failed replica is back, with an empty cache (default: 10)",
    )
    parser.add_argument("--seed", type=int, help="with --mtbf: seed of the times of failures (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Simulate; print the report, and the progress to standard error."""
    from dataclasses import asdict

    from penstock.cluster.costs import COSTS_348M, read_costs
    from penstock.cluster.handovers import CopyCosts
    from penstock.cluster.replica import ReplicaLimits
    from penstock.cluster.roles import WorkerRoles
    from penstock.cluster.simulate import Simulation, simulate

    fields = {name: getattr(args, option.replace("-", "_")) for option, (name, _) in _LIMITS.items()}
    limits = ReplicaLimits(**{name: value for name, value in fields.items() if value is not None})
    costs = COSTS_348M if args.costs is None else read_costs(args.costs)
    tp = costs.tp if args.tp is None else args.tp
    _refuse_unused(args)
    times = {"restart_s": args.restart, "seed": args.seed, "start_s": args.start_seconds}
    times = {name: value for name, value in times.items() if value is not None}
    roles = WorkerRoles(args.prefill_workers, args.decode_workers)
    seconds = {"copy_s": args.copy_seconds, "page_s": args.page_seconds}
    copies = CopyCosts(**{name: value for name, value in seconds.items() if value is not None})
    numbers = [] if args.replicas is None and roles.num_workers else (args.replicas or "1").split(",")
    kinds: list[tuple[dict[str, Any], int, ScalePolicy | None]] = [({}, *_replicas_of(args, n)) for n in numbers]
    if roles.num_workers:
        kinds.append(({"roles": roles, "copies": copies}, roles.num_workers, None))
    runs = [
        Simulation(replicas, policy, costs, tp, limits, args.mtbf, scale=scale, **times, **own)
        for own, replicas, scale in kinds
        for policy in args.policy.split(",")
    ]
    if args.svg is not None:
        check_writable("svg", args.svg)
    if tp not in (1, costs.tp) and not costs.exchange_s:
        text = f"tp: the costs have no exchange_s, so the estimate for {tp} ranks leaves out their exchanges"
        print(f"penstock: {text}", file=sys.stderr)
    requests = _reader(args.trace, len(runs))
    start = time.perf_counter()
    reports = [simulate(requests(), settings, _Progress()) for settings in runs]
    _tell_time(reports, time.perf_counter() - start)
    if args.svg is not None and reports[0].requests:
        from penstock.bench.charts.latency_chart import draw_policies

        write_file("svg", args.svg, draw_policies(reports, f"{_name(args.trace)} on simulated replicas"))
    if args.json:
        print(json.dumps(asdict(reports[0]) if len(reports) == 1 else {"runs": [asdict(report) for report in reports]}))
    else:
        print(_table(reports[0]) if len(reports) == 1 else _comparison(reports))
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    if not args.mtbf:
        refuse_without("--mtbf", args, "restart", "seed")
    if not args.prefill_workers:
        refuse_without("--prefill-workers", args, "copy_seconds", "page_seconds")
    elif args.svg is not None:
        raise InvalidArgumentError("svg: the chart has no roles; omit it with --prefill-workers", param="svg")
    if ".." not in (args.replicas or ""):
        refuse_without("--replicas MIN..MAX", args, "scale_queue_seconds", "scale_down_seconds", "start_seconds")


def _name(trace: Path) -> str:
    return "standard input" if str(trace) == "-" else trace.name


def _reader(trace: Path, num_runs: int) -> Callable[[], Iterable[TraceRequest]]:
    """Return what reads the trace for each simulation.  A pipe can be read once, so its requests are kept."""
    from penstock.cluster.trace import read_trace

    if num_runs == 1 or trace.is_file():
        return lambda: read_trace(trace)
    requests = [*read_trace(trace)]
    return lambda: requests


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
    seconds = {"queue_s": args.scale_queue_seconds, "down_after_s": args.scale_down_seconds}
    policy = ScalePolicy(low, high, **{name: value for name, value in seconds.items() if value is not None})
    return max(1, low), policy


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("scale-queue-seconds", 2, "with MIN..MAX: seconds of prefill that may wait per replica"),
        ("scale-down-seconds", 120, "with MIN..MAX: end a replica when the others had room for so long"),
        ("start-seconds", 1, "with MIN..MAX: time until a replica that was started serves"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="S", help=f"{text} (default: {default})")


class _Progress:
    """Prints a line for each further ``_PROGRESS_EVERY`` requests."""

    def __init__(self) -> None:
        self._next = _PROGRESS_EVERY

    def __call__(self, number: int, seconds: float) -> None:
        if number >= self._next:
            self._next = number + _PROGRESS_EVERY
            print(f"{number:,} requests, {seconds:,.1f} s simulated", file=sys.stderr, flush=True)


def _tell_time(reports: list[SimulationReport], seconds: float) -> None:
    """Say how long simulations took whose progress was printed.  It is no part of the report, which does not change."""
    num_requests = sum(report.requests for report in reports)
    if num_requests >= _PROGRESS_EVERY:
        print(f"{num_requests:,} requests simulated in {format_seconds(seconds)}", file=sys.stderr, flush=True)


def _costs(report: SimulationReport) -> list[str]:
    return [f"costs of {report.costs['model']}, {report.costs['machine']}", f"({report.costs['source']})", ""]


def _comparison(reports: list[SimulationReport]) -> str:
    """Return a table with a line for each simulation."""
    first = reports[0]
    rows = [["replicas", "policy", "p50", "p90", "p99", "p50, ms", "computed", "cached", "time", "busy", "busiest"]]
    for report in reports:
        times = [report.ttft.get("p50"), report.ttft.get("p90"), report.ttft.get("p99"), report.tpot.get("p50")]
        rows.append(
            [
                report.replica_range or report.roles or f"{report.replicas:,}",
                report.policy,
                *("-" if value is None else f"{value * 1e3:,.1f}" for value in times),
                f"{report.prefilled_tokens:,}",
                f"{report.hit_rate:.0%}",
                format_seconds(report.replica_seconds),
                f"{report.utilisation:.0%}",
                f"{report.load_imbalance:+.1%}",
            ]
        )
    number = f"{first.requests:,} request{'s' if first.requests != 1 else ''}"
    return "\n".join([f"{number}; {_costs(first)[0]}", *_costs(first)[1:], *_aligned(rows)])


def _aligned(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, with the names of ``_GROUPS`` above their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    groups, start = [], 0
    for name, num_columns in _GROUPS:
        width = sum(widths[start : start + num_columns]) + 2 * (num_columns - 1)
        widths[start] += max(0, len(name) - width)
        groups.append(name.rjust(width))
        start += num_columns
    lines = ["  ".join(groups).rstrip()]
    for replicas, policy, *numbers in rows:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join([replicas.rjust(widths[0]), policy.ljust(widths[1]), *cells]))
    return lines


def _table(report: SimulationReport) -> str:
    number = f"{report.replicas:,} replica{'s' if report.replicas > 1 else ''}"
    if report.replica_range:
        number = f"{report.replica_range} replicas (at most {report.replicas:,} at once)"
    if report.roles:
        number = f"{report.roles} replicas for prefill and decode"
    busiest = f"the busiest replica {report.load_imbalance:.1%} above the mean" if report.replicas > 1 else ""
    changes = f"{report.scalings:,} changes of the number" if report.replica_range else ""
    counts = [
        ("requests", f"{report.requests:,}", f"in {format_seconds(report.seconds)}"),
        (
            "prompt tokens",
            f"{report.prefilled_tokens:,}",
            f"computed, {report.cached_tokens:,} from caches ({report.hit_rate:.0%})",
        ),
        ("answer tokens", f"{report.output_tokens:,}", ""),
        ("preemptions", f"{report.preemptions:,}", ""),
        *(
            [("handovers", f"{report.handovers:,}", f"of requests, with {report.copied_pages:,} copied pages")]
            if report.roles
            else []
        ),
        ("failures", f"{report.failures:,}", f"{report.retries:,} requests started again" * bool(report.failures)),
        ("replica time", format_seconds(report.replica_seconds), changes),
        ("utilisation", f"{report.utilisation:.1%}", busiest),
    ]
    width = max(14, *(len(value) for _, value, _ in counts))
    lines = [
        f"{number} of {report.tp} rank{'s' if report.tp > 1 else ''}, {report.policy}; {_costs(report)[0]}",
        *_costs(report)[1:],
        *(f"{name:<16} {value:>{width}}  {text}".rstrip() for name, value, text in counts),
        "",
    ]
    keys = ("mean", "p50", "p90", "p99")
    rows = [["ms", *keys]]
    for name, label in (("ttft", "first token"), ("tpot", "per token"), ("e2e", "whole answer")):
        values = getattr(report, name)
        rows.append([label, *(f"{values[key] * 1e3:,.1f}" if key in values else "-" for key in keys)])
    width = max(10, *(len(cell) for row in rows for cell in row[1:]))
    lines += [" ".join([f"{row[0]:<16}", *(cell.rjust(width) for cell in row[1:])]) for row in rows]
    return "\n".join(lines)
