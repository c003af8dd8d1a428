"""``penstock quantize CHECKPOINT OUT --scheme S [--method M]``: write a folder with quantized weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.model_source import downloaded_path
from penstock.cli.models.quantize_measured import add_mixed_options, is_mixed, prepare_auto, prepare_mixed
from penstock.cli.models.quantize_network import add_network_options, is_network, run_network
from penstock.cli.options import add_options, add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes, printable
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.calibration.quantize import DataOptions, DataReport

__all__ = ["add_parser", "run"]

_METHODS: Final = (
    "rtn", "imatrix", "gptq", "smooth", "smooth+imatrix", "smooth+gptq", "awq", "awq+imatrix", "awq+gptq", "auto",
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "quantize",
        "Write a checkpoint folder with quantized weights. The folder loads wherever a checkpoint folder does. Of a "
        "general network, write an int8 bundle.",
        "penstock quantize my-model my-model-w8 --scheme w8a8\n"
        "penstock quantize my-model my-model-w4 --scheme w4a8 --method gptq --calibration texts.jsonl\n"
        "penstock quantize my-model my-model-mixed --scheme w4a8 --budget 5bits --calibration texts.jsonl\n"
        "penstock quantize net.psm net-int8.psm --scheme w8a8 --calibration samples/\n"
        "penstock quantize net.onnx net-int8.psm --scheme w8a8 --calibration samples/ --size H=32:1024:32",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint folder, a GGUF file, ORG/NAME of a downloaded model, or the bundle NET.psm or the "
        "file NET.onnx of a general network",
    )
    parser.add_argument("out", metavar="OUT", help="the folder, or the bundle, to write; a folder must not exist")
    parser.add_argument(
        "--scheme",
        required=True,
        help="w8a16, w8a8, w4a16 or w4a8, or w8a8_h32 or w4a8_h32, which also rotate inputs by blocks of 32 columns "
        "before they round them, against outliers (required)",
    )
    parser.add_argument(
        "--head",
        choices=("q6_k",),
        help="the output head, and an embedding that is tied to it, in blocks of 6.56 bits; a budget chooses between "
        "these and others itself (default: 8 bits)",
    )
    parser.add_argument(
        "--embedding",
        choices=("int8",),
        help="an embedding that is not the output head as int8, with one scale for each token (default: the type of "
        "the checkpoint)",
    )
    parser.add_argument(
        "--exportable",
        action="store_true",
        help="choose integers that a GGUF file can hold, so that penstock convert OUT FILE.gguf changes no value: "
        "float16 scales, and for 4 bits even offsets from -126 to 0 (default: the integers with the least error)",
    )
    _add_method(parser)
    add_mixed_options(parser)
    add_network_options(parser)
    add_options(parser, "--threads", "--ops")
    parser.set_defaults(run=run)


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default="rtn",
        help="how integers are chosen: rtn rounds to nearest, imatrix weights the error of each column by its inputs, "
        "gptq also corrects each column's error in the later ones, smooth moves large inputs into the weights, awq "
        "searches the scales that do so with the least error; these two may be the first step of another method; auto "
        "tries all and keeps the one that diverges least (default: rtn)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="of a general network a folder of samples (required); else texts for budgets and methods with data: plain "
        "text, or JSON or JSON lines with strings, text or messages; for imatrix also an importance matrix of "
        "llama.cpp (.gguf or .dat) (default: texts that the model "
        "generates)",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="use at most N tokens of the texts, evenly spaced (default: 65536)",
    )
    parser.add_argument(
        "--imatrix-out",
        metavar="FILE",
        help="also write the statistics to FILE, an importance matrix in GGUF for llama.cpp's tools (default: none)",
    )
    parser.add_argument(
        "--smooth-keys",
        action="store_true",
        help="with a --method that has calibration data: also make the dimensions of keys more equal, for --kv-cache "
        "int8 and int4 (default: leave them)",
    )
    parser.add_argument(
        "--rotate",
        choices=("r1", "r2", "r1r2"),
        help="fold rotations into the weights first, against outliers: r1 of the residual stream, r2 of the values of "
        "each head (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize; show progress on standard error and print one line of figures."""
    if is_network(args):
        return run_network(args)
    _check_options(args)
    quantize = _prepared(args)
    from penstock.calibration.unfinished import resumable_output

    with resumable_output(Path(args.out), _tell_kept):
        if args.rotate is None:
            return quantize()
        from penstock.calibration.rotate import rotated_folder

        with rotated_folder(downloaded_path(args.checkpoint), Path(args.out), args.rotate) as folder:
            args.checkpoint = str(folder)
            return quantize()


def _tell_kept(folder: Path) -> None:
    print(
        f"penstock: {printable(str(folder))} keeps finished work. The same command resumes from it. Remove "
        "it if you do not need it.",
        file=sys.stderr,
    )


