"""``penstock shard CHECKPOINT OUT``: one file of weights per rank, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import add_options, add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.logs import note

if TYPE_CHECKING:
    from penstock.sharding.strategy import Strategy

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "shard",
        "Write a folder with rank_0, rank_1 ... from a checkpoint folder, for the ranks of --tp, --pp and --cp, or as "
        "a strategy of `penstock plan` says. The source may be such a folder, which is then cut in another way. "
        "--merge writes the checkpoint folder again, byte for byte. The written files are read again and compared with "
        "the source by checksum.",
        "penstock shard my-model my-model-tp2 --tp 2\n"
        "penstock shard my-model my-model-tp2 --strategy strategy.json\n"
        "penstock shard my-model-tp2 my-model-tp4 --strategy tp4.json --from strategy.json\n"
        "penstock shard my-model-tp2 my-model-again --merge",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint folder, ORG/NAME of a downloaded model, or a sharded folder",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
    for name, text in (("--tp", "ranks of tensor parallelism"), ("--pp", "stages"), ("--cp", "parts of a context")):
        parser.add_argument(name, type=int, metavar="N", help=f"cut for N {text}, as `penstock plan` (default: 1)")
    parser.add_argument(
        "--strategy", metavar="FILE", help="cut as this file of `penstock plan --out FILE` says (default: none)"
    )
    add_options(parser, "--network")
    parser.add_argument(
        "--from",
        dest="previous",
        metavar="FILE",
        help="the strategy that CHECKPOINT must be cut with (default: the one in its folder)",
    )
    parser.add_argument("--merge", action="store_true", help="make one folder of a sharded one (default: cut)")
    parser.add_argument("--verbose", action="store_true", help="print the checksum of each parameter (default: of all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Cut or merge; print the checksums."""
    from penstock.runtime.build import Progress
    from penstock.sharding.strategy import Strategy
    from penstock.sharding.write import merge_folder, shard_folder

    layout = _layout(args)
    source, out = Path(downloaded_path(args.checkpoint)), Path(args.out)
    with ProgressLine() as line:

        def show(done: int, total: int) -> None:
            line(Progress("merge" if args.merge else "shard", done, total))

        if args.merge:
            report = merge_folder(source, out, show)
        else:
            if layout is None:
                strategy = Strategy.read(_existing("strategy", args.strategy))
                _check_parts(source, strategy, args.network)
            else:
                strategy = _planned(source, layout, args.network)
            previous = None if args.previous is None else Strategy.read(_existing("from", args.previous))
            report = shard_folder(source, out, strategy, previous=previous, progress=show)
    if args.verbose:
        for name, checksum in report.checksums.items():
            print(f"{checksum}  {name}")
    ranks = "" if args.merge else f"{strategy.world} rank{'s' if strategy.world > 1 else ''}, "
    print(
        f"{args.out}: {ranks}{format_bytes(report.num_bytes)} in {report.seconds:.1f} s; {len(report.checksums)} "
        f"parameters equal the source, sha256 {report.checksum}"
    )
    return 0


def _layout(args: argparse.Namespace) -> RankLayout | None:
    """Return the ranks of --tp, --pp and --cp; None with --strategy or --merge.  Exactly one of the three is given."""
    sizes = {name: size for name in ("tp", "pp", "cp") if (size := getattr(args, name)) is not None}
    if args.merge + (args.strategy is not None) + bool(sizes) != 1:
        raise InvalidArgumentError(
            "--strategy: expected one of --tp N (with --pp N, --cp N), --strategy FILE and --merge", param="strategy"
        )
    for option, value in (("from", args.previous), ("network", args.network)):
        if value is not None and args.merge:
            raise InvalidArgumentError(f"--{option}: expected none with --merge", param=option)
    return RankLayout(**sizes) if sizes else None


def _planned(source: Path, layout: RankLayout, network: str | None) -> Strategy:
    from penstock.graph.strategy import capture_model, make_strategy
    from penstock.sharding.source import open_whole

    return make_strategy(capture_model(open_whole(source), network=network), layout)


def _check_parts(source: Path, strategy: Strategy, network: str | None) -> None:
    """Refuse a strategy with which the ranks cannot run; InvalidArgumentError names the field.

    ``network``: the script of a network that is not built in.  Without it there is nothing to compare with, which a
    warning says.
    """
    from penstock.graph.strategy import capture_model, check_parts, make_strategy
    from penstock.sharding.source import open_whole

    model = open_whole(source)
    strategy.check_model(model.config, model.tensors, source)
    try:
        captured = capture_model(model, network=network)
        needed = make_strategy(captured, strategy.layout)
    except PenstockError as error:
        if network is not None:
            raise
        note("penstock", f"the strategy is not compared with the network: {error}")
        return
    mapped = {piece.tensor for pieces in captured.sources.values() for piece in pieces}
    check_parts(strategy, needed, mapped)


def _existing(option: str, path: str) -> Path:
    if not Path(path).exists():
        raise FileAccessError(f"--{option}: {path}: no such file", param=option)
    return Path(path)
