"""``penstock stage MODEL --primary HOST:PORT --token-file FILE``: compute a stage of a pipeline of another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_options, add_parser_of, host_and_port
from penstock.errors import FileAccessError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "stage",
        "Compute some layers of a model for `penstock run --pp N --stage-port PORT` on another machine.",
        "penstock stage model.psm --primary big1.example:9100 --token-file token.txt --ca-file ca.pem",
    )
    parser.add_operand_flag(parser, "-m", "--model", metavar="MODEL", is_first=True)
    parser.add_argument("model", metavar="MODEL", help="the same .psm bundle that the other machine runs")
    parser.add_argument("--primary", required=True, metavar="HOST:PORT", help="address of its --stage-port (required)")
    parser.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="file with the shared secret (required)"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="PEM file with the certificates to trust (default: those of the system)",
    )
    parser.add_argument(
        "--once", action="store_true", help="exit when the pipeline ends (default: wait for the next one)"
    )
    add_options(parser, "--threads", "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Join the pipeline and compute until it or a signal ends the stage."""
    import asyncio

    from penstock.runtime.remote_stage import join_pipeline
    from penstock.serving.workers.remote_worker_client import read_bytes, read_token

    address = host_and_port("primary", args.primary)
    path = Path(args.model)
    if not path.is_file():
        raise FileAccessError(f"{path}: no such file; a stage needs the same .psm bundle that the other machine runs")
    ca = None if args.ca_file is None else read_bytes(args.ca_file)
    token = read_token(args.token_file)
    return asyncio.run(join_pipeline(path, address, token, ca, threads=args.threads, again=not args.once))
