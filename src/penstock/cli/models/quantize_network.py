"""The part of ``penstock quantize`` for general networks: a float32 bundle or an ONNX file in, an int8 bundle out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.models.onnx_source import add_onnx_options, is_onnx_file, read_onnx_file
from penstock.cli.progress import ProgressLine, format_bytes, printable
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.networks.int8.quantize import Int8Report

__all__ = ["add_network_options", "is_network", "run_network"]

_ONNX: Final = ("size", "custom_ops")
_OWN: Final = ("ranges", "keep", "max_error")
_OTHERS: Final = (
    "calibration_tokens", "imatrix_out", "smooth_keys", "rotate", "head", "embedding", "exportable", "budget", "max_kl",
    "min_speed", "levels", "units", "plot",
)  # fmt: skip


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of general networks."""
    group = parser.add_argument_group(
        "general networks",
        "int8 convolutions and linears for an ONNX file, or for a bundle that penstock export or penstock.capture "
        "made; --calibration is a folder with a .npz file for each sample of the inputs, or a .npy file if "
        "there is one input",
    )
    add_onnx_options(group)
    group.add_argument(
        "--ranges",
        choices=("mse", "minmax", "percentile", "kl"),
        help="how the range of an activation follows from the samples: the one with the least squared error as its "
        "histogram estimates it, its largest magnitude, that of 99.99 %% of its numbers, or the one whose int8 "
        "distribution diverges least (default: mse)",
    )
    group.add_argument(
        "--keep",
        action="append",
        metavar="NODE",
        help="a node that stays float32, by the name that penstock predict --profile shows, or a pattern with *; "
        "repeat for more (default: none)",
    )
    group.add_argument(
        "--max-error",
        type=float,
        metavar="PART",
        help="the largest error of an output, as a part of its root mean square, such as 0.05; the nodes that add most "
        "to it stay float32 (default: any)",
    )


def is_network(args: argparse.Namespace) -> bool:
    """Return True for a bundle and an ONNX file; refuse options that the kind of source does not have."""
    is_onnx = is_onnx_file(args.checkpoint)
    is_general = is_onnx or Path(args.checkpoint).suffix.lower() == ".psm"
    for name in (*(_OTHERS if is_general else _OWN), *(() if is_onnx else _ONNX)):
        if getattr(args, name) not in (None, False, []):
            option = "--" + name.replace("_", "-")
            kind = "a checkpoint of a language model" if is_general else "the bundle of a general network"
            kind = "an ONNX file" if name in _ONNX else kind
            raise InvalidArgumentError(f"{option}: expected {kind}, got {args.checkpoint}", param=name)
    return is_general


def run_network(args: argparse.Namespace) -> int:
    """Quantize the network, and print what it costs and gains."""
    from penstock.networks.int8.quantize import Int8Options, check_arguments, quantize_network
    from penstock.runtime.build import Progress

    if args.scheme != "w8a8":
        raise InvalidArgumentError(
            f"--scheme: expected w8a8 for a general network, got {args.scheme}", param="scheme"
        )  # fmt: skip
    if args.method != "rtn":
        raise InvalidArgumentError(
            f"--method: expected rtn for a general network, got {args.method}", param="method"
        )  # fmt: skip
    path = args.checkpoint
    options = Int8Options(args.ranges or "mse", tuple(args.keep or ()), args.max_error, args.threads or 0)
    check_arguments(args.out, args.calibration, options)  # before the source is read, and the script of --custom-ops
    source = read_onnx_file(path, args) if is_onnx_file(path) else downloaded_path(path)
    with ProgressLine() as line:
        report = quantize_network(
            source, args.out, args.calibration, options,
            lambda done, total: line(Progress("quantize", done, total)), path,
        )  # fmt: skip
    print(_text(args.out, report))
    worst = max((error.relative for error in report.errors), default=0.0)
    if args.max_error is not None and not worst <= args.max_error:
        print(f"--max-error    holds for the samples that gave the ranges; on the others the error is {worst:.2%}")
    return 0


def _text(out: str, report: Int8Report) -> str:
    lines = [
        f"{out}: {report.num_int8} of {report.num_candidates} convolutions and linears in int8, "
        f"{report.num_conversions} conversions, {format_bytes(report.num_bytes)} from "
        f"{format_bytes(report.source_bytes)}"
    ]
    if report.kept:
        lines.append(f"float32        {printable(', '.join(report.kept))}")
    lines += [
        f"output         {printable(error.name)}: error {error.relative:.2%} of its root mean square, largest "
        f"{error.largest:.2%}, same top {error.agreement:.2%}, KL divergence {error.divergence:.2g} nats"
        for error in report.errors
    ]
    same = "the samples that gave the ranges" if report.num_judged == report.num_samples else "samples held out"
    lines.append(f"judged on      {report.num_judged} samples, {same}; ranges from {report.num_samples}")
    speed = report.source_ms / max(report.int8_ms, 1e-9)
    lines.append(f"time           {report.int8_ms:.2f} ms from {report.source_ms:.2f} ms, {speed:.2f} times as fast")
    return "\n".join(lines)
