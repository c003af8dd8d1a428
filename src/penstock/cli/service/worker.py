"""``penstock worker MODEL --primary HOST:PORT --token-file FILE``: share the load of a service on another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_ops_option
from penstock.cli.service.serve import add_run_options, options_of
from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("worker", help="run a model for a service on another machine")
    parser.add_argument("model", metavar="MODEL", help="the .psm bundle that the service runs")
    parser.add_argument("--primary", required=True, metavar="HOST:PORT", help="where the service lets workers join")
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="the secret that they share")
    parser.add_argument("--name", default="", help="what the service calls the model; that of the file unless given")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM; whose certificates to believe")
    parser.add_argument("--once", action="store_true", help="end with the primary instead of waiting for its return")
    add_run_options(parser)
    add_ops_option(parser)
    parser.set_defaults(run=run, scheme=None, no_cache=False)  # what only folders have


def run(args: argparse.Namespace) -> int:
    """Join and serve until the service or a signal ends it."""
    import asyncio
    import signal

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as in a worker of this machine: a service survives it, too
    from penstock.serving.workers.remote_worker_client import join_primary, read_bytes, read_token
    from penstock.serving.workers.worker_config import WorkerConfig

    host, _, port = args.primary.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgumentError(f"--primary must be HOST:PORT, not {args.primary!r}")
    path = Path(args.model)
    if not path.is_file():
        raise FileAccessError(f"{path}: a worker joins with a .psm bundle, the same that the service runs")
    ca = None if args.ca_file is None else read_bytes(args.ca_file)
    config = WorkerConfig(
        address=args.primary,
        token=read_token(args.token_file),
        name=args.name or path.stem,
        path=str(path.absolute()),
        verify=args.verify,
        options=options_of(args, 1),
    )
    return asyncio.run(join_primary(config, ca, again=not args.once))
