"""``penstock export MODEL OUT.psm``: a checkpoint folder to one file; or as a configuration file says."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_ops_option
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.errors import InvalidArgumentError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "export",
        help="make a bundle (.psm) from a checkpoint folder",
        description="Make a bundle: MODEL and OUT.psm name both, or a YAML file says (--config-path, --model-dir).",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder with config.json and safetensors")
    parser.add_argument("out", metavar="OUT.psm", nargs="?", help="the bundle to write; replaced if it exists")
    parser.add_argument("--config-path", metavar="FILE.yaml", help="a file with run_mode: export")
    parser.add_argument("--model-dir", metavar="DIR", help="a folder with one YAML file, and the checkpoint beside it")
    parser.add_argument(
        "--scheme", help="f32, f16, bf16, w8a16, w8a8, w4a16 or w4a8; the checkpoint's type unless given"
    )
    parser.add_argument("--network", metavar="FILE.py:CLASS", help="your own network script")
    parser.add_argument(
        "--tail",
        metavar="argmax|topk:K",
        help="end in the likeliest token's id, or in K ids, instead of logits: greedy answers only",
    )
    add_ops_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, with progress on stderr and one line of figures."""
    from penstock.graph.passes.append_tail import check_tail
    from penstock.offline.export import export_config, with_options
    from penstock.offline.export_config import ExportConfig, read_export_config
    from penstock.quant.scheme import find_scheme

    if args.scheme is not None:
        find_scheme(args.scheme)
    if args.tail is not None:
        check_tail(args.tail)
    given = {"scheme": args.scheme, "network": args.network, "tail": args.tail}
    source = _source(args)
    if source is not None:
        config = with_options(read_export_config(source), given, source)
    else:
        if not args.out.endswith(".psm"):
            raise InvalidArgumentError(f"{args.out}: the name of a bundle ends in .psm")
        config = ExportConfig(Path(args.model), Path(args.out), None, **given)
    progress = ProgressLine()
    try:
        path, report = export_config(config, progress)
    finally:
        progress.close()
    also = "" if config.increment is None else f" (and {config.increment}, the same file)"
    print(
        f"{path}{also}: {report['network']}, {report['scheme']}, {format_bytes(report['file_bytes'])} "
        f"from {format_bytes(report['source_bytes'])} in {report['seconds']:.1f} s"
    )
    if report["tokenizer_note"]:
        print(f"without Python this bundle takes and gives token ids alone: {report['tokenizer_note']}")
    return 0


def _source(args: argparse.Namespace) -> Path | None:
    """The YAML file or its folder; None for MODEL and OUT.psm."""
    ways = [args.model is not None or args.out is not None, args.config_path is not None, args.model_dir is not None]
    if sum(ways) != 1 or (ways[0] and args.out is None):
        raise InvalidArgumentError("export takes MODEL and OUT.psm, or --config-path FILE.yaml, or --model-dir DIR")
    if args.model_dir is not None and not Path(args.model_dir).is_dir():
        raise InvalidArgumentError(f"--model-dir: {args.model_dir}: no such folder")
    found = args.config_path or args.model_dir
    return None if found is None else Path(found)
