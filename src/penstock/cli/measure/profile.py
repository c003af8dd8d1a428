"""``penstock profile MODEL``: show where the time of a step goes, op by op, and the limits of this machine."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_model, add_options, add_parser_of
from penstock.cli.progress import ProgressLine
from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.bench.profile import PhaseReport, Profile, ProfileReport, Row

__all__ = ["add_parser", "run"]

_WIDE = 106
"""The terminal width, in columns, from which a table also has the columns "waits", "MB" and "MOP"."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "profile",
        "Show where the time of prefill and decode goes, op by op, and compare it with the limits of this machine.",
        "penstock profile demo/demo.psm\n"
        "penstock profile demo/demo.psm --phase decode --batch 8 --context 512 --per-node --trace trace.json",
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
        "--steps", type=int, default=0, metavar="N", help="number of passes; 0 (default): as many as fit in one second"
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile, write the requested files, and print the tables."""
    from penstock.bench.profile import profile

    settings = _settings(args)
    for name, path in (("plot", args.plot), ("timeline", args.timeline)):
        if path is not None and Path(path).suffix != ".svg":
            raise InvalidArgumentError(f"--{name}: {path}: expected a name that ends in .svg", param=name)
    for name, path in (("trace", args.trace), ("plot", args.plot), ("timeline", args.timeline)):  # before the work
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise FileAccessError(f"--{name} {path}: no such folder")
    with ProgressLine() as progress:
        report = profile(settings, progress)
    if args.trace is not None:
        from penstock.bench.trace import chrome_trace

        Path(args.trace).write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
    if args.plot is not None:
        from penstock.bench.roofline import draw_roofline

        Path(args.plot).write_text(draw_roofline(report, Path(args.model).name), encoding="utf-8")
    if args.timeline is not None:
        from penstock.bench.timeline import draw_timeline

        Path(args.timeline).write_text(draw_timeline(report, Path(args.model).name), encoding="utf-8")
    print(json.dumps(_object(report, args.per_node)) if args.json else _text(args, report))
    for path in (args.trace, args.plot, args.timeline):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)
    return 0


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


def _text(args: argparse.Namespace, report: ProfileReport) -> str:
    from penstock.bench.verdict import describe_phase

    width = shutil.get_terminal_size((_WIDE, 24)).columns
    threads = _count(report.num_threads, "thread")
    copied = f" (copied in {report.populate_s * 1e3:,.0f} ms)" if report.populate_s else ""
    lines = [
        f"{args.model}: {report.network}, {report.scheme}, {report.cpu_level} x {threads}",
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
    lines += ["", *(describe_phase(phase, report.scheme) for phase in report.phases)]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def _head(phase: PhaseReport, num_threads: int) -> list[str]:
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


def _table(phase: PhaseReport, per_node: bool, width: int) -> list[str]:
    rows = [row for row in (phase.nodes if per_node else phase.kinds) if row.calls]
    wide = width >= _WIDE
    columns = ["calls", "ms", "share", *(["waits", "MB", "MOP"] if wide else []), "GB/s", "GOP/s", "of its limit"]
    widths = [5, 9, 6, *([7, 8, 9] if wide else []), 6, 7, 12]
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
        f"{'>100%' if row.share_of_limit > 1.0 else f'{row.share_of_limit:.0%}'} {row.limit}",
    ]
