"""The options of a port where processes of other machines join: workers of a service, stages of a pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.config import check_integer
from penstock.errors import InvalidArgumentError

__all__ = ["add_listener_options", "read_listener"]


def add_listener_options(group: argparse._ArgumentGroup, prefix: str, waits: str) -> None:
    """Declare ``--PREFIX-port``, ``-host`` and ``-token-file``; ``waits`` says what the port is for."""
    group.add_argument(
        f"--{prefix}-port", type=int, metavar="N", help=f"{waits} on this port; 0: a free port (default: none)"
    )
    group.add_argument(f"--{prefix}-host", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        f"--{prefix}-token-file",
        type=Path,
        metavar="FILE",
        help="file with the shared secret, one line (default: none)",
    )


def read_listener(args: argparse.Namespace, prefix: str, needed: Sequence[str]) -> tuple[str, int, str] | None:
    """Return host, port and token; None without the port.

    ``needed``: the options that the port requires.  Raises InvalidArgumentError for one that is missing, and for one
    that needs the port.
    """
    if getattr(args, f"{prefix}_port", None) is None:
        for name in (*needed, f"{prefix}_host"):
            if name.startswith(prefix) and getattr(args, name, None) is not None:
                raise InvalidArgumentError(f"{_option(name)} requires --{prefix}-port")
        return None
    port = check_integer(f"{prefix}_port", getattr(args, f"{prefix}_port"), 0, 65_535)
    if any(getattr(args, name) is None for name in needed):
        *first, last = map(_option, needed)
        raise InvalidArgumentError(f"--{prefix}-port requires {', '.join(first)} and {last}")
    from penstock.serving.workers.machines.remote_worker_client import (
        read_token,  # imported here: most commands have no port
    )

    return getattr(args, f"{prefix}_host") or "127.0.0.1", port, read_token(getattr(args, f"{prefix}_token_file"))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
