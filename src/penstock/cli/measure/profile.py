"""``penstock profile MODEL``: where the time of a step goes, op by op, beside this machine's limits."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_ops_option, add_verify_option, add_weights_option
from penstock.cli.progress import ProgressLine
from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.bench.profile import PhaseReport, Profile, ProfileReport, Row

__all__ = ["add_parser", "run"]

_WIDE = 106
"""Columns of the terminal from which a table also says what was moved, computed and waited for."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="show where the time of a step goes",
        description="Show where the time of prefill and decode goes, op by op, beside this machine's limits.",
    )
    parser.add_argument("model", metavar="MODEL", help="a .psm bundle or a checkpoint folder")
    parser.add_argument("--phase", choices=("prefill", "decode", "both"), default="both", help="what to run (both)")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="prefill: tokens of the prompt (512, or all that fit)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="decode: tokens before each request's token (128, or all that fit)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="decode: requests that get a token each (1)")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="repeat N times; 0: for a second (default)")
    parser.add_argument("--scheme", help="for a folder; the checkpoint's own type unless given")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: as many as allowed (default)")
    parser.add_argument(
        "--kv-cache",
        choices=("auto", "f32", "bf16", "int8"),
        default="auto",
        help="type of keys and values; auto (default): f32 under the scheme f32, else bf16",
    )
    add_weights_option(parser)
    add_verify_option(parser)
    parser.add_argument("--network", metavar="FILE.py:CLASS", help="your own network script, for a folder")
    parser.add_argument("--per-node", action="store_true", help="every node of the graph instead of kinds of op")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--trace", metavar="FILE", help="write what each thread did, for ui.perfetto.dev")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the ops under this machine's roofline")
    add_ops_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile, write the files asked for, print."""
    from penstock.bench.profile import profile

    what = _what(args)
    if args.plot is not None and Path(args.plot).suffix != ".svg":
        raise InvalidArgumentError(f"plot: {args.plot}: expected a name that ends in .svg", param="plot")
    for path in (args.trace, args.plot):  # rather now than after the work
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise FileAccessError(f"{path}: no such folder")
    progress = ProgressLine()
    try:
        report = profile(what, progress)
    finally:
        progress.close()
    if args.trace is not None:
        from penstock.bench.trace import chrome_trace

        Path(args.trace).write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
    if args.plot is not None:
        from penstock.bench.roofline import draw_roofline

        Path(args.plot).write_text(draw_roofline(report, Path(args.model).name), encoding="utf-8")
    print(json.dumps(_object(report, args.per_node)) if args.json else _text(args, report))
    for path in (args.trace, args.plot):
        if path is not None:
            print(f"written to {path}", file=sys.stderr)
    return 0


def _what(args: argparse.Namespace) -> Profile:
    from penstock.bench.profile import PHASES, Profile

    phases = PHASES if args.phase == "both" else (args.phase,)
    sizes = {}
    for name, phase in (("prompt_tokens", "prefill"), ("context", "decode"), ("batch", "decode")):
        value = getattr(args, name)
        if value is not None:
            if phase not in phases:
                raise InvalidArgumentError(f"{name} goes with the phase {phase}, not with {args.phase}", param=name)
            sizes[name] = value
    return Profile(
        args.model,
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
        lines += ["", "over 100 % of memory: its bytes came from the processor's cache"]
    if above - {"memory"}:
        lines += ["", "over 100 % of an arithmetic peak: something else had the cores while the peak was probed"]
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
        f"{phase.wall_s * 1e3:,.3f} ms ({phase.plain_s * 1e3:,.3f} ms, {rate:,.1f} tokens/s, when nothing is noted)",
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
        if len(name) > name_width:  # the end of a name says which one it is
            name = "..." + name[3 - name_width :]
        return f"{name:<{name_width}}" + "".join(f" {cell:>{w}}" for cell, w in zip(cells, widths, strict=False))

    lines = [line("", columns)]
    lines += [line(name, _cells(row, phase.wall_s, wide)) for name, row in zip(names, rows, strict=True)]
    for name, seconds in phase.between.items():
        lines.append(line(name, ["", f"{seconds * 1e3:,.3f}", f"{seconds / phase.wall_s:.1%}"]))
    calls = sum(row.calls for row in rows)
    lines.append(line("total", [f"{calls:,}", f"{phase.wall_s * 1e3:,.3f}", "100.0%"]))
    if phase.fused:
        lines.append("done by the linears before them: " + ", ".join(f"{n} {op}" for op, n in phase.fused.items()))
    return lines


def _from_layer(name: str) -> str:
    """A node's name from its layer's number on, which is what tells nodes apart."""
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
        f"{row.share_of_limit:.0%} {row.limit}",
    ]
