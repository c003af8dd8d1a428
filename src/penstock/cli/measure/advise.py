"""``penstock advise MODEL``: which scheme, and which way to run it, suit this machine and the user's wishes."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_options, add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.validation import refusal

if TYPE_CHECKING:
    from penstock.bench.advise import Advice, SchemeRow, Wishes
    from penstock.bench.step_probe import Expectation

__all__ = ["add_parser", "run"]

_WISHES: Final = {
    "first_token": ("MS", "longest time to the first token, in ms, when nothing else runs"),
    "latency": ("MS", "longest time per further token, in ms, with all requests running"),
    "throughput": ("TOK/S", "minimum tokens per second, summed over all requests, prompts included"),
    "memory": ("GIB", "maximum memory, in GiB"),
}
_MAX_WISH: Final = 1e9
_NAMES: Final = {name: f"--{name.replace('_', '-')}" for name in _WISHES} | {"available_memory": "available memory"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "advise",
        "Measure this machine for a minute at most, plan the memory of the model in each scheme, and advise on a "
        "scheme and a way to run it: Python, bundle, service or device.",
        "penstock advise demo/demo.psm\n"
        "penstock advise demo/model --latency 5 --concurrency 8 --memory 1\n"
        "penstock advise demo/model --throughput 500 --concurrency 32 --json",
    )
    add_options(parser, "local model")
    for name, (unit, text) in _WISHES.items():
        parser.add_argument(_NAMES[name], type=float, metavar=unit, help=f"{text} (default: no limit)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="tokens per prompt (default: 512, or as many as fit)"
    )
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="tokens per answer (default: 128, or as many as fit)"
    )
    parser.add_argument("--schemes", metavar="S,S...", help="schemes to compare (default: all)")
    parser.add_argument(
        "--quality",
        action="append",
        default=[],
        metavar="FILE",
        help="output of penstock eval --against --json, whose perplexity counts for its schemes; may be repeated "
        "(default: the perplexity of the demo model)",
    )
    add_options(parser, "--kv-cache", "--threads", "--network")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: tables)")
    add_options(parser, "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the advice.  The exit status is 0 even if no scheme meets every wish."""
    from penstock.bench.advise import Advise, advise
    from penstock.bench.quality.costs import read_costs

    wishes = _wishes(args)
    model = downloaded_path(args.model)
    fields: dict[str, Any] = {} if args.schemes is None else {"schemes": tuple(args.schemes.split(","))}
    question = Advise(
        model,
        wishes,
        concurrency=args.concurrency,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        kv_cache=args.kv_cache,
        threads=args.threads,
        network=args.network,
        costs=read_costs(args.quality),
        **fields,
    )
    with ProgressLine() as progress:
        advice = advise(question, progress)
    print(json.dumps(_object(advice, model)) if args.json else "\n".join(_text(advice, model, args.model)))
    return 0


