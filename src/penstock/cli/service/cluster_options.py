"""The options of commands whose workers may run on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import refuse_without
from penstock.config import check_integer, check_number
from penstock.errors import InvalidArgumentError
from penstock.file_kinds import is_gguf

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import Placement
    from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings

__all__ = ["add_cluster_options", "check_cluster_options", "cluster_placement"]


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cluster_placement``."""
    group = parser.add_argument_group("workers on a cluster (penstock node); needs penstock[cluster]")
    group.add_argument(
        "--cluster",
        metavar="HOST:PORT",
        help="run the workers on the nodes of the cluster with this head; they open the bundle at the same path, with "
        "--threads cores per rank (default: on this machine)",
    )
    group.add_argument(
        "--cluster-token-file", type=Path, metavar="FILE", help="file with the cluster's token (default: none)"
    )
    group.add_argument(
        "--place-seconds",
        type=float,
        metavar="S",
        help="longest time that a worker waits for a node with its cores and memory (default: 30)",
    )


def check_cluster_options(args: argparse.Namespace) -> None:
    """Refuse options that have no effect without ``--cluster``; InvalidArgumentError."""
    if args.cluster is None:
        refuse_without("--cluster", args, "cluster_token_file", "place_seconds")


def cluster_placement(
    args: argparse.Namespace, paths: Sequence[str]
) -> tuple[Placement | None, RemoteWorkerSettings | None]:
    """Return the placement of ``--cluster`` and the port where its workers join; None and None without it.

    ``paths``: the models, which must be bundles.  Raises InvalidArgumentError for options that do not go together, and
    UnavailableError if the cluster's head does not answer or Ray is missing.
    """
    check_cluster_options(args)
    if args.cluster is None:
        return None, None
    if args.cluster_token_file is None:
        raise InvalidArgumentError("--cluster requires --cluster-token-file", param="cluster_token_file")
    worker_port = getattr(args, "worker_port", None) or 0
    if any(getattr(args, name, None) is not None for name in ("worker_token_file", "worker_host")):
        raise InvalidArgumentError("--cluster: expected no --worker-token-file and no --worker-host", param="cluster")
    if args.threads == 0:
        raise InvalidArgumentError(
            "--threads: required with --cluster, the cores that each rank of a worker reserves", param="threads"
        )
    place_s = 30.0 if args.place_seconds is None else check_number("place_seconds", args.place_seconds, 86_400)
    for path in paths:
        if not Path(path).is_file() or is_gguf(Path(path)):
            raise InvalidArgumentError(
                f"{path}: expected a .psm bundle with --cluster; see `penstock export`", param="model"
            )
    import secrets

    from penstock.cluster.placement.certificate import OwnCertificate
    from penstock.cluster.placement.ray_placement import RayPlacement
    from penstock.cluster.placement.ray_setup import check_ray, local_address, split_address
    from penstock.serving.workers.machines.remote_worker_client import read_token
    from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings

    check_integer("worker_port", worker_port, 0, 65_535)
    host, port = split_address(args.cluster, "cluster")
    read_token(args.cluster_token_file)
    check_ray()
    address = local_address(host.strip("[]"), port)
    own = OwnCertificate(address)
    listener = RemoteWorkerSettings(address, worker_port, own.certificate, own.key, secrets.token_hex(32))
    return RayPlacement(args.cluster, args.cluster_token_file, place_s), listener
