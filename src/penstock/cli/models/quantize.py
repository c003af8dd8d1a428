"""``penstock quantize CHECKPOINT OUT --scheme S``: write a checkpoint folder with quantized weights."""

from __future__ import annotations

import argparse

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "quantize",
        "Write a checkpoint folder with quantized weights. The folder loads wherever a checkpoint folder does.",
        "penstock quantize my-model my-model-w8 --scheme w8a8",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint folder, a GGUF file, or ORG/NAME of a downloaded model"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
    parser.add_argument("--scheme", required=True, help="w8a16, w8a8, w4a16 or w4a8 (required)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize; show progress on standard error and print one line of figures."""
    from penstock.checkpoint.quantize import quantize_checkpoint
    from penstock.models.mapped import open_mapped
    from penstock.runtime.build import Progress

    with ProgressLine() as line:
        report = quantize_checkpoint(
            open_mapped(downloaded_path(args.checkpoint)),
            args.out,
            args.scheme,
            progress=lambda done, total: line(Progress("quantize", done, total)),
        )
    print(
        f"{args.out}: {report.scheme}, {report.num_quantized} weights quantized, {format_bytes(report.num_bytes)} "
        f"from {format_bytes(report.source_bytes)} in {report.seconds:.1f} s"
    )
    return 0
