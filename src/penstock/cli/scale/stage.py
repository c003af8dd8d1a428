"""``penstock stage MODEL --primary HOST:PORT --token-file FILE``: compute a stage of a pipeline of another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_joining_options, add_options, add_parser_of, joining_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "stage",
        "Compute some layers of a model for another machine, which runs `penstock run`, `chat`, `serve`, `worker` or "
        "`bench` with --pp N --stage-port PORT. With --tp there, the stage has several ranks, which this "
        "command starts; --threads is then per rank.",
        "penstock stage model.psm --primary big1.example:9100 --token-file token.txt --ca-file ca.pem",
    )
    parser.add_operand_flag(parser, "-m", "--model", metavar="MODEL", is_first=True)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the same .psm bundle that the other machine runs, or a folder that `penstock shard` or `penstock export "
        "--pp` cut, with the parts of this machine's ranks",
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="N",
        help="compute the stage with rank N of the pipeline, from 1 (default: the only one in the folder; of a whole "
        "bundle any)",
    )
    add_joining_options(
        parser, "its --stage-port", "exit when the pipeline ends or refuses this stage (default: wait for the next one)"
    )
    add_options(parser, "--scheme", "--threads", "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Join the pipeline and compute until it or a signal ends the stage."""
    import asyncio

    from penstock.config import check_integer
    from penstock.core.comm import MAX_RANKS
    from penstock.runtime.ranks.remote_stage import StageSource, join_pipeline

    address, token, ca = joining_of(args)
    source = StageSource(Path(args.model), check_integer("rank", args.rank, 0, MAX_RANKS - 1), args.scheme)
    return asyncio.run(join_pipeline(source, address, token, ca, threads=args.threads, again=not args.once))
