"""The parts of ``penstock quantize`` that measure: budgets of mixed precision, and ``--method auto``."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.progress import ProgressLine, format_bytes, format_seconds
from penstock.errors import FileAccessError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.calibration.auto import AutoReport
    from penstock.calibration.budget import Budget
    from penstock.calibration.mixed import MixedOptions, MixedReport
    from penstock.calibration.quantize import DataOptions

__all__ = ["add_mixed_options", "is_mixed", "prepare_auto", "prepare_mixed"]

_BUDGETS: Final = ("budget", "max_kl", "min_speed")
_DETAILS: Final = ("levels", "units", "plot")
_NEW_TOKENS: Final = 64


def add_mixed_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of mixed precision."""
    group = parser.add_argument_group(
        "mixed precision",
        "measure what each unit of weights costs, and give some of them a higher scheme than --scheme",
    )
    group.add_argument(
        "--budget",
        metavar="SIZE",
        help="the size of the result: bits per weight of the whole model, such as 4.8bits, or all weights, such as "
        "600MB (default: none)",
    )
    group.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="the smallest result that diverges from the original by at most so much, in nats per token "
        "(default: none)",
    )
    group.add_argument(
        "--min-speed",
        metavar="SPEED",
        help="the best result that decodes at least so fast on this machine, such as 50tok/s (default: none)",
    )
    group.add_argument(
        "--levels",
        metavar="SCHEMES",
        help="the schemes that a unit may have, the lowest first, such as w4a8,w8a8,bf16 (default: --scheme and 8 "
        "bits, or the type of the checkpoint)",
    )
    group.add_argument(
        "--units",
        choices=("fused", "tensor"),
        help="fused: weights that are computed together, such as q, k and v, have one scheme; tensor: each has its own "
        "(default: fused)",
    )
    group.add_argument(
        "--plot", metavar="FILE", help="draw what each unit costs, by layer, as a picture in SVG (default: none)"
    )


def is_mixed(args: argparse.Namespace) -> bool:
    """Return True if a budget is given; refuse more than one, and details without one."""
    budgets = [name for name in _BUDGETS if getattr(args, name) is not None]
    if len(budgets) > 1:
        names = " and ".join(_option(name) for name in budgets)
        raise InvalidArgumentError(f"{_option(budgets[1])}: expected one budget, got {names}", param=budgets[1])
    for name in _DETAILS:
        if not budgets and getattr(args, name) is not None:
            raise InvalidArgumentError(
                f"{_option(name)}: expected --budget, --max-kl or --min-speed with it, got none", param=name
            )
    if budgets and args.imatrix_out is not None:
        raise InvalidArgumentError(f"--imatrix-out: expected no {_option(budgets[0])} with it", param="imatrix_out")
    return bool(budgets)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _budget(args: argparse.Namespace) -> Budget:
    from penstock.calibration.budget import Budget, parse_size_budget, parse_speed

    if args.budget is not None:
        return parse_size_budget(args.budget)
    return Budget(max_kl=args.max_kl) if args.max_kl is not None else parse_speed(args.min_speed)


def prepare_mixed(args: argparse.Namespace) -> Callable[[], int]:
    """Check the options; return what chooses schemes by measurement, and prints the units and the figures."""
    from penstock.calibration.mixed import MixedOptions, check_mixed
    from penstock.calibration.outputs import check_parent
    from penstock.calibration.texts import DEFAULT_TOKENS
    from penstock.models.mapped import open_mapped

    options = MixedOptions(
        _budget(args),
        args.method,
        tuple(args.levels.split(",")) if args.levels is not None else (),
        args.units or "fused",
        None if args.calibration is None else Path(args.calibration),
        DEFAULT_TOKENS if args.calibration_tokens is None else args.calibration_tokens,
        args.threads,
    )
    check_mixed(open_mapped(downloaded_path(args.checkpoint)), Path(args.out), args.scheme, options)
    if args.plot is not None:
        check_parent("plot", Path(args.plot))
    return lambda: _run_mixed(args, options)


def _run_mixed(args: argparse.Namespace, options: MixedOptions) -> int:
    from penstock.calibration.mixed import quantize_mixed

    source = downloaded_path(args.checkpoint)
    with ProgressLine() as line:
        report = quantize_mixed(source, args.out, args.scheme, options, line, _speed_probe(args.threads))
    print("\n".join([*_table(report), "", *_figures(args.out, report)]))
    if args.plot is not None:
        _plot(Path(args.plot), args.checkpoint, report)
    return 0


