"""The setup that the processes using Ray share: the pinned version, the environment, and the versions of a cluster.

Only processes started for it import Ray: the driver of a service, the process of a node, and Ray's own workers.  The
service itself does not.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.extras import install_command
from penstock.version import __version__

__all__ = [
    "LOOPBACK",
    "NAMESPACE",
    "RAY_MINOR",
    "VERSION_LABEL",
    "check_cluster",
    "check_ray",
    "environment",
    "split_address",
]
__all__ += ["keep_loopback", "local_address", "own_versions"]

RAY_MINOR: Final = "2.60"
"""The minor version of Ray: nodes and drivers of other versions do not understand each other."""
NAMESPACE: Final = "penstock"
LOOPBACK: Final = "127.0.0.1"
"""The only address of a node for which Ray listens on that address; for others it listens on all of the machine."""
VERSION_LABEL: Final = "penstock/version"
"""The label of a node that runs this version of Penstock."""
_KEY: Final = b"penstock_version"
_CONNECT_S: Final = 5.0
_NUM_LOOKS: Final = 20
_LOOK_S: Final = 0.5


def check_ray() -> None:
    """Raise UnavailableError, with the command that installs it, unless the pinned minor of Ray is installed."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        installed = "none"
    if installed.split(".")[:2] != RAY_MINOR.split("."):
        raise UnavailableError(
            f"A cluster requires Ray {RAY_MINOR}, got {installed}. Run `{install_command('cluster')}`.", param="cluster"
        )


def environment(token_file: Path) -> dict[str, str]:
    """Return the environment of a process that uses Ray: token authentication on, usage reports off.

    The token itself is in its file, neither in the environment nor in arguments.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file.absolute()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # workers plan their memory; Ray would kill the supervisor
        "RAY_prestart_worker_first_driver": "0",
    }


def split_address(address: str, option: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; InvalidArgumentError names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536 or "/" in host:
        raise InvalidArgumentError(f"--{option}: expected HOST:PORT, got {address!r:.100}", param=option)
    return host, int(port)


def local_address(host: str, port: int) -> str:
    """Return the address of this machine that reaches a host: others of that network reach this machine by it.

    Raises UnavailableError if the port does not answer.
    """
    try:
        with socket.create_connection((host, port), _CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"{host}:{port}: the head of the cluster does not answer: {error}") from error


def keep_loopback(address: str) -> None:
    """Let Ray reach a head at 127.0.0.1 by that address, and not by another one of this machine.

    The function that is replaced is private to Ray; the pinned minor has it.
    """
    if address.rpartition(":")[0] == LOOPBACK:
        services: Any = importlib.import_module("ray._private.services")
        services.resolve_ip_for_localhost = lambda host: host


def own_versions() -> dict[str, str]:
    """Return the versions that must be equal on all machines of a cluster."""
    return {"Ray": version("ray"), "Python": platform.python_version(), "Penstock": __version__}


def check_cluster(address: str) -> None:
    """Compare the versions of a cluster with those of this process, before anything joins.

    Raises UnavailableError with one line that has both sides.  It needs ``environment``.
    """
    gcs, constants, usage = _ray_parts()
    try:
        client = gcs(address=address)
        metadata = json.loads(client.internal_kv_get(usage, namespace=constants) or b"{}")
        cluster = {"Ray": metadata.get("ray_version", "?"), "Python": metadata.get("python_version", "?")}
        for _ in range(_NUM_LOOKS):  # a new head writes it a moment after it answers
            cluster["Penstock"] = (client.internal_kv_get(_KEY, namespace=constants) or b"none").decode()
            if cluster["Penstock"] != "none":
                break
            time.sleep(_LOOK_S)
    except Exception as error:
        reason = "the token is wrong" if "uthenticat" in str(error) else str(error).splitlines()[0][:200]
        if "GCS" in reason:  # Ray's name of the head's server
            reason = "no head answers there. `penstock node --address IP --token-file FILE` starts one."
        raise UnavailableError(
            f"{address}: failed to read the versions of the cluster: {reason}", param="cluster"
        ) from error
    own = own_versions()
    if cluster != own:
        both = "; ".join(f"{name} {cluster[name]} there, {own[name]} here" for name in own)
        raise UnavailableError(
            f"{address}: the versions differ: {both}. Install the same versions on each machine.", param="cluster"
        )


def publish_version(address: str) -> None:
    """Write the version of Penstock into a new cluster, for ``check_cluster``."""
    gcs, constants, _ = _ray_parts()
    gcs(address=address).internal_kv_put(_KEY, __version__.encode(), True, namespace=constants)


def _ray_parts() -> tuple[Any, bytes, bytes]:
    """Return Ray's client of the head's key-value store, the namespace and the key of the cluster's versions.

    They are private to Ray; the pinned minor has them.
    """
    import ray._common.usage.usage_constants as usage_constants
    from ray._private import ray_constants

    raylet: Any = importlib.import_module("ray._raylet")  # compiled, without types
    return raylet.GcsClient, ray_constants.KV_NAMESPACE_CLUSTER, usage_constants.CLUSTER_METADATA_KEY
