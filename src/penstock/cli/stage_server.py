"""The options of commands whose pipeline has its stages on other machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config import check_integer
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.runtime.stage_server import StageServer

__all__ = ["SERVICE_JOIN_S", "add_stage_options", "stage_server"]

SERVICE_JOIN_S: Final = 300.0
"""How long a worker of a service waits for all its stages; then the service starts another one, after a pause."""


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("stages on other machines (penstock stage)")
    group.add_argument(
        "--stage-port", type=int, metavar="N", help="wait for --pp stages on this port; 0: a free port (default: none)"
    )
    group.add_argument("--stage-host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--stage-token-file", type=Path, metavar="FILE", help="file with the shared secret, one line (default: none)"
    )
    group.add_argument("--stage-certificate", type=Path, metavar="FILE", help="certificate in PEM (default: none)")
    group.add_argument("--stage-key", type=Path, metavar="FILE", help="key of the certificate in PEM (default: none)")


def stage_server(args: argparse.Namespace, join_s: float = 600.0) -> StageServer | None:
    """Return where the stages join; None if they are processes of this machine.  ``join_s``: how long to wait."""
    from penstock.runtime.stage_server import StageServer
    from penstock.serving.workers.remote_worker_client import read_token

    names = ("stage_token_file", "stage_certificate", "stage_key")
    if getattr(args, "stage_port", None) is None:
        for name in (*names, "stage_host"):
            if getattr(args, name, None) is not None:
                raise InvalidArgumentError(f"--{name.replace('_', '-')} requires --stage-port")
        return None
    check_integer("stage_port", args.stage_port, 0, 65_535)
    if any(getattr(args, name) is None for name in names):
        raise InvalidArgumentError("--stage-port requires --stage-token-file, --stage-certificate and --stage-key")
    host = args.stage_host or "127.0.0.1"

    def tell(port: int) -> None:
        print(
            f"Waiting for {args.pp} stages: penstock stage MODEL --primary {host}:{port}", file=sys.stderr, flush=True
        )

    token = read_token(args.stage_token_file)
    return StageServer(host, args.stage_port, args.stage_certificate, args.stage_key, token, join_s, tell)
