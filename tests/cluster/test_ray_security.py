"""A cluster with a service: each port that listens asks for a secret, and no secret shows in processes or logs."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest

from penstock.processes.frames import FIRST_BYTES
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import handshake
from tests.support.ray_cluster import RayCluster, skip_reason
from tests.support.serve_command import serving
from tests.support.worker_processes import DEMO

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()), pytest.mark.long]
API_KEY = "sk-0123456789abcdef0123456789abcdef"
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
"""One of each service of Ray's processes."""


class Running(NamedTuple):
    """What runs: the secrets, all processes, the folder of Ray's logs, and the service's log."""

    token: str
    processes: list[psutil.Process]
    folder: Path
    log: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A head, another node, and a service with a worker on the cluster."""
    folder = tmp_path_factory.mktemp("service")
    keys = folder / "keys"
    keys.write_text(API_KEY + "\n")
    keys.chmod(0o600)
    cluster = RayCluster()
    try:
        cluster.join()
        options = [DEMO, "--cluster", cluster.address, "--cluster-token-file", cluster.token_file, "--workers", 1]
        options += ["--threads", 1, "--place-seconds", 600, "--api-key-file", keys]
        with serving(*options, cwd=folder, program=("-m", "penstock", "serve")) as (process, _, _):
            roots = [psutil.Process(one.pid) for one in (process, *cluster.nodes)]
            there = [one for root in roots for one in (root, *root.children(recursive=True))]
            yield Running(cluster.token_file.read_text().strip(), there, cluster.folder, folder)
    finally:
        cluster.close()


def ports(running: Running) -> list[tuple[str, int]]:
    """The addresses on which the processes listen."""
    found = set()
    for process in running.processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host = one.laddr.ip.removeprefix("::ffff:")
                    found.add((host, one.laddr.port))
    return sorted(found)


def refusal(host: str, port: int) -> str:
    """How a port refuses a peer without a secret; "" if it does not."""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=20)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    return "gRPC"
            else:
                return ""
    try:
        link = http.client.HTTPConnection(host, port, timeout=20)
        link.request("GET", "/v1/models")
        return "HTTP" if link.getresponse().status == 401 else ""
    except (http.client.HTTPException, OSError):
        return "TLS" if is_token_asked_for(host, port) else ""
    finally:
        link.close()


def is_token_asked_for(host: str, port: int) -> bool:
    """Whether a port for workers refuses a wrong token, after a TLS handshake."""
    context = ssl._create_unverified_context()  # noqa: S323 - the certificate is the service's own
    context.set_alpn_protocols([handshake.ALPN])
    join = pb.FromWorker(join=pb.Join(protocol=handshake.PROTOCOL, token="x" * 64, model="demo")).SerializeToString()
    with socket.create_connection((host, port), 20) as plain, context.wrap_socket(plain) as link:
        link.sendall(struct.pack("<I", len(join)) + join)
        received = b""
        while data := link.recv(FIRST_BYTES):
            received += data
    return b"unknown worker token" in received


def test_a_cluster_on_loopback_listens_on_loopback(running: Running) -> None:
    for process in running.processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    assert one.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1", "::1"), (process.cmdline(), one.laddr)


def test_no_other_user_can_access_rays_folder(running: Running) -> None:
    assert running.folder.stat().st_mode & 0o077 == 0
    for process in running.processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections(kind="unix"):
                if one.laddr.startswith("/"):
                    assert Path(one.laddr).is_relative_to(running.folder) or "penstock-" in one.laddr, one.laddr


def test_every_port_asks_for_a_secret(running: Running) -> None:
    kinds = {address: refusal(*address) for address in ports(running)}
    assert all(kinds.values()), kinds
    counts = [sum(kind == name for kind in kinds.values()) for name in ("gRPC", "HTTP", "TLS")]
    assert counts[0] >= 6, "the head, two raylets with their stores, the supervisor"
    assert counts[1] >= 3, "the service, and an agent of each node"
    assert counts[2] == 1, "the port for workers"


def test_no_process_shows_a_secret(running: Running) -> None:
    """In the arguments of any process of the machine, and in the environment of those of the cluster."""
    own = {process.pid for process in running.processes}
    num_seen = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            shown = (folder / "cmdline").read_bytes()
            if int(folder.name) in own:
                num_seen += 1
                assert not re.search(rb"[0-9a-f]{64}", shown), "a worker's own token"
                shown += (folder / "environ").read_bytes()
            for secret in (running.token, API_KEY):
                assert secret.encode() not in shown, folder
    assert num_seen >= 8


def test_no_log_has_a_secret(running: Running) -> None:
    files = [path for path in running.folder.rglob("*") if path.is_file() and path.name != "token"]
    logs = [path for path in files if path.suffix in (".log", ".err", ".out")]
    assert len(logs) >= 6
    for path in (*files, running.log / "log"):
        for secret in (running.token, API_KEY):
            assert secret.encode() not in path.read_bytes(), path
