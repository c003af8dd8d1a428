"""``penstock eval MODEL``: measure the quality of a model, alone or against another one, with its size and speed."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_model, add_options, add_parser_of, check_writable, write_file
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.bench.quality.bootstrap import Interval
    from penstock.bench.quality.evaluate import Evaluation
    from penstock.bench.quality.report import Divergence, ModelReport, QualityReport, TaskReport, TextReport

__all__ = ["add_parser", "run"]

_WIDTH: Final = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "eval",
        "Measure the perplexity of a text and the accuracy of multiple-choice tasks. With --against, compare the "
        "model token by token with another one, and say whether it is worth what it costs.",
        "penstock eval demo/demo.psm --text demo/model/valid.txt --max-windows 16\n"
        "penstock eval demo/model --scheme w4a8 --against demo/model --against-scheme f32 --plot quality.svg\n"
        "penstock eval demo/demo.psm --tasks examples/evaluation/python_lines.yaml --json",
    )
    add_model(parser, parser, "local model")
    add_options(parser, "--scheme")
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="the model to compare with, usually the one of highest precision; it has the same tokens (default: none)",
    )
    parser.add_argument(
        "--against-scheme",
        metavar="SCHEME",
        help="--scheme of OTHER; without --against, OTHER is MODEL in this scheme (default: its own type)",
    )
    _add_text_options(parser)
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="FILE",
        help="multiple-choice questions: lines of JSON with question, choices and gold, or a configuration of lm-eval "
        "(.yaml) with a local data file; may be repeated (default: none)",
    )
    parser.add_argument(
        "--no-speed", action="store_true", help="do not measure speed and memory (default: measure them)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: tables)")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a chart of the figures (default: none)")
    add_options(parser, "--kv-cache")
    parser.add_argument(
        "--against-kv-cache",
        choices=("auto", "f32", "bf16", "int8", "int4"),
        help="--kv-cache of OTHER; without --against, OTHER is MODEL with this type (default: auto)",
    )
    add_options(parser, "--threads", "--network", "--verify", "--ops")
    parser.set_defaults(run=run)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("the text and its windows")
    text.add_argument(
        "--text",
        metavar="FILE",
        help='a plain text, or lines of JSON (.jsonl) with "text", "messages" or "prompt" and "completion" (default: '
        "the built-in sample, 32 kB of prose, code and conversation)",
    )
    text.add_argument(
        "--convention",
        choices=("penstock", "transformers", "llama.cpp"),
        default="penstock",
        help="which tokens of a window are scored: all (penstock, default), all but the first (transformers), or the "
        "second half (llama.cpp)",
    )
    text.add_argument(
        "--window", type=int, metavar="N", help="tokens per window (default: 512, transformers 1024, or as many as fit)"
    )
    text.add_argument(
        "--stride", type=int, metavar="N", help="tokens from one window to the next (default: those of --window)"
    )
    text.add_argument(
        "--bos",
        choices=("auto", "first", "each", "none"),
        default="auto",
        help="begin-of-text token: where the tokenizer puts it, before each window, or none; auto (default) does as "
        "the convention",
    )
    text.add_argument(
        "--max-windows", type=int, default=0, metavar="N", help="windows from the beginning; 0 (default): all"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the figures.  The exit status is 0 whatever the verdict is."""
    from penstock.bench.quality.evaluate import evaluate

    if args.plot is not None:
        if Path(args.plot).suffix != ".svg":
            raise InvalidArgumentError(f"--plot: {args.plot}: expected a name that ends in .svg", param="plot")
        check_writable("plot", Path(args.plot))
    question = _question(args)
    with ProgressLine(ticks=False) as progress:
        report = evaluate(question, progress)
    if args.plot is not None:
        from penstock.bench.charts.quality_chart import draw_quality

        write_file("plot", Path(args.plot), draw_quality(report))
    if args.json:
        from dataclasses import asdict

        print(json.dumps(asdict(report)))
    else:
        print("\n".join(_text(report)))
    if args.plot is not None:
        print(f"written to {args.plot}", file=sys.stderr)
    return 0


def _question(args: argparse.Namespace) -> Evaluation:
    from penstock.bench.quality.evaluate import Evaluation, Subject
    from penstock.bench.quality.windows import WindowRule

    shared = {"threads": args.threads, "network": args.network, "verify": args.verify}
    path = downloaded_path(args.model)
    model = Subject(path, args.kv_cache, scheme=args.scheme, **shared)
    against = None
    if args.against is not None or args.against_scheme is not None or args.against_kv_cache is not None:
        other = path if args.against is None else downloaded_path(args.against)
        scheme = args.against_scheme
        if scheme is None and args.against is None:
            scheme = args.scheme
        against = Subject(other, args.against_kv_cache or "auto", scheme=scheme, **shared)
    rule = WindowRule(args.convention, args.window, args.stride, args.bos, args.max_windows)
    return Evaluation(model, against, args.text, rule, tuple(args.tasks), not args.no_speed)


