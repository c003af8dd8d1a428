"""Placements that the tests of workers run on: this machine, this machine over TLS as if it were another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.cluster.placement.local import COMMAND, LocalPlacement, LocalProcess
from penstock.cluster.placement.placement import Resources
from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings
from tests.support.link_proxy import LinkProxy

PLACEMENTS = ("local", "tls")


class TlsPlacement(LocalPlacement):
    """Local processes that join as those of another machine do: over TLS, with certificates in their configuration."""

    is_local = False


class ProxiedPlacement(TlsPlacement):
    """Workers that reach the service through a proxy each; ``proxies`` in the order of their starts."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        super().__init__(command)
        self.proxies: list[LinkProxy] = []

    async def start(self, config: str, resources: Resources) -> LocalProcess:
        """Start a worker with the address of a new proxy."""
        fields = json.loads(config)
        host, _, port = fields["address"].rpartition(":")
        self.proxies.append(LinkProxy(int(port)))
        fields["address"] = f"{host}:{self.proxies[-1].port}"
        return await super().start(json.dumps(fields), resources)


def placed(kind: str, certificate: tuple[Path, Path], command: Sequence[str] = COMMAND) -> dict[str, object]:
    """The arguments of ``service`` for a placement by name."""
    if kind == "local":
        return {"placement": LocalPlacement(command)}
    return {
        "placement": TlsPlacement(command),
        "remote": RemoteWorkerSettings("127.0.0.1", 0, *certificate, "0123456789abcdef" * 3),
    }