def _prepared(args: argparse.Namespace) -> Callable[[], int]:
    """Check the options of the method and the files that they name; return what quantizes, which may take hours."""
    if is_mixed(args):
        return prepare_mixed(args)
    if args.method == "auto":
        return prepare_auto(args)
    return _prepare_round(args) if args.method == "rtn" else _prepare_data(args)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, before anything is read."""
    from penstock.quant.scheme import quantizing_scheme

    quantizing_scheme(args.scheme, args.exportable)
    if args.exportable and (is_mixed(args) or args.method == "auto"):
        raise InvalidArgumentError("--exportable: expected a single --method, and no budget", param="exportable")
    if args.smooth_keys and (is_mixed(args) or args.method in ("rtn", "auto")):
        raise InvalidArgumentError(
            "--smooth-keys: expected a single --method with calibration data, such as smooth, and no budget",
            param="smooth_keys",
        )
    if is_mixed(args) and args.head is not None:
        raise InvalidArgumentError("--head: expected no budget with it, which chooses the head", param="head")
    if is_mixed(args) and args.embedding is not None:
        raise InvalidArgumentError("--embedding: expected no budget with it", param="embedding")
    if is_mixed(args) or args.method != "rtn":
        return
    for option in ("calibration", "calibration_tokens", "imatrix_out"):
        if getattr(args, option) is not None:
            name = "--" + option.replace("_", "-")
            raise InvalidArgumentError(f"{name}: expected another --method than rtn, which uses no data", param=option)


def _prepare_round(args: argparse.Namespace) -> Callable[[], int]:
    from penstock.checkpoint.quantize import check_float_weights, plan_weights
    from penstock.models.mapped import open_mapped
    from penstock.quant.scheme import quantizing_scheme

    checkpoint = open_mapped(downloaded_path(args.checkpoint))
    check_float_weights(checkpoint)
    scheme = quantizing_scheme(args.scheme, args.exportable)
    plan_weights(checkpoint, scheme, head=args.head, embedding=args.embedding)
    return lambda: _round(args)


def _round(args: argparse.Namespace) -> int:
    from penstock.checkpoint.quantize import quantize_checkpoint
    from penstock.models.mapped import open_mapped
    from penstock.quant.scheme import quantizing_scheme
    from penstock.runtime.build import Progress

    with ProgressLine() as line:
        report = quantize_checkpoint(
            open_mapped(downloaded_path(args.checkpoint)),
            args.out,
            quantizing_scheme(args.scheme, args.exportable),
            progress=lambda done, total: line(Progress("quantize", done, total)),
            head=args.head,
            embedding=args.embedding,
        )
    print(
        f"{args.out}: {report.scheme}, {report.num_quantized} weights quantized, {format_bytes(report.num_bytes)} "
        f"from {format_bytes(report.source_bytes)} in {report.seconds:.1f} s"
    )
    return 0


def _prepare_data(args: argparse.Namespace) -> Callable[[], int]:
    from penstock.calibration.quantize import DataOptions, check_data
    from penstock.calibration.texts import DEFAULT_TOKENS
    from penstock.models.mapped import open_mapped

    tokens = DEFAULT_TOKENS if args.calibration_tokens is None else args.calibration_tokens
    file = None if args.calibration is None else Path(args.calibration)
    imatrix_out = None if args.imatrix_out is None else Path(args.imatrix_out)
    options = DataOptions(
        args.method,
        file,
        tokens,
        args.threads,
        imatrix_out,
        smooth_keys=args.smooth_keys,
        head=args.head,
        exportable=args.exportable,
        embedding=args.embedding,
    )
    check_data(open_mapped(downloaded_path(args.checkpoint)), Path(args.out), args.scheme, options)
    return lambda: _run_with_data(args, options)


def _run_with_data(args: argparse.Namespace, options: DataOptions) -> int:
    from penstock.calibration.quantize import quantize_with_data

    with ProgressLine() as line:
        report = quantize_with_data(downloaded_path(args.checkpoint), args.out, args.scheme, options, line)
    _print_report(args, report)
    return 0


def _print_report(args: argparse.Namespace, report: DataReport) -> None:
    from penstock.calibration.quantize import SCALING_METHODS

    files, recipe = report.files, report.recipe
    print(
        f"{args.out}: {files.scheme} by {recipe['method']}, {files.num_quantized} weights quantized, "
        f"{format_bytes(files.num_bytes)} from {format_bytes(files.source_bytes)} in {report.seconds:.1f} s; "
        f"{recipe['calibration_tokens']:,} calibration tokens of {printable(recipe['calibration'])}, "
        f"sha256 {recipe['calibration_sha256'][:12]}"
    )
    for names, what in (
        (report.without_data, "without calibration data, rounded to nearest"),
        (
            report.without_gptq,
            "without a positive definite Hessian of as many tokens as columns, rounded as imatrix does",
        ),
    ):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"penstock: {printable(names[0])}{others}: {what}", file=sys.stderr)
    for step in SCALING_METHODS:
        if kinds := recipe.get(f"without_{step}"):
            print(f"penstock: no scales of {step} fit {printable(kinds)}", file=sys.stderr)
    if counts := list(report.expert_tokens.values()):
        few = sum(name in report.expert_tokens for name in report.without_data)
        what = f"{few} of {len(counts)} weights of experts saw too few, and are rounded to nearest"
        if recipe["method"] in SCALING_METHODS:
            what = f"{recipe['method']} rounds all weights of experts to nearest"
        print(f"penstock: experts saw {min(counts):,} to {max(counts):,} calibration tokens; {what}", file=sys.stderr)
