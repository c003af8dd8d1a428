"""``penstock profile MODEL``: show where the time of a step goes, op by op, and the limits of this machine."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_model, add_options, add_parser_of
from penstock.cli.progress import ProgressLine
from penstock.errors import FileAccessError, InvalidArgumentError, ServiceError
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.bench.phase_report import PhaseReport, ProfileReport, Row
    from penstock.bench.profile import Profile
    from penstock.client.admin import AdminClient

__all__ = ["add_parser", "run"]

_WIDE = 106
"""The terminal width, in columns, from which a table also has the columns "waits", "MB" and "MOP"."""


_SERVICE_STEPS: Final = 200
_RECORD_SECONDS: Final = 60.0
"""The longest that a service records by default."""
_ANSWER_SECONDS: Final = 60.0
"""Limit on the time that a service may take to answer, beside the time to record."""
_SERVICE_OPTIONS: Final = {"seconds": None, "worker": "", "limits": False, "admin_key_file": None, "tls_ca": None}
_LOCAL_OPTIONS: Final[dict[str, Any]] = {
    "phase": "both", "prompt_tokens": None, "context": None, "batch": None, "scheme": None, "threads": 0,
    "kv_cache": "auto", "weights": "mmap", "verify": "once", "network": None, "ops": [],
}  # fmt: skip
"""Options of a model that runs here, with their defaults."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "profile",
        "Show where the time of prefill and decode goes, op by op, and compare it with the limits of this machine.",
        "penstock profile demo/demo.psm\n"
        "penstock profile demo/demo.psm --phase decode --batch 8 --context 512 --per-node --trace trace.json\n"
        "penstock profile demo --service admin.sock --steps 200 --timeline steps.svg",
    )
    add_model(parser, parser, "local model")
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode", "both"),
        default="both",
        help="phase to run (default: both, and prefill for an encoder)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="prefill: tokens of the prompt (default: 512, or as many as fit)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="decode: tokens in the context of each request (default: 128, or as many as fit)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="decode: requests per step (default: 1)")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="number of passes; 0 (default): as many as fit in one second, or 200 steps of a service",
    )
    add_options(parser, "--scheme", "--threads", "--kv-cache", "--weights", "--verify", "--network")
    parser.add_argument("--per-node", action="store_true", help="show every node of the graph (default: kinds of op)")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace of each thread for ui.perfetto.dev (default: none)"
    )
    parser.add_argument(
        "--plot", metavar="FILE.svg", help="write a chart of the ops under the roofline of this machine (default: none)"
    )
    parser.add_argument(
        "--timeline", metavar="FILE.svg", help="write a chart of what each thread does in a step (default: none)"
    )
    add_options(parser, "--ops")
    _add_service_options(parser)
    parser.set_defaults(run=run)


def _add_service_options(parser: argparse.ArgumentParser) -> None:
    service = parser.add_argument_group("a running service")
    service.add_argument(
        "--service",
        metavar="URL",
        help="record steps of a running service while it answers: the path of its --admin-socket, or https://HOST:PORT "
        "with --admin-key-file; MODEL is then the model's name there (default: run the model here)",
    )
    service.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file whose first key is an admin key of the service, for a URL; http shows it to the network "
        "(default: none)",
    )
    service.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the authorities to trust for an https URL (default: the system's)",
    )
    service.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="limit on the time to record (default: 60, or less if the service's --max-seconds leaves less)",
    )
    service.add_argument(
        "--worker", default="", metavar="NAME", help="the worker to record (default: the one with most open requests)"
    )
    service.add_argument(
        "--limits",
        action="store_true",
        help="measure the machine's limits in the worker, which answers nothing for half a second (default: with "
        "--plot only)",
    )


