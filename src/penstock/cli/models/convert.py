"""``penstock convert SOURCE OUT``: write a model in another form."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes, printable

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "convert",
        "Write a model in another form: a checkpoint folder, a bundle if OUT ends in .psm, or a GGUF file if it ends "
        "in .gguf. SOURCE may also have pickled PyTorch weights. What no option changes stays as it is, bit for bit.",
        "penstock convert my-model my-model-bf16 --dtype bf16\npenstock convert old-model-with-bin my-model\n"
        "penstock convert my-model.psm my-model\npenstock convert phi3-model split-model --layout split\n"
        "penstock convert my-model my-model-tuned --lora adapter\n"
        "penstock convert my-model my-model.gguf --dtype q8_0\n"
        "penstock convert my-model-w8a8 my-model-vllm --format compressed-tensors",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint folder, a sharded folder, a bundle, or ORG/NAME of a downloaded model",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        help="the folder to write, which must not exist, or a file that ends in .psm or .gguf, which is replaced",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="f32, f16 or bf16 for all float weights; in a GGUF file also q8_0, q6_k or q4_k (default: as stored)",
    )
    parser.add_argument(
        "--layout",
        metavar="LAYOUT",
        help="split: q, k, v, gate and up in separate tensors, as in llama; fused: q|k|v and gate|up, as in phi3. For "
        "gpt_neox, bloom and falcon: split writes the tensors of Penstock's network, fused the published ones "
        "(default: as stored)",
    )
    parser.add_argument(
        "--lora", metavar="FOLDER", help="add the LoRA adapter in FOLDER to the weights (default: none)"
    )
    parser.add_argument(
        "--max-file-mb",
        type=int,
        default=0,
        metavar="N",
        help="begin another file of weights before one exceeds N million bytes (default: 0, one file)",
    )
    parser.add_argument(
        "--imatrix",
        metavar="FILE",
        help="importance matrix of llama.cpp or of penstock quantize --imatrix-out: the error of a column counts by "
        "the mean square of its inputs, for --dtype q4_k and q6_k (default: all count alike)",
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="compressed-tensors: the folder of a model quantized as w8a8 or w8a16, as transformers and vLLM read it; "
        "the output head and a tied embedding become floats (default: a folder of Penstock)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert; print one line of figures."""
    from penstock.checkpoint.convert import Conversion
    from penstock.runtime.build import Progress
    from penstock.runtime.convert import convert

    lora, imatrix = (None if path is None else Path(path) for path in (args.lora, args.imatrix))
    conversion = Conversion(args.dtype, args.layout, lora, args.max_file_mb, args.format, imatrix)
    start = time.monotonic()
    with ProgressLine() as line:
        report = convert(
            Path(downloaded_path(args.source)),
            Path(args.out),
            conversion,
            lambda done, total: line(Progress("convert", done, total)),
        )
    if report.note:
        print(f"penstock: {printable(report.note)}", file=sys.stderr)
    changed = f", {report.num_changed} with the adapter added" if report.num_changed else ""
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    print(
        f"{args.out}: {report.num_tensors} tensors{changed}, {format_bytes(report.num_bytes)} of weights in {files}, "
        f"{time.monotonic() - start:.1f} s"
    )
    return 0
