"""The options of commands whose pipeline has its stages on other machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.listener import add_listener_options, read_listener
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.runtime.ranks.stage_server import StageServer

__all__ = ["SERVICE_JOIN_S", "add_stage_options", "stage_server"]

SERVICE_JOIN_S: Final = 300.0
"""The time that a worker of a service waits for all its stages; then the service starts another one, after a pause."""


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("stages on other machines (penstock stage)")
    add_listener_options(group, "stage", "wait for --pp stages")
    group.add_argument("--stage-certificate", type=Path, metavar="FILE", help="certificate in PEM (default: none)")
    group.add_argument("--stage-key", type=Path, metavar="FILE", help="key of the certificate in PEM (default: none)")


def stage_server(args: argparse.Namespace, join_s: float = 600.0) -> StageServer | None:
    """Return where the stages join; None if they are processes of this machine.  ``join_s``: how long to wait."""
    listener = read_listener(args, "stage", ("stage_token_file", "stage_certificate", "stage_key"))
    if listener is None:
        return None
    host, port, token = listener
    if args.pp == 1:
        raise InvalidArgumentError("--stage-port requires --pp 2 or more")
    from penstock.runtime.ranks.stage_server import StageServer

    def tell(port: int) -> None:
        command = f"penstock stage MODEL --token-file FILE --ca-file FILE --primary {host}:{port}"
        print(f"Waiting for {args.pp} stages. Start on each machine: {command}", file=sys.stderr, flush=True)

    def tell_joined(address: str, num_joined: int) -> None:
        print(f"A stage has joined from {address} ({num_joined} of {args.pp})", file=sys.stderr, flush=True)

    return StageServer(host, port, args.stage_certificate, args.stage_key, token, join_s, tell, tell_joined)