def run(args: argparse.Namespace) -> int:
    """Profile, write the requested files, and print the tables."""
    for name, path in (("plot", args.plot), ("timeline", args.timeline)):
        if path is not None and Path(path).suffix != ".svg":
            raise InvalidArgumentError(f"--{name}: {path}: expected a name that ends in .svg", param=name)
    for name, path in (("trace", args.trace), ("plot", args.plot), ("timeline", args.timeline)):  # before the work
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise FileAccessError(f"--{name} {path}: no such folder")
    live: dict[str, Any] = {}
    if args.service is None:
        report = _profile_here(args)
    else:
        report, live = _profile_service(args)
    if args.trace is not None:
        from penstock.bench.charts.trace import chrome_trace

        Path(args.trace).write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
    if args.plot is not None:
        from penstock.bench.charts.roofline import draw_roofline

        Path(args.plot).write_text(draw_roofline(report, Path(args.model).name), encoding="utf-8")
    if args.timeline is not None:
        from penstock.bench.charts.timeline import draw_timeline

        Path(args.timeline).write_text(draw_timeline(report, Path(args.model).name), encoding="utf-8")
    if args.json:
        values = _object(report, args.per_node)
        print(json.dumps({**values, **live}))
    else:
        print("\n".join([_text(args, report, live.get("worker", "")), *(_requests(live["requests"]) if live else [])]))
    for path in (args.trace, args.plot, args.timeline):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)
    return 0


def _profile_here(args: argparse.Namespace) -> ProfileReport:
    from penstock.bench.profile import profile

    for name, default in _SERVICE_OPTIONS.items():
        if getattr(args, name) != default:
            raise InvalidArgumentError(f"--{name} requires --service", param=name)
    settings = _settings(args)
    with ProgressLine() as progress:
        return profile(settings, progress)


def _profile_service(args: argparse.Namespace) -> tuple[ProfileReport, dict[str, Any]]:
    """Return the report, and beside it the name of the worker and the requests that ended meanwhile."""
    from penstock.bench.live_profile import report_from

    for name, default in _LOCAL_OPTIONS.items():
        if getattr(args, name) != default:
            raise InvalidArgumentError(
                f"--{name.replace('_', '-')} has no effect on a running service. Leave it out.", param=name
            )
    answer = _admin_client(args).profile(
        args.model,
        steps=args.steps or _SERVICE_STEPS,
        seconds=args.seconds,
        limits=args.limits or args.plot is not None,
        worker=args.worker,
    )
    try:
        report, live = report_from(answer), {name: answer[name] for name in ("worker", "requests")}
    except (KeyError, TypeError, ValueError):
        raise ServiceError(
            f"{args.service}: expected the profile of a service of Penstock {__version__}, got another answer", 0
        ) from None
    if not report.phases:
        raise ServiceError(
            f"{args.model}: no step was recorded in worker {answer['worker']}: no request ran there. Send requests "
            "meanwhile, or name another worker with --worker.",
            0,
        )
    return report, live


def _admin_client(args: argparse.Namespace) -> AdminClient:
    from penstock.client.address import Address
    from penstock.client.admin import AdminClient
    from penstock.serving.keys import read_keys

    path = args.service.removeprefix("unix:")
    if "://" not in path:
        if args.admin_key_file is not None:
            message = "--admin-key-file: expected none with an admin socket, which only the service's owner can open"
            raise InvalidArgumentError(message, param="admin_key_file")
        return AdminClient(Path(path))
    if not path.startswith(("http://", "https://")):
        raise InvalidArgumentError(
            f"--service: expected https://HOST:PORT, http:// or a socket, got {path!r:.200}", param="service"
        )
    if args.admin_key_file is None:
        message = "--service: expected --admin-key-file with a URL, or the path of the service's --admin-socket"
        raise InvalidArgumentError(message, param="admin_key_file")
    key = read_keys(args.admin_key_file)[0]
    timeout_s = (args.seconds or _RECORD_SECONDS) + _ANSWER_SECONDS
    return AdminClient(None, Address(path, api_key=key, timeout_s=timeout_s, retries=0, tls_ca=args.tls_ca))


