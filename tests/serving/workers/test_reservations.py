"""The memory that a placement reserves for a worker: all that it needs at least, with and without KV pages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from penstock.cluster.placement.local import LocalProcess
from penstock.cluster.placement.placement import Resources
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits
from penstock.serving.workers.memory_check import fit_beside, least_bytes
from penstock.serving.workers.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.worker_config import ModelOptions, WorkerConfig
from tests.support.joining_worker import TOKEN
from tests.support.placements import TlsPlacement
from tests.support.worker_processes import DEMO, service


def config_of(path: Path, **limits: int) -> WorkerConfig:
    return WorkerConfig("", "", "m", str(path), options=ModelOptions(threads=1, limits=ProgramLimits(**limits)))


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
    assert many == plan.total_bytes
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
