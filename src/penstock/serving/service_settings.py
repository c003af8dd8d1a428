"""The settings of a service: its models, workers, listeners and servables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cluster.autoscale import ScalePolicy
from penstock.cluster.placement.placement import Placement
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.settings import GatewaySettings
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.worker_config import WorkerModelOptions
from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles

__all__ = ["ServiceSettings"]


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of ``penstock serve``.

    ``models``: pairs of a name ("" for the file's name) and a path; ``num_workers`` processes run each model.
    ``worker_listener``: where workers of other machines connect.  ``admin_socket``: the unix socket on which models are
    loaded and unloaded.  ``otlp_traces_endpoint``: the URL that receives the spans of requests; "" disables tracing.
    ``servables``: folders that contain servables.  ``networks``: "file.py:Class" for the checkpoint folder of a model
    by name, and under "" for every other one.  ``route_policy``: how workers are chosen for requests, see
    ``penstock.cluster.routing.ReplicaRouter``.  ``placement``: where workers run; None: on this machine.  ``scale``:
    how the number of workers follows the load, after ``num_workers`` have started; None: it does not change.
    ``roles``: how many of them are for prefill and for decode.
    """

    models: tuple[tuple[str, str], ...]
    num_workers: int = 1
    options: WorkerModelOptions = field(default_factory=WorkerModelOptions)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    supervision: SupervisionPolicy = field(default_factory=SupervisionPolicy)
    worker_listener: RemoteWorkerSettings | None = None
    admin_socket: Path | None = None
    otlp_traces_endpoint: str = ""
    servables: tuple[Path, ...] = ()
    networks: Mapping[str, str] = field(default_factory=dict)
    route_policy: str = "prefix"
    placement: Placement | None = None
    scale: ScalePolicy | None = None
    roles: WorkerRoles = NO_ROLES
