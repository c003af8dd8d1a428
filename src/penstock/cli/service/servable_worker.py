"""``penstock servable-worker SERVABLES --primary HOST:PORT --token-file FILE``: run processes of servables."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_joining_options, add_parser_of, joining_of
from penstock.cli.service.process_state import ignored_hangup
from penstock.config import check_integer

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "servable-worker",
        "Run processes of servables' models and Python stages for a service on another machine, which shares its "
        "batches among them and its own.",
        "penstock servable-worker servables/ --primary web1.example:9000 --token-file token.txt --ca-file ca.pem",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="SERVABLES",
        help="the same folders of servables that the service serves, or some of their servables",
    )
    add_joining_options(
        parser,
        "the service's --worker-port",
        "exit when the service stops or cannot be reached (default: wait until it is back)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of each model, and of the Python stages of each servable (default: 1)",
    )
    parser.set_defaults(run=run)


@ignored_hangup()  # as for `penstock worker`: a service does not stop on SIGHUP either
def run(args: argparse.Namespace) -> int:
    """Join the service and run processes until a signal stops them."""
    import asyncio

    from penstock.servables.api.settings import MAX_PROCESSES
    from penstock.servables.machines.servable_host import find_versions
    from penstock.serving.servable_machines.join_service import ServableHostConfig, join_service

    _, token, ca = joining_of(args)
    check_integer("processes", args.processes, 1, MAX_PROCESSES)
    config = ServableHostConfig(
        address=args.primary,
        token=token,
        sources=find_versions(args.folders),
        num_processes=args.processes,
        ca=ca,
    )
    return asyncio.run(join_service(config, again=not args.once))