def _requests(requests: list[dict[str, float]]) -> list[str]:
    """Return a table of where the time of requests went: its parts at the median and at the 90th percentile."""
    if not requests:
        return ["", "no request ended meanwhile"]
    parts = (
        ("total", "total_s"),
        ("queue", "queue_s"),
        ("prefill", "prefill_s"),
        ("decode", "decode_s"),
        ("service and network", "service_s"),
    )
    lines = ["", f"{_count(len(requests), 'request')} ended meanwhile", f"{'':26} {'p50 ms':>10} {'p90 ms':>10}"]
    for label, name in parts:
        values = sorted(request[name] * 1e3 for request in requests)
        middle, high = (values[min(len(values) - 1, len(values) * share // 100)] for share in (50, 90))
        lines.append(f"{label:26} {middle:>10,.3f} {high:>10,.3f}")
    return lines


def _settings(args: argparse.Namespace) -> Profile:
    from penstock.bench.profile import PHASES, Profile

    phases = PHASES if args.phase == "both" else (args.phase,)
    sizes = {}
    for name, phase in (("prompt_tokens", "prefill"), ("context", "decode"), ("batch", "decode")):
        value = getattr(args, name)
        if value is not None:
            if phase not in phases:
                raise InvalidArgumentError(f"{name} requires the phase {phase}, not {args.phase}", param=name)
            sizes[name] = value
    return Profile(
        downloaded_path(args.model),
        scheme=args.scheme,
        phases=phases,
        threads=args.threads,
        kv_cache=args.kv_cache,
        weights=args.weights,
        steps=args.steps,
        network=args.network,
        verify=args.verify,
        **sizes,
    )


def _object(report: ProfileReport, per_node: bool) -> dict[str, Any]:
    from dataclasses import asdict

    phases = []
    for phase in report.phases:
        fields = {name: value for name, value in vars(phase).items() if name not in ("spans", "nodes", "kinds")}
        fields["kinds"] = [asdict(row) for row in phase.kinds]
        if per_node:
            fields["nodes"] = [asdict(row) for row in phase.nodes]
        phases.append(fields)
    return {**vars(report), "phases": phases}


def _text(args: argparse.Namespace, report: ProfileReport, worker: str) -> str:
    from penstock.bench.verdict import describe_phase

    width = shutil.get_terminal_size((_WIDE, 24)).columns
    threads = _count(report.num_threads, "thread")
    copied = f" (copied in {report.populate_s * 1e3:,.0f} ms)" if report.populate_s else ""
    of_worker = f" in worker {worker}" if worker else ""
    lines = [
        f"{args.model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}{of_worker}",
        f"weights {report.weights}{copied}, keys and values {report.kv_cache}",
    ]
    for phase in report.phases:
        lines += ["", *_head(phase, report.num_threads), "", *_table(phase, args.per_node, width)]
    above = {row.limit for phase in report.phases for row in phase.kinds if row.share_of_limit > 1.0}
    if "memory" in above:
        lines += ["", "More than 100 % of memory bandwidth means that the data was served from CPU caches."]
    if above - {"memory"}:
        lines += [
            "",
            "More than 100 % of an arithmetic peak means that other work used the cores while the peak was measured.",
        ]
    if all(phase.ops_per_s for phase in report.phases):
        lines += ["", *(describe_phase(phase, report.scheme) for phase in report.phases)]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def _head(phase: PhaseReport, num_threads: int) -> list[str]:
    if phase.seen:
        return _head_of_service(phase)
    if phase.phase == "prefill":
        what = f"a prompt of {_count(phase.num_tokens, 'token')} in {_count(phase.num_steps, 'step')}"
    else:
        what = f"a token for {_count(phase.num_requests, 'request')} after a context of {phase.context:,}"
    threads = f"; {phase.alike} of {_count(phase.passes, 'pass')} on {_count(phase.step_threads, 'thread')}"
    if phase.alike == phase.passes and phase.step_threads == num_threads:
        threads = ""
    rate = phase.num_tokens / phase.plain_s
    peaks = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in phase.ops_per_s.items())
    return [
        f"{phase.phase}: {what}{threads}",
        f"{phase.wall_s * 1e3:,.3f} ms ({phase.plain_s * 1e3:,.3f} ms, {rate:,.1f} tokens/s, without profiling)",
        f"limits of {_count(phase.step_threads, 'thread')}: memory {phase.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"arithmetic in GOP/s {peaks}",
    ]


def _head_of_service(phase: PhaseReport) -> list[str]:
    """Describe steps of a running service, with means over those that were recorded."""
    requests, tokens = _count(phase.num_requests, "request"), _count(phase.num_tokens, "token")
    plain = f" ({phase.plain_s * 1e3:,.3f} ms without recording)" if phase.plain_s else ""
    lines = [
        f"{phase.phase}: {phase.passes:,} of {_count(phase.seen, 'step')} recorded; on average {requests}, {tokens}, "
        f"after a context of {phase.context:,}",
        f"{phase.wall_s * 1e3:,.3f} ms{plain}; {_count(phase.step_threads, 'thread')} in {phase.alike:,} of them",
    ]
    if phase.ops_per_s:
        peaks = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in phase.ops_per_s.items())
        lines.append(f"limits: memory {phase.read_bytes_per_s / 1e9:.1f} GB/s, arithmetic in GOP/s {peaks}")
    return lines


def _table(phase: PhaseReport, per_node: bool, width: int) -> list[str]:
    rows = [row for row in (phase.nodes if per_node else phase.kinds) if row.calls]
    wide = width >= _WIDE
    has_limits = any(row.limit for row in rows)
    columns = ["calls", "ms", "share", *(["waits", "MB", "MOP"] if wide else []), "GB/s", "GOP/s"]
    columns += ["of its limit"] if has_limits else []
    widths = [5, 9, 6, *([7, 8, 9] if wide else []), 6, 7, 12][: None if has_limits else -1]
    fixed = sum(widths) + len(widths)
    names = [f"{row.op} {_from_layer(row.name)}" if per_node else row.name for row in rows]
    name_width = min(max(map(len, [*names, *phase.between])), max(26, width - fixed))

    def line(name: str, cells: list[str]) -> str:
        if len(name) > name_width:  # the end of a name identifies the node
            name = "..." + name[3 - name_width :]
        return f"{name:<{name_width}}" + "".join(f" {cell:>{w}}" for cell, w in zip(cells, widths, strict=False))

    lines = [line("", columns)]
    lines += [line(name, _cells(row, phase.wall_s, wide)) for name, row in zip(names, rows, strict=True)]
    for name, seconds in phase.between.items():
        lines.append(line(name, ["", f"{seconds * 1e3:,.3f}", f"{seconds / phase.wall_s:.1%}"]))
    calls = sum(row.calls for row in rows)
    lines.append(line("total", [f"{calls:,}", f"{phase.wall_s * 1e3:,.3f}", "100.0%"]))
    if phase.fused:
        lines.append("computed by the linears before them: " + ", ".join(f"{n} {op}" for op, n in phase.fused.items()))
    return lines


def _from_layer(name: str) -> str:
    """Return a node's name from the number of its layer on, which identifies the node."""
    return re.sub(r"^.*?[.](?=[0-9]+[.])", "", name).replace("_proj", "")


def _cells(row: Row, wall_s: float, wide: bool) -> list[str]:
    busy = row.busy_seconds
    moved = f"{row.num_bytes / busy / 1e9:,.1f}" if busy and row.num_bytes else ""
    computed = f"{row.num_ops / busy / 1e9:,.1f}" if busy and row.num_ops else ""
    amounts = [f"{row.wait_seconds * 1e3:,.3f}", f"{row.num_bytes / 1e6:,.1f}", f"{row.num_ops / 1e6:,.0f}"]
    return [
        f"{row.calls:,}",
        f"{row.seconds * 1e3:,.3f}",
        f"{row.seconds / wall_s:.1%}",
        *(amounts if wide else []),
        moved,
        computed,
        f"{'>100%' if row.share_of_limit > 1.0 else f'{row.share_of_limit:.0%}'} {row.limit}" if row.limit else "",
    ]
