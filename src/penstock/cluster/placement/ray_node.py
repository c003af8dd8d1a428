"""``python -m penstock.cluster.placement.ray_node``: Ray's processes of one node, for ``penstock node``.

One line of JSON on standard input says what to start.  The first line on standard output is {"ready": ADDRESS} or
{"error": TEXT}.  The node runs until standard input ends, or until one of Ray's processes ends that it cannot be
without: Ray ends them a minute after the head is lost.  It then writes {"lost": NAME}.  Of Ray, it starts only what
places processes: no client proxy, no autoscaler, no web pages, and the smallest store of objects.
"""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.cluster.placement.ray_setup import VERSION_LABEL, check_cluster, publish_version
from penstock.errors import PenstockError
from penstock.version import __version__

__all__ = ["FIRST_WORKER_PORT", "NUM_OWN_PORTS", "NUM_PORTS", "RAY_FOLDER", "NodeSettings", "main"]

NUM_PORTS: Final = 200
"""Ports that a node uses, from its first one on."""
NUM_OWN_PORTS: Final = 6
"""The first ones, which the node itself uses."""
FIRST_WORKER_PORT: Final = 10
"""The first ports are those of the node itself; Ray's workers, one per group, use the others."""
_NEEDED: Final = ("gcs_server", "raylet")
"""Ray's processes that a node cannot be without; the first one runs on the head only."""
RAY_FOLDER: Final = "ray"
"""Ray's own folder in that of the node."""
_LOOK_S: Final = 0.5
_STORE_BYTES: Final = 75 << 20
"""The least that Ray accepts; nothing of Penstock goes there."""


@dataclass(frozen=True)
class NodeSettings:
    """The settings of a node.

    ``join``: HOST:PORT of the head; "" starts the head, at ``port``.  ``address``: of this machine.  ``first_port``:
    the first of ``NUM_PORTS`` ports.  ``num_cpus``, ``memory_bytes``: what groups may use; 0: all that is there.
    ``folder``: for Ray's sockets and logs.  Only its owner may access it, because Ray gives all users access to its own
    folder in it.
    """

    address: str
    port: int
    join: str = ""
    first_port: int = 20_000
    num_cpus: int = 0
    memory_bytes: int = 0
    folder: str = ""

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self))


def _parameters(settings: NodeSettings) -> dict[str, Any]:
    first = settings.first_port
    return {
        "node_ip_address": settings.address,
        "gcs_address": settings.join or None,
        "gcs_server_port": None if settings.join else settings.port,
        "node_manager_port": first,
        "object_manager_port": first + 1,
        "metrics_export_port": first + 2,
        "runtime_env_agent_port": first + 3,
        "metrics_agent_port": first + 4,
        "dashboard_agent_listen_port": first + 5,
        "min_worker_port": first + FIRST_WORKER_PORT,
        "max_worker_port": first + NUM_PORTS - 1,
        "num_cpus": settings.num_cpus or None,
        "memory": settings.memory_bytes or None,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "ray_client_server_port": None,
        "labels": {VERSION_LABEL: __version__.replace("+", "_")},
        "temp_dir": str(Path(settings.folder, RAY_FOLDER)),
    }


def _start(settings: NodeSettings) -> Any:
    """Start Ray's processes and return its node, which has ``kill_all_processes``."""
    if settings.join:
        check_cluster(settings.join)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    node = Node(RayParams(**_parameters(settings)), head=not settings.join, shutdown_at_exit=True, spawn_reaper=True)
    if not settings.join:
        publish_version(node.gcs_address)
    return node


def _wait(node: Any) -> str:
    """Wait until standard input ends and return "", or the name of a needed process that has ended before."""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 4096):
            return ""
        lost = [name for name, _ in node.dead_processes() if name in _NEEDED]
        if lost:
            return str(lost[0])


def main() -> int:
    """Run a node until standard input ends or it is lost, and return the exit status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints is no answer
    settings = NodeSettings(**json.loads(sys.stdin.readline()))
    try:
        node = _start(settings)
    except (PenstockError, Exception) as error:  # any error of Ray
        text = str(error) or type(error).__name__
        print(json.dumps({"error": " ".join(text.split())[:500]}), file=answers, flush=True)
        return 1
    print(json.dumps({"ready": node.gcs_address}), file=answers, flush=True)
    lost = ""
    try:
        lost = _wait(node)
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    if lost:
        print(json.dumps({"lost": lost}), file=answers, flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
