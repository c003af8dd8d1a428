"""``penstock worker MODEL --primary HOST:PORT --token-file FILE``: run a worker for a service on another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.options import add_joining_options, add_options, add_parser_of, joining_of
from penstock.cli.service.process_state import ignored_hangup
from penstock.cli.service.serve import add_run_options, options_of
from penstock.cli.stage_server import add_stage_options
from penstock.errors import FileAccessError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "worker",
        "Run a model for a service on another machine, which shares its requests among its workers.",
        "penstock worker model.psm --primary server1.example:9000 --token-file token.txt --ca-file ca.pem",
    )
    parser.add_operand_flag(parser, "-m", "--model", metavar="MODEL", is_first=True)
    parser.add_argument("model", metavar="MODEL", help="the same .psm bundle that the service runs")
    add_joining_options(
        parser, "the service's --worker-port", "exit when the service stops (default: wait until it is back)"
    )
    parser.add_argument("--name", default="", help="name of the model in the service (default: the name of the file)")
    parser.add_argument(
        "--role",
        choices=("prefill", "decode"),
        default="",
        help="compute prompts only, or only go on with answers that a worker for prefill began (default: both)",
    )
    add_run_options(parser)
    add_stage_options(parser)
    add_options(parser, "--ops")
    parser.set_defaults(run=run, scheme=None, no_cache=False)  # options of checkpoint folders only


@ignored_hangup()  # as in a local worker: a service does not stop on SIGHUP either
def run(args: argparse.Namespace) -> int:
    """Join the service and run until the service or a signal stops the worker."""
    import asyncio
    from dataclasses import replace

    from penstock.runtime.ranks.stage_server import reserved_port
    from penstock.serving.workers.machines.remote_worker_client import join_primary
    from penstock.serving.workers.worker_config import WorkerConfig

    _, token, ca = joining_of(args)
    path = Path(args.model)
    if not path.is_file():
        raise FileAccessError(f"{path}: no such file; a worker needs the same .psm bundle that the service runs")
    options = options_of(args, 1)
    with reserved_port(options.stage_server) as server:
        config = WorkerConfig(
            address=args.primary,
            token=token,
            name=args.name or path.stem,
            path=str(path.absolute()),
            verify=args.verify,
            options=replace(options, stage_server=server),
            role=args.role,
        )
        return asyncio.run(join_primary(config, ca, again=not args.once))