def _wishes(args: argparse.Namespace) -> Wishes:
    from penstock.bench.advise import Wishes

    for name in _WISHES:
        value = getattr(args, name)
        if value is not None and not 0 < value <= _MAX_WISH:
            raise refusal(name, f"a number above 0 and at most {_MAX_WISH:g}", value)
    memory = None if args.memory is None else int(args.memory * (1 << 30))
    return Wishes(
        first_token_s=_seconds(args.first_token),
        latency_s=_seconds(args.latency),
        tokens_per_s=args.throughput,
        memory_bytes=memory,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _object(advice: Advice, model: str) -> dict[str, Any]:
    from dataclasses import asdict

    from penstock.bench.ways import bundle_commands, ways

    rows = []
    for row in advice.rows:
        fields = asdict(row)
        for name in ("first_token", "token", "token_alone"):
            expectation = getattr(row, name)
            if expectation is not None:
                fields[name]["share_of_limit"] = expectation.share_of_limit
        fields["commands"] = bundle_commands(advice, model, row.scheme)[1]
        fields["ways"] = [asdict(way) for way in ways(advice, model, row)]
        rows.append(fields)
    return asdict(advice) | {"rows": rows}


def _text(advice: Advice, model: str, name: str) -> list[str]:
    from penstock.bench.ways import ways

    chosen = next((row for row in advice.rows if row.scheme == advice.recommended), None)
    lines = [*_head(advice, name), "", *_schemes(advice), "", *_rooflines(advice), "", *_verdict(advice, chosen)]
    shown = chosen or _closest(advice)
    if shown is None:
        return lines
    closest = "" if chosen else ", which comes closest"
    lines += ["", f"Ways to run {shown.scheme}{closest}", ""]
    for way in ways(advice, model, shown):
        times = (
            f"first token {_ms(way.first_token_s)}, then {_ms(way.token_s)} per token, {format_bytes(way.memory_bytes)}"
        )
        lines += [f"{way.name:<9}{way.choose}", f"{'':9}{times}", *_wrapped(way.note, 9)]
        lines += [f"{'':9}  {command}" for command in way.commands]
    if advice.only_scheme not in (None, shown.scheme):
        lines += ["", "CHECKPOINT is the folder that the model was made from."]
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _head(advice: Advice, name: str) -> list[str]:
    machine, work = advice.machine, advice.work
    peaks = ", ".join(f"{kind} {value / 1e9:,.0f}" for kind, value in machine.ops_per_s.items())
    requests = "one request" if work.concurrency == 1 else f"{work.concurrency} requests at once, each"
    busy = []
    if advice.load_average > machine.num_threads / 2:
        busy = [
            f"The load average was {advice.load_average:.1f} at the start: other processes used the cores, so these "
            "times are longer than on an idle machine."
        ]
    mixed = []
    if advice.mixed_schemes:
        counts = ", ".join(f"{count} in {scheme}" for scheme, count in sorted(advice.mixed_schemes.items()))
        mixed = [f"Its linears have several schemes: {counts}. The row {advice.only_scheme} is the model as it is."]
    return [
        f"{name}: {advice.network}, {advice.num_layers} layers, {machine.cpu_level} x {machine.num_threads} threads",
        f"this machine: memory reads {machine.read_bytes_per_s / 1e9:.1f} GB/s, GOP/s {peaks}; "
        f"{format_bytes(advice.available_bytes)} of memory available",
        *mixed,
        *busy,
        f"expected for {requests} with a prompt of {work.prompt_tokens} tokens and an answer of {work.new_tokens}:",
    ]


def _schemes(advice: Advice) -> list[str]:
    from penstock.bench.step_probe import seconds_of

    alone = advice.work.concurrency > 1
    heads = [
        "",
        "perplexity",
        "memory",
        "first token",
        "per token",
        *(["alone"] if alone else []),
        "tokens/s",
        "wishes",
    ]
    rows = []
    for row in advice.rows:
        times = [_ms(seconds_of(part)) for part in (row.first_token, row.token, row.token_alone)]
        rows.append(
            [
                row.scheme,
                f"{row.perplexity_cost:+.2%}" + ("" if row.is_measured else "*"),
                format_bytes(row.memory_bytes),
                *(times if alone else times[:2]),
                _rate(row.tokens_per_s) if row.tokens_per_s else "-",
                ("misses " + ", ".join(_NAMES[name] for name in row.missed)) if row.missed else "met",
            ]
        )
    notes = ["per token: a step of all requests" + ("; alone: of one request" if alone else "")]
    if any(row.is_measured for row in advice.rows):
        notes.append("perplexity: as measured of this model (--quality)")
    if not all(row.is_measured for row in advice.rows):
        notes.append("* perplexity of the demo model against f32 (docs/guides/quantization.md)")
    return [*_table(heads, rows), *notes]


def _rooflines(advice: Advice) -> list[str]:
    rows = []
    for row in advice.rows:
        for name, part in (("first token", row.first_token), ("per token", row.token)):
            if part is not None:
                rows.append([row.scheme, name, *_roofline(part)])
    if not rows:
        return ["Nothing was measured: no scheme fits into the available memory."]
    heads = ["", "", "MB", "GOP", "limit", "at best", "in the core", "in Python", "share"]
    lines = ["The roofline behind these times", "", *_table(heads, rows)]
    if any(part.share_of_limit > 1 for row in advice.rows for part in (row.first_token, row.token) if part is not None):
        lines.append("A share above 100 %: data came from CPU caches, or other work ran while the limit was measured.")
    cut = [row for row in advice.rows if row.num_layers and row.num_layers < advice.num_layers]
    if cut:
        counts = ", ".join(f"{row.scheme} {row.num_layers} layers, {row.probed_prompt} tokens" for row in cut)
        lines += _wrapped(f"Measured in part, scaled by the roofline: {counts}.", 0)
    return lines


def _roofline(part: Expectation) -> list[str]:
    return [
        f"{part.bound.num_bytes / 1e6:,.1f}",
        f"{part.bound.num_ops / 1e9:,.2f}",
        part.bound.limit,
        _ms(part.bound.seconds),
        _ms(part.native_s),
        _ms(part.engine_s),
        f"{part.share_of_limit:.0%}",
    ]


def _verdict(advice: Advice, chosen: SchemeRow | None) -> list[str]:
    if chosen is not None:
        text = (
            f"Recommended: {chosen.scheme}. It generates the most tokens/s among the schemes that meet the wishes and "
            "whose perplexity is within 0.2 % of the best of these."
        )
        return textwrap.wrap(text, 100)
    lines = ["No scheme meets every wish on this machine. The best of all schemes:"]
    measured = [row for row in advice.rows if row.first_token is not None and row.token is not None]
    best = {"memory": format_bytes(min(row.memory_bytes for row in advice.rows))}
    if measured:
        best |= {
            "first_token": _ms(min(row.first_token.seconds for row in measured if row.first_token)),
            "latency": _ms(min(row.token.seconds for row in measured if row.token)),
            "throughput": f"{_rate(max(row.tokens_per_s for row in measured))} tokens/s",
        }
    missed = {name for row in advice.rows for name in row.missed}
    lines += [f"  {_NAMES[name]}: {value}" for name, value in best.items() if name in missed]
    if "available_memory" in missed and "memory" not in missed:
        lines.append(f"  memory: {best['memory']} needed, {format_bytes(advice.available_bytes)} available")
    return lines


def _closest(advice: Advice) -> SchemeRow | None:
    """Return the measured scheme that misses fewest wishes, then the fastest."""
    measured = [row for row in advice.rows if row.token is not None]
    return min(measured, key=lambda row: (len(row.missed), -row.tokens_per_s), default=None)


def _ms(seconds: float | None) -> str:
    """Format a time with two or three digits: 0.23 ms, 45.6 ms, 678 ms, 12.3 s."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:,.2f} s" if seconds < 9.995 else f"{seconds:,.1f} s"
    value = seconds * 1e3
    return f"{value:,.2f} ms" if value < 9.995 else f"{value:,.1f} ms" if value < 99.95 else f"{value:,.0f} ms"


def _rate(tokens_per_s: float) -> str:
    """Format a rate: 0.42, 12.3, 1,234."""
    value = tokens_per_s
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in columns: the first two columns of text and the last to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            f"{cell:<{w}}" if _is_text(heads[i]) else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_text(head: str) -> bool:
    return head in ("", "limit", "wishes")
