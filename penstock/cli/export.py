"""``penstock export MODEL OUT.psm``: a checkpoint folder to one file."""

from __future__ import annotations

import argparse

from penstock.cli.progress import ProgressLine, format_bytes
from penstock.errors import InvalidArgumentError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("export", help="make a bundle (.psm) from a checkpoint folder")
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json and safetensors")
    parser.add_argument("out", metavar="OUT.psm", help="the bundle to write; replaced if it exists")
    parser.add_argument(
        "--scheme", help="f32, f16, bf16, w8a16, w8a8, w4a16 or w4a8; the checkpoint's type unless given"
    )
    parser.add_argument("--network", metavar="FILE.py:CLASS", help="your own network script")
    parser.add_argument(
        "--tail",
        metavar="argmax|topk:K",
        help="end in the likeliest token's id, or in K ids, instead of logits: greedy answers only",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, with progress on stderr and one line of figures."""
    from penstock.quant.scheme import find_scheme
    from penstock.runtime.build import build_in_child

    if not args.out.endswith(".psm"):
        raise InvalidArgumentError(f"{args.out}: the name of a bundle ends in .psm")
    if args.scheme is not None:
        find_scheme(args.scheme)
    progress = ProgressLine()
    try:
        report = build_in_child(
            args.model, args.out, scheme=args.scheme, network=args.network, tail=args.tail, progress=progress
        )
    finally:
        progress.close()
    print(
        f"{args.out}: {report['network']}, {report['scheme']}, {format_bytes(report['file_bytes'])} "
        f"from {format_bytes(report['source_bytes'])} in {report['seconds']:.1f} s"
    )
    if report["tokenizer_note"]:
        print(f"without Python this bundle takes and gives token ids alone: {report['tokenizer_note']}")
    return 0
