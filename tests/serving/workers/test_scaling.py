"""The number of workers follows the load; requests wait for the first one, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cluster import scale_loop
from penstock.cluster.autoscale import ScalePolicy
from penstock.engine.options import RequestOptions
from penstock.errors import DeadlineError
from penstock.serving.metrics import Metrics
from penstock.serving.workers.remote_models import RemoteModels
from tests.support.worker_processes import CALM, DEMO, ENDLESS, OPTIONS, SEEDED, pids, service, tokens_of, until


def elastic(primary, policy: ScalePolicy) -> RemoteModels:
    return RemoteModels(primary, OPTIONS, scale=policy)


def test_workers_come_and_go_and_no_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_loop, "SAMPLE_S", 0.05)

    async def main() -> None:
        policy = ScalePolicy(0, 2, queue_s=60.0, full_share=0.02, up_after_s=0.1, down_after_s=1.0)
        async with service(supervision=CALM) as running:
            models = elastic(running.primary, policy)
            try:
                backend = await models.load(str(DEMO))
                expected = await tokens_of(backend, [5, 6], SEEDED)
                async with await backend.submit([7], ENDLESS) as answer:
                    await until(lambda: len(pids(backend)) == 2)
                    await answer.__anext__()
                await until(lambda: not pids(backend))
                assert backend.num_wanted() == 0
                assert backend.is_ready, "the next request is accepted"
                assert backend.state == "ready"
                text = Metrics(models).text().decode()
                assert 'penstock:workers_wanted{model_name="demo"} 0' in text
                assert 'penstock:workers_ready{model_name="demo"} 0' in text
                with pytest.raises(DeadlineError):
                    await backend.submit([5, 6], SEEDED, RequestOptions(deadline_s=0.01))
                answers = await asyncio.gather(*(tokens_of(backend, [5, 6], SEEDED) for _ in range(40)))
                assert answers == [expected] * 40
                assert backend.deaths() == {"signal": 0, "exit": 0, "hang": 0, "start": 0}
            finally:
                await models.close()

    asyncio.run(main())


def test_a_worker_that_is_not_wanted_ends_its_requests_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with service(supervision=CALM) as running:
            models = elastic(running.primary, ScalePolicy(1, 2, queue_s=60.0))
            try:
                backend = await models.load(str(DEMO))
                group = backend._group
                group.resize(2)
                await until(lambda: len(pids(backend)) == 2)
                tasks = [asyncio.ensure_future(tokens_of(backend, [number], SEEDED)) for number in range(8)]
                await asyncio.sleep(0)
                group.resize(1)
                assert [len(ids) for ids in await asyncio.gather(*tasks)] == [24] * 8
                await until(lambda: len(pids(backend)) == 1)
                group.resize(2)
                group.resize(1)  # before it is ready
                await until(lambda: len(pids(backend)) == 1)
                assert len(await tokens_of(backend, [3], SEEDED)) == 24
            finally:
                await models.close()

    asyncio.run(main())