def _text(report: QualityReport) -> list[str]:
    models = [report.model, *([report.against] if report.against is not None else [])]
    lines = [*_head(report.text, report.model), "", *_figures(models, report.tasks)]
    if report.against is not None and report.divergence is not None and report.verdict is not None:
        lines += ["", *_comparison(report.divergence, report.tasks), ""]
        lines += textwrap.wrap(report.verdict.sentence, _WIDTH)
    return lines


def _head(text: TextReport, model: ModelReport) -> list[str]:
    stride = "" if text.stride == text.length else f" every {text.stride:,}"
    documents = "" if text.num_documents == 1 else f"{text.num_documents} documents, "
    bos = {"first": "where the tokenizer puts it", "each": "before each window", "none": "not added"}[text.bos]
    lines = [
        f"{text.name} (sha256 {text.sha256[:12]}): {documents}{text.num_tokens:,} tokens",
        f"{text.num_scored:,} tokens scored in {_count(text.num_windows, 'window')} of {text.length:,} tokens{stride}, "
        f"convention of {text.convention}, begin-of-text token {bos}",
    ]
    if model.speed is not None:
        lines.append(
            f"speed on {model.speed.cpu_level} x {_count(model.speed.num_threads, 'thread')}: a prompt of "
            f"{_count(model.speed.prompt_tokens, 'token')}, an answer of {model.speed.new_tokens}"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _figures(models: Sequence[ModelReport], tasks: Sequence[TaskReport]) -> list[str]:
    """Return the table with a column for each model."""
    from penstock.bench.quality.verdict import names_of

    rows: list[tuple[str, list[str]]] = [("", names_of(models))]

    def add(name: str, value: Callable[[ModelReport], str]) -> None:
        rows.append((name, [value(model) for model in models]))

    add("weights", lambda model: format_bytes(model.weight_bytes))
    add("bits per weight", lambda model: f"{model.bits_per_weight:.2f}")
    add("keys and values", lambda model: model.kv_cache)
    if all(model.speed is not None for model in models):
        add("prefill, tokens/s", lambda model: _rate(model.speed.prefill_tokens_per_s) if model.speed else "")
        add("decode, tokens/s", lambda model: _rate(model.speed.decode_tokens_per_s) if model.speed else "")
        add("peak memory", lambda model: format_bytes(model.speed.peak_rss_bytes) if model.speed else "")
    add(
        "perplexity", lambda model: f"{model.perplexity:,.4g}" if model.perplexity >= 1e4 else f"{model.perplexity:.3f}"
    )
    add("  95 % interval", _perplexity_interval)
    for task in tasks:
        results = [task.model, *([task.against] if task.against is not None else [])]
        rows.append((f"{task.name}, acc", [_share(result.acc, result.acc_stderr) for result in results]))
        rows.append((f"{task.name}, acc_norm", [_share(result.acc_norm, result.acc_norm_stderr) for result in results]))
    first = max(len(name) for name, _ in rows)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(models))]
    return [
        f"{name:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def _perplexity_interval(model: ModelReport) -> str:
    interval = model.perplexity_interval
    return "-" if interval is None else f"{interval[0]:,.4g} to {interval[1]:,.4g}"


def _share(share: float, error: float | None) -> str:
    return f"{100 * share:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _comparison(divergence: Divergence, tasks: Sequence[TaskReport]) -> list[str]:
    """Return the table of the differences; each line has a value and what it means."""
    from penstock.bench.quality.verdict import change_in_percent

    change, mean, same = divergence.nll_change, divergence.mean, divergence.same_top
    detectable = "" if change.detectable is None else f"; detectable from {change_in_percent(change.detectable)} on"
    rows = [
        ("perplexity", change_in_percent(change.value), _interval(change, change_in_percent) + detectable),
        ("KL divergence", f"{mean.value:.3g}", f"nats per token; {_interval(mean, lambda x: f'{x:.3g}')}"),
        (
            "",
            "",
            f"median {divergence.median:.2g}, 90 % {divergence.p90:.2g}, 99 % {divergence.p99:.2g}, "
            f"99.9 % {divergence.p999:.2g}, max {divergence.max:.2g}",
        ),
        ("same top token", f"{100 * same.value:.2f} %", _interval(same, lambda x: f"{100 * x:.2f}")),
        ("probability", f"{100 * divergence.rms_probability_change:.2f} %", "RMS change of that of the right token"),
    ]
    for task in tasks:
        if task.change is not None:
            task_change = task.change
            margin = f"{task_change.margin:+.3f}" + (
                "" if task_change.margin_stderr is None else f" ± {task_change.margin_stderr:.3f}"
            )
            about = (
                f"acc; {task_change.lost} of {task.num_questions:,} lost, {task_change.won} won; margin {margin} nats"
            )
            rows.append((task.name, f"{100 * task_change.acc:+.1f} %", about))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{first}}  {value:>{second}}  {about}".rstrip() for name, value, about in rows]


def _interval(interval: Interval, shown: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        from penstock.bench.quality.bootstrap import MIN_WINDOWS

        return f"fewer than {MIN_WINDOWS} windows have no interval"
    return f"95 % interval {shown(interval.low)} to {shown(interval.high)}"
