"""The parts of a cluster that run without one: a supervisor's calls may be repeated, and versions are compared."""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.cluster.placement import ray_setup, ray_supervisor
from penstock.cluster.placement.ray_setup import RAY_MINOR, check_cluster, check_ray
from penstock.cluster.placement.ray_supervisor import Supervisor
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.version import __version__
from tests.support.errors import raises
from tests.support.waiting import until

EPOCH = 7
STAYS = "import sys; sys.stdin.readline(); sys.stdin.read()"
WITH_A_CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "open(sys.argv[1], 'w').write(str(child.pid)); child.wait()"
)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Outside of Ray: it reserves nothing, and does not end this process."""
    monkeypatch.setattr(ray_supervisor, "_reservation", lambda: None)
    monkeypatch.setattr(Supervisor, "_give_back", lambda self: None)
    made = Supervisor(EPOCH)
    yield made
    made.kill(EPOCH)
    if made._process is not None and made._process.stdin is not None:
        made.wait(EPOCH)
        with suppress(BrokenPipeError):  # it was killed before it got its settings
            made._process.stdin.close()


def test_a_repeated_start_starts_nothing(supervisor: Supervisor) -> None:
    command = [sys.executable, "-c", STAYS]
    pid = supervisor.start(EPOCH, command, "{}")
    assert supervisor.start(EPOCH, command, "{}") == pid
    assert [child.pid for child in psutil.Process().children() if STAYS in child.cmdline()] == [pid]
    supervisor.kill(EPOCH)
    assert [supervisor.wait(EPOCH) for _ in range(2)] == [-signal.SIGKILL] * 2
    supervisor.kill(EPOCH)
    assert supervisor.start(EPOCH, command, "{}") == pid, "it has ended and is not started again"
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_calls_of_another_epoch_are_refused(supervisor: Supervisor, epoch: int) -> None:
    command = [sys.executable, "-c", STAYS]
    pid = supervisor.start(EPOCH, command, "{}")
    calls: list[Callable[[], object]] = [
        lambda: supervisor.start(epoch, command, "{}"),
        lambda: supervisor.wait(epoch),
        lambda: supervisor.kill(epoch),
    ]
    for call in calls:
        with raises(InvalidArgumentError, param="epoch"):
            call()
    assert psutil.pid_exists(pid)


def test_a_worker_is_ended_with_its_ranks(supervisor: Supervisor, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    supervisor.start(EPOCH, [sys.executable, "-c", WITH_A_CHILD, str(file)], "{}")
    until(lambda: file.exists() and file.read_text())
    child = psutil.Process(int(file.read_text()))
    supervisor.kill(EPOCH)
    assert supervisor.wait(EPOCH) == -signal.SIGKILL
    psutil.wait_procs([child], timeout=600)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_worker_gets_nothing_of_ray(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the cluster's token is in the environment of its supervisor."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/token")
    program = "import os, sys; sys.exit(any(name.startswith('RAY') for name in os.environ))"
    supervisor.start(EPOCH, [sys.executable, "-c", program], "{}")
    assert supervisor.wait(EPOCH) == 0


@pytest.mark.parametrize("share", [0, 5_000_000_000])
def test_a_worker_is_told_its_share_of_memory(supervisor: Supervisor, share: int) -> None:
    program = f"import os, sys; sys.exit(os.environ.get('PENSTOCK_MEMORY_SHARE', '0') != '{share}')"
    supervisor.start(EPOCH, [sys.executable, "-c", program], "{}", share)
    assert supervisor.wait(EPOCH) == 0


def test_a_command_that_is_not_there_is_an_error_again(supervisor: Supervisor, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="none"):
            supervisor.start(EPOCH, [str(tmp_path / "none")], "{}")
    assert supervisor.wait(EPOCH) is None


@pytest.mark.parametrize("found", ["2.59.9", "3.60.0", None])
def test_another_ray_is_refused_with_the_command_for_it(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(ray_setup, "version", version)
    with pytest.raises(
        UnavailableError, match=rf"requires Ray {RAY_MINOR}, got {found or 'none'}\. Run `.*\[cluster\]"
    ):
        check_ray()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the head of a cluster says; an exception is raised."""
    said: dict[str, Any] = {"ray_version": f"{RAY_MINOR}.0", "python_version": platform.python_version()}
    said["penstock"] = [__version__]

    class Client:
        def __init__(self, address: str) -> None:
            if "error" in said:
                raise RuntimeError(said["error"])

        def internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
            if key == b"cluster":
                return json.dumps(said).encode()
            found = said["penstock"].pop(0) if len(said["penstock"]) > 1 else said["penstock"][0]
            return None if found is None else found.encode()

    monkeypatch.setattr(ray_setup, "version", lambda name: f"{RAY_MINOR}.0")
    monkeypatch.setattr(ray_setup, "_ray_parts", lambda: (Client, b"namespace", b"cluster"))
    monkeypatch.setattr(ray_setup, "_LOOK_S", 0.0)
    return said


def test_equal_versions_may_join(head: dict[str, Any]) -> None:
    head["penstock"] = [None, None, __version__]  # a new head writes it a moment after it answers
    check_cluster("10.0.0.5:6379")
    assert head["penstock"] == [__version__]


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [("ray_version", "2.60.1", "Ray"), ("python_version", "3.9.1", "Python"), ("penstock", ["0.0.9"], "Penstock")],
)
def test_versions_that_differ_are_named_in_one_line(head: dict[str, Any], field: str, value: Any, name: str) -> None:
    head[field] = value
    found = value[0] if field == "penstock" else value
    with raises(
        UnavailableError, param="cluster", match=rf"^10\.0\.0\.5:6379: the versions differ: .*{name} {found} there, "
    ):
        check_cluster("10.0.0.5:6379")


def test_a_cluster_without_penstock_is_named(head: dict[str, Any]) -> None:
    head["penstock"] = [None]
    with raises(UnavailableError, param="cluster", match="Penstock none there"):
        check_cluster("10.0.0.5:6379")


def test_a_head_that_does_not_answer_is_named(head: dict[str, Any]) -> None:
    head["error"] = "Timed out while waiting for GCS to become available."
    with raises(
        UnavailableError, param="cluster", match=r"no head answers there\. `penstock node --address IP"
    ) as caught:
        check_cluster("10.0.0.5:6379")
    assert "GCS" not in str(caught.value)


def test_a_wrong_token_is_named(head: dict[str, Any]) -> None:
    head["error"] = "Unauthenticated: a page of text\nand more"
    with raises(
        UnavailableError, param="cluster", match=r"failed to read the versions of the cluster: the token is wrong$"
    ):
        check_cluster("10.0.0.5:6379")
