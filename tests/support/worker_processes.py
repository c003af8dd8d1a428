"""A primary and its workers for tests, without HTTP, and a check that they leave nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from penstock.cluster.placement.local import COMMAND, LocalPlacement
from penstock.cluster.placement.placement import Placement
from penstock.engine.params import SamplingParams
from penstock.processes.supervision import SupervisionPolicy
from penstock.runtime.program import ProgramLimits
from penstock.serving.workers import failover
from penstock.serving.workers import worker_connection as link_module
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.remote_models import RemoteModels
from penstock.serving.workers.worker_config import WorkerModelOptions
from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles
from tests.support.waiting import eventually as until

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
ENDLESS = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=1, seed=5, ignore_eos=True)
OPTIONS = WorkerModelOptions(threads=1, limits=ProgramLimits(context_len=4096, max_requests=16, num_pages=1024))
CALM = SupervisionPolicy(hang_s=600.0, drain_s=600.0)
HASTY = SupervisionPolicy(hang_s=600.0, min_pause_s=0.05, max_pause_s=0.2)
IMPATIENT = replace(HASTY, hang_s=6.0)
"""Only for tests of hangs: on a busy machine a healthy worker may stall for seconds too."""


def faulty(fault: str) -> tuple[str, ...]:
    return (sys.executable, str(Path(__file__).parent / "faulty_worker.py"), fault)


@dataclass
class Service:
    primary: Primary
    models: RemoteModels


@asynccontextmanager
async def service(
    *,
    supervision: SupervisionPolicy | None = None,
    command=COMMAND,
    num_workers: int = 1,
    options: WorkerModelOptions = OPTIONS,
    remote=None,
    placement: Placement | None = None,
    fresh_s: float = 600.0,
    silent_s: float = 600.0,
    roles: WorkerRoles = NO_ROLES,
) -> AsyncIterator[Service]:
    """A primary and its models, by default with ``command`` on this machine.

    At the end no process, descriptor or file of it may be left; supervisors on a cluster without a head have 25 s to
    end.  ``fresh_s`` and ``silent_s`` are long, so that no worker is left out or given up when a busy machine stalls.
    """
    before, files = {child.pid for child in psutil.Process().children(recursive=True)}, num_files()
    primary = Primary(supervision, remote, placement or LocalPlacement(command))
    await primary.open()
    folder = Path(primary.address.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    models = RemoteModels(primary, options, roles.num_workers or num_workers, roles=roles)
    primary.adopt = models.adopt
    try:
        with patch.object(link_module, "FRESH_S", fresh_s), patch.object(link_module, "SILENT_S", silent_s):
            yield Service(primary, models)
    finally:
        await models.close()
        await primary.close()

    def left() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)} - before

    if placement is not None and not placement.is_local:
        with suppress(AssertionError):
            await until(lambda: not left(), 25.0)
    assert not left(), f"processes are left: {[psutil.Process(pid).cmdline() for pid in left()]}"
    assert not folder.exists()
    await until(lambda: num_files() <= files + _GRPC_FILES)


def wait_for_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, a retry waits for the cause of a loss, and a suspect for a worker that it has alone."""
    for limit in ("_CAUSE_WAIT_S", "_ALONE_S", "RETRY_WAIT_S"):
        monkeypatch.setattr(failover, limit, 600.0)


_GRPC_FILES = 8
"""gRPC, which some tests use as a client, keeps its pollers' descriptors in the process."""


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def tokens_of(backend: RemoteBackend, prompt: list[int], params: SamplingParams, options=None) -> list[int]:
    ids: list[int] = []
    async with await backend.submit(prompt, params, options) as answer:
        async for delta in answer:
            ids += delta.token_ids
    return ids


def pids(backend: RemoteBackend) -> list[int]:
    return [worker.pid for worker in backend.workers()]


def still(process: psutil.Process) -> bool:
    """Stop a process, even if it was continued; False if it has ended."""
    try:
        process.suspend()
    except psutil.NoSuchProcess:
        return False
    return True


async def switch_under(traffic: Any, running: Service, versions: Sequence[Path], num_switches: int) -> None:
    """Switch the model "model" between two sets of weights; each answer is from one version, and no request fails."""
    backend = running.models.get("model")
    await traffic.more()
    for number in range(1, num_switches + 1):
        await running.models.update("model", str(versions[number % 2]))
        assert (backend.card.version, len(pids(backend))) == (number + 1, 1)
        await traffic.more()
    await traffic.stop()
    assert traffic.num_lost == 0
    assert len(traffic.versions) == num_switches + 1
