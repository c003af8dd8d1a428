"""``penstock export MODEL OUT.psm``: make a bundle from a checkpoint folder or a configuration file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from penstock.cli.models.onnx_source import add_onnx_options, is_onnx_file, read_onnx_file
from penstock.cli.options import add_options, add_parser_of, spellings
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "export",
        "Make a bundle from a checkpoint folder, a GGUF file or an ONNX file. Pass MODEL and OUT.psm, or a YAML file "
        "with --config-path or --model-dir.",
        "penstock export my-model my-model.psm --scheme w8a8\npenstock export smollm2-135m smollm2.psm --yes\n"
        "penstock export my-model my-model-tp2 --tp 2 --pp 2\npenstock export --config-path run_model.yaml\n"
        "penstock export net.onnx net.psm --size batch=1:64 --size H=32:1024:32\n"
        "penstock export net.onnx net.psm --custom-ops my_ops.py --ops ./libmy_ops.so",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint folder, a GGUF file, an ONNX file, or ORG/NAME of a hub"
    )
    parser.add_argument("out", metavar="OUT.psm", nargs="?", help="the bundle to write; an existing file is replaced")
    parser.add_argument(
        *spellings("--config-path"), metavar="FILE.yaml", help="a YAML file with run_mode: export (default: none)"
    )
    parser.add_argument(
        *spellings("--model-dir"), metavar="DIR", help="a folder with one YAML file and the checkpoint (default: none)"
    )
    parser.add_argument(
        "--config",
        metavar="DIR",
        help="a folder with config.json and the tokenizer, for a MODEL of weights only: a folder of *.safetensors, or "
        "one such file (default: those beside the weights)",
    )
    add_options(parser, "--scheme", "--network")
    parser.add_argument(
        "--tail",
        metavar="argmax|topk:K",
        help="end the graph in the likeliest token id, or the K likeliest, which allows greedy answers only (default: "
        "logits)",
    )
    add_onnx_options(parser)
    _add_check(parser)
    _add_no_winograd(parser)
    add_options(parser, "--yes", "--ops")
    for name, text in (("--tp", "ranks"), ("--pp", "stages"), ("--cp", "parts of a context")):
        parser.add_argument(
            name,
            type=int,
            metavar="N",
            help=f"write a bundle for each rank of N {text} to the new folder OUT, as rank_0.psm, rank_1.psm ... "
            "(default: one bundle)",
        )
    parser.add_argument(
        "--rounded",
        action="store_true",
        help="with --tp, under w8a8, w4a8, w8a16 or w4a16: ranks send activations as the integers that linears round "
        "them to, which takes fewer bytes and one more small exchange; for links between hosts (default: as float32)",
    )
    parser.set_defaults(run=run)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help="of an ONNX file: run the file and the bundle on the same random inputs first, and write nothing if they "
        "differ; names the first node that does (default: off)",
    )


def _add_no_winograd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-winograd",
        action="store_true",
        help="of an ONNX file: compute all 3x3 convolutions directly, which is slower, with weights of 9/16 of the "
        "size (default: by Winograd's F(2x2, 3x3) where that is faster)",
    )


def run(args: argparse.Namespace) -> int:
    """Export; show progress on standard error and print one line of figures."""
    from penstock.graph.passes.append_tail import check_tail
    from penstock.offline.export import export_config, with_options
    from penstock.offline.export_config import ExportConfig, read_export_config
    from penstock.quant.scheme import find_scheme

    if args.model is not None and is_onnx_file(args.model):
        return _export_onnx(args)
    for name in ("size", "check", "custom_ops", "no_winograd"):
        if getattr(args, name):
            option = name.replace("_", "-")
            raise InvalidArgumentError(f"--{option}: expected an ONNX file as MODEL", param=name)
    if args.scheme is not None:
        find_scheme(args.scheme)
    if args.tail is not None:
        check_tail(args.tail)
    options = {"scheme": args.scheme, "network": args.network, "tail": args.tail}
    source = _source(args)
    if (args.tp, args.pp, args.cp) != (None, None, None):
        if args.config is not None:
            raise InvalidArgumentError("--config: expected one bundle, got --tp, --pp or --cp", param="config")
        return _export_ranks(args, source)
    if args.rounded:
        raise InvalidArgumentError("--rounded requires --tp", param="rounded")
    if args.config is not None and source is not None:
        raise InvalidArgumentError("--config: expected MODEL and OUT.psm, got a configuration file", param="config")
    if source is not None:
        config = with_options(read_export_config(source), options, source)
    else:
        if not args.out.endswith(".psm"):
            raise InvalidArgumentError(f"{args.out}: the name of a bundle must end in .psm")
        from penstock.cli.model_source import model_path

        source = Path(args.model) if args.config is not None else Path(model_path(args, args.model))
        config = ExportConfig(source, Path(args.out), None, **options, config=args.config)
    with ProgressLine() as progress:
        path, report = export_config(config, progress)
    also = "" if config.increment is None else f" (also {config.increment}, the same file)"
    print(
        f"{path}{also}: {report['network']}, {report['scheme']}, {format_bytes(report['file_bytes'])} "
        f"from {format_bytes(report['source_bytes'])} in {report['seconds']:.1f} s"
    )
    if report["tokenizer_note"]:
        print(f"without Python this bundle reads and writes token ids only: {report['tokenizer_note']}")
    return 0


def _export_onnx(args: argparse.Namespace) -> int:
    for name in ("scheme", "network", "tail", "config", "config_path", "model_dir", "tp", "pp", "cp"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise InvalidArgumentError(f"--{option}: expected a language model, got an ONNX file", param=name)
    if args.rounded:
        raise InvalidArgumentError("--rounded: expected a language model, got an ONNX file", param="rounded")
    if args.out is None or not args.out.endswith(".psm"):
        raise InvalidArgumentError(f"OUT.psm: expected a name that ends in .psm, got {args.out}", param="out")
    start = time.monotonic()
    network = read_onnx_file(args.model, args)
    checked = network.check(winograd=not args.no_winograd) if args.check else None
    if checked is not None:
        checked.expect_passed()
    saved = network.save(args.out, winograd=not args.no_winograd)
    nodes = f"{saved.num_nodes} node{'s' if saved.num_nodes != 1 else ''}"
    print(
        f"{saved.path}: {network.name}, {nodes}, {format_bytes(saved.file_bytes)} in {time.monotonic() - start:.1f} s"
    )
    for kind, tensors in (("input", network.inputs), ("output", network.outputs)):
        for tensor in tensors:
            print(f"{kind} {tensor.name}: {tensor.dtype} [{', '.join(tensor.sizes)}]")
    if checked is not None:
        print(checked.text())
    return 0


def _export_ranks(args: argparse.Namespace, source: Path | None) -> int:
    from penstock.cli.model_source import model_path
    from penstock.runtime.export_ranks import export_ranks

    if source is not None:
        name = next(name for name in ("tp", "pp", "cp") if getattr(args, name) is not None)
        raise InvalidArgumentError(f"--{name}: expected MODEL and OUT, got a configuration file", param=name)
    layout = RankLayout(*(1 if size is None else size for size in (args.tp, args.pp, args.cp)))
    options = {"scheme": args.scheme, "network": args.network, "tail": args.tail}
    start = time.monotonic()
    with ProgressLine() as progress:
        model = Path(model_path(args, args.model))
        num_bytes = export_ranks(model, Path(args.out), layout, rounded=args.rounded, progress=progress, **options)
    print(f"{args.out}: {layout.world} ranks, {format_bytes(num_bytes)} in {time.monotonic() - start:.1f} s")
    return 0


def _source(args: argparse.Namespace) -> Path | None:
    """Return the YAML file or its folder; None for MODEL and OUT.psm."""
    ways = [args.model is not None or args.out is not None, args.config_path is not None, args.model_dir is not None]
    if sum(ways) != 1 or (ways[0] and args.out is None):
        raise InvalidArgumentError("export: expected MODEL and OUT.psm, or --config-path FILE.yaml, or --model-dir DIR")
    if args.model_dir is not None and not Path(args.model_dir).is_dir():
        raise FileAccessError(f"--model-dir: {args.model_dir}: no such folder")
    path = args.config_path or args.model_dir
    return None if path is None else Path(path)
