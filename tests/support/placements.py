"""Placements that the tests of workers run on: this machine, over TLS as if it were another one, and a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from penstock.cluster.placement.certificate import OwnCertificate
from penstock.cluster.placement.local import COMMAND, LocalPlacement, LocalProcess
from penstock.cluster.placement.placement import Resources
from penstock.cluster.placement.ray_placement import RayPlacement
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from tests.support.link_proxy import LinkProxy
from tests.support.ray_cluster import ADDRESS, RayCluster, skip_reason

RAY = pytest.param(
    "ray", marks=[pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()), pytest.mark.long], id="ray"
)
PLACEMENTS = ("local", "tls")
"""Names of placements for ``placed``; ``RAY`` is another one."""
_TOKEN = "0123456789abcdef" * 3


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A head and another node, with two cores each as far as Ray knows."""
    made = RayCluster(2)
    try:
        made.join(2)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def ray_certificate() -> Iterator[OwnCertificate]:
    """The certificate of a service whose workers run on ``ray_cluster``."""
    own = OwnCertificate(ADDRESS)
    yield own
    own.close()


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


@pytest.fixture
def placed(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path]
) -> Callable[[str, Sequence[str]], dict[str, object]]:
    """Return the arguments of ``service`` for a placement by name, and the command of its workers."""

    def arguments(kind: str, command: Sequence[str] = COMMAND) -> dict[str, object]:
        if kind == "local":
            return {"placement": LocalPlacement(command)}
        if kind == "tls":
            remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, _TOKEN)
            return {"placement": TlsPlacement(command), "remote": remote}
        cluster, own = request.getfixturevalue("ray_cluster"), request.getfixturevalue("ray_certificate")
        return {
            "placement": RayPlacement(cluster.address, cluster.token_file, 60.0, command),
            "remote": RemoteWorkerSettings(ADDRESS, 0, own.certificate, own.key, _TOKEN),
        }

    return arguments
