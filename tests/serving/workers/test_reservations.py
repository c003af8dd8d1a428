"""The memory that a placement reserves for a worker, what the worker plans of its share, and waiting for room."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cluster.placement.local import LocalProcess
from penstock.cluster.placement.placement import Resources
from penstock.cluster.placement.ray_driver import _memory_share
from penstock.errors import InvalidArgumentError, OutOfMemoryError
from penstock.runtime.native import HEADROOM_BYTES
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.memory_check import fit_beside, least_bytes
from penstock.serving.workers.worker_config import WorkerConfig, WorkerModelOptions
from tests.support.errors import raises
from tests.support.joining_worker import TOKEN
from tests.support.placements import TlsPlacement
from tests.support.worker_processes import DEMO, service


def config_of(path: Path, **limits: int) -> WorkerConfig:
    return WorkerConfig("", "", "m", str(path), options=WorkerModelOptions(threads=1, limits=ProgramLimits(**limits)))


class NotingPlacement(TlsPlacement):
    """Notes the resources that groups ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Resources] = []

    async def start(self, config: str, resources: Resources) -> LocalProcess:
        """Start a worker."""
        self.asked.append(resources)
        return await super().start(config, resources)


def test_the_pages_that_options_ask_for_are_reserved() -> None:
    file = DEMO.stat().st_size
    few, many = (least_bytes(config_of(DEMO, num_pages=number, context_len=256)) for number in (16, 4096))
    assert few > file, "weights are not all"
    _, (plan,) = fit_beside(config_of(DEMO, num_pages=4096, context_len=256))
    assert many == plan.total_bytes + HEADROOM_BYTES
    assert many - few >= (4096 - 16) * plan.kv_page_bytes


def test_open_limits_reserve_one_short_context() -> None:
    assert least_bytes(config_of(DEMO)) < least_bytes(config_of(DEMO, num_pages=4096))
    pages = 2048 // PAGE_TOKENS
    assert least_bytes(config_of(DEMO)) <= least_bytes(config_of(DEMO, num_pages=pages))


def test_ranks_reserve_the_memory_of_all(tmp_path: Path) -> None:
    one = config_of(DEMO, num_pages=64, context_len=256)
    two = replace(one, options=replace(one.options, tensor_parallel_size=2))
    assert least_bytes(two) > least_bytes(one) / 2


def test_a_placement_is_asked_for_that_memory(certificate: tuple[Path, Path]) -> None:
    placement = NotingPlacement()
    remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)

    async def main() -> None:
        async with service(placement=placement, remote=remote) as running:
            await running.models.load(str(DEMO))

    asyncio.run(main())
    assert [resources.memory_bytes > DEMO.stat().st_size for resources in placement.asked] == [True]


class FullPlacement(TlsPlacement):
    """The first group waits for room until it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.has_room = asyncio.Event(), asyncio.Event()

    async def start(self, config: str, resources: Resources) -> LocalProcess:
        """Start a worker."""
        if not self.is_asked.is_set():
            self.is_asked.set()
            await self.has_room.wait()
        return await super().start(config, resources)


def test_a_worker_without_room_delays_no_other(certificate: tuple[Path, Path]) -> None:
    """As when --replicas wants more workers than the cluster has cores for, and another one is lost."""
    placement = FullPlacement()
    remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)

    async def main() -> None:
        async with service(placement=placement, remote=remote) as running:
            waiting = asyncio.ensure_future(running.primary.launch(config_of(DEMO, num_pages=64)))
            await placement.is_asked.wait()
            other = await asyncio.wait_for(running.primary.launch(config_of(DEMO, num_pages=64)), 60)
            assert other.connection.is_ready
            assert not waiting.done()
            placement.has_room.set()
            for worker in (other, await waiting):
                await worker.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_cpus", "least", "share"),
    [
        (1, 4, 4 + 25),
        (1, 10, 10 + 90 // 8),
        (2, 10, 10 + 45),
        (2, 20, 20 + 80 // 4),
        (8, 10, 100),
        (1, 120, 120),
        (1, 0, 0),
    ],
)
def test_a_group_may_plan_its_share_of_a_node(num_cpus: int, least: int, share: int) -> None:
    node = {"CPU": 8.0, "memory": 100.0}
    assert _memory_share(node, {"num_ranks": 1, "num_cpus": num_cpus, "memory_bytes": least}) == share
    if num_cpus == 2:
        assert _memory_share(node, {"num_ranks": 2, "num_cpus": 1, "memory_bytes": least}) == share
    assert _memory_share({}, {"num_ranks": 1, "num_cpus": num_cpus, "memory_bytes": least}) == 0


def test_groups_that_fill_a_node_fit_into_it() -> None:
    """Each takes what it needs and a quarter of its rest, also if one needs more than the others."""
    needs = [20, 5, 5, 5]
    node, asked = {"CPU": 8.0, "memory": 100.0}, {"num_ranks": 1, "num_cpus": 2}
    shares = [_memory_share(node, asked | {"memory_bytes": least}) for least in needs]
    assert 80 < sum(least + (share - least) / 4 for least, share in zip(needs, shares, strict=True)) <= 100


def test_a_worker_plans_with_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(DEMO)
    before, _ = fit_beside(config)
    for share in (least_bytes(config), least_bytes(config) + (20 << 20)):
        monkeypatch.setenv("PENSTOCK_MEMORY_SHARE", str(share))
        limits, (plan,) = fit_beside(config)
        assert limits.num_pages < before.num_pages
        assert plan.total_bytes + HEADROOM_BYTES <= share
    monkeypatch.setenv("PENSTOCK_MEMORY_SHARE", "1000")
    with pytest.raises(OutOfMemoryError):
        fit_beside(config)
    monkeypatch.setenv("PENSTOCK_MEMORY_SHARE", "some")
    with raises(InvalidArgumentError, param="PENSTOCK_MEMORY_SHARE", match="expected a number of bytes, got 'some'"):
        fit_beside(config)
