"""Placements that the tests of workers run on: this machine, this machine over TLS as if it were another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cluster.placement.local import COMMAND, LocalPlacement
from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings

PLACEMENTS = ("local", "tls")


class TlsPlacement(LocalPlacement):
    """Local processes that join as those of another machine do: over TLS, with certificates in their configuration."""

    is_local = False


def placed(kind: str, certificate: tuple[Path, Path], command: Sequence[str] = COMMAND) -> dict[str, object]:
    """The arguments of ``service`` for a placement by name."""
    if kind == "local":
        return {"placement": LocalPlacement(command)}
    return {
        "placement": TlsPlacement(command),
        "remote": RemoteWorkerSettings("127.0.0.1", 0, *certificate, "0123456789abcdef" * 3),
    }
