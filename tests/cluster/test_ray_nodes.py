"""Nodes whose Ray processes end, as they do a minute after the head is lost: they end or join again, and say so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.support.http_service import SECONDS
from tests.support.ray_cluster import RayCluster, skip_reason

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()), pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    made = RayCluster()
    try:
        yield made
    finally:
        made.close()


def kill(node: subprocess.Popen[str], name: str) -> None:
    """End one of Ray's processes of a node."""
    (process,) = [one for one in psutil.Process(node.pid).children(recursive=True) if one.name() == name]
    process.kill()


def test_a_node_that_ray_has_ended_joins_again(cluster: RayCluster) -> None:
    joined, other = cluster.join(), cluster.join(1, "--once")
    for node in (joined, other):
        kill(node, "raylet")
    assert "Ray's process raylet ended, and with it the node" in (said := joined.stderr.readline())
    assert said.endswith("trying again in 1 s\n")
    assert "is a node of the cluster" in joined.stdout.readline()
    assert joined.poll() is None
    assert other.wait(SECONDS) == 1
    assert other.stderr.read().count("\n") == 1


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_head_without_its_processes_ends(cluster: RayCluster, name: str) -> None:
    """So that a service manager starts it again."""
    (head,) = cluster.nodes
    kill(head, name)
    assert head.wait(SECONDS) == 1
    assert f"penstock: Ray's process {name} ended, and with it the node; see the logs in" in head.stderr.read()