def _speed_probe(threads: int) -> Callable[[Path], float]:
    """Return what measures the decoding of a bundle as ``penstock bench`` does."""

    def probe(bundle: Path) -> float:
        from penstock.bench.measure import Bench, bench
        from penstock.core.native import Model

        with Model.open(bundle) as model:
            num_tokens = max(1, min(_NEW_TOKENS, model.info.context_len // 4))
        settings = Bench(bundle, threads=threads, prompt_tokens=num_tokens, new_tokens=num_tokens, batches=(1,))
        return statistics.median(bench(settings, None).generation_runs)

    return probe


def _table(report: MixedReport) -> list[str]:
    """Return a line for each layer: what each kind of unit costs in the lowest scheme, and the scheme that it got."""
    kinds = list(dict.fromkeys(unit.kind for unit in report.units))
    layers = list(dict.fromkeys(unit.layer for unit in report.units))
    cells = {(unit.layer, unit.kind): f"{max(unit.costs.values()):+.5f} {unit.scheme}" for unit in report.units}
    widths = {kind: max(len(kind), *(len(cell) for (_, own), cell in cells.items() if own == kind)) for kind in kinds}
    lines = [f"divergence that a unit adds in {report.levels[0]}, and the scheme that it got"]
    inner = [kind for kind in kinds if any((layer, kind) in cells for layer in layers if layer != "head")]
    lines.append("layer  " + "  ".join(f"{kind:<{widths[kind]}}" for kind in inner).rstrip())
    for layer in layers:
        if layer != "head":
            row = "  ".join(f"{cells.get((layer, kind), ''):<{widths[kind]}}" for kind in inner)
            lines.append(f"{layer:<5}  {row}".rstrip())
    heads = [unit for unit in report.units if unit.layer == "head"]
    return lines + [f"head   {unit.kind}  {cells[unit.layer, unit.kind]}" for unit in heads]


def _figures(out: str, report: MixedReport) -> list[str]:
    counts = ", ".join(f"{count} in {level}" for level, count in report.counts().items())
    own = report.divergence
    lines = [
        f"{out}: {report.bits:.3f} bits per weight, {format_bytes(report.num_bytes)} of weights; units: {counts}",
        f"KL {own.mean:.5f} ± {own.error:.5f} nats per token, same top token {100 * own.same_top:.1f} %, on "
        f"{report.judged_tokens:,} held-out tokens (sum of the units: {report.predicted:.5f})",
    ]
    for name, level, (bits, divergence) in (
        ("lowest", report.levels[0], report.lowest),
        ("highest", report.levels[-1], report.highest),
    ):
        lines.append(f"{name:<8} all units in {level}: {bits:.3f} bits, KL {divergence.mean:.5f}")
    if report.speed is not None:
        lines.append(f"decode   {report.speed:.1f} tokens/s, measured on this machine")
    return [*lines, f"measured and written in {format_seconds(report.seconds)}"]


def _plot(path: Path, name: str, report: MixedReport) -> None:
    from penstock.bench.charts.sensitivity_chart import draw_sensitivity

    losses: dict[str, dict[str, float]] = {}
    for unit in report.units:
        losses.setdefault(unit.layer, {})[unit.kind] = 1000 * max(unit.costs.values())
    about = f"{name}: one unit at a time in {report.levels[0]}, all others in {report.levels[-1]}"
    picture = draw_sensitivity(losses, "What each unit of weights costs", about, "divergence, thousandths of a nat")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise FileAccessError(f"plot: {path}: {error.strerror}", param="plot") from None


def prepare_auto(args: argparse.Namespace) -> Callable[[], int]:
    """Check the options; return what tries the methods, keeps the best, and prints the figures of each."""
    from penstock.calibration.auto import check_auto
    from penstock.calibration.quantize import DataOptions
    from penstock.calibration.texts import DEFAULT_TOKENS
    from penstock.models.mapped import open_mapped

    if args.imatrix_out is not None:
        raise InvalidArgumentError("--imatrix-out: expected a single --method with it, got auto", param="imatrix_out")
    options = DataOptions(
        "gptq",
        None if args.calibration is None else Path(args.calibration),
        DEFAULT_TOKENS if args.calibration_tokens is None else args.calibration_tokens,
        args.threads,
        head=args.head,
        embedding=args.embedding,
    )
    check_auto(open_mapped(downloaded_path(args.checkpoint)), Path(args.out), args.scheme, options)
    return lambda: _run_auto(args, options)


def _run_auto(args: argparse.Namespace, options: DataOptions) -> int:
    from penstock.calibration.auto import quantize_auto

    with ProgressLine() as line:
        report = quantize_auto(downloaded_path(args.checkpoint), args.out, args.scheme, options, line)
    print("\n".join(_auto_lines(args.out, args.scheme, report)))
    return 0


def _auto_lines(out: str, scheme: str, report: AutoReport) -> list[str]:
    lines = [f"{'method':<16}{'KL':>9}{'± ':>10}{'same top':>10}"]
    for own in report.candidates:
        if own.divergence is None:
            lines.append(f"{own.method:<16}not tried: {own.reason}")
            continue
        kl = own.divergence
        mark = "  chosen" if own.method == report.method else ""
        lines.append(f"{own.method:<16}{kl.mean:>9.5f}{kl.error:>9.5f} {100 * kl.same_top:>8.1f} %{mark}")
    return [
        *lines,
        f"{out}: {scheme} by {report.method}, {format_bytes(report.num_bytes)}; judged on {report.judged_tokens:,} "
        f"held-out tokens; {format_seconds(report.seconds)}",
    ]
