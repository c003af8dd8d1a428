"""Three times what a service can do, counted in requests instead of seconds; benchmarks/overload.py has the clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.client.async_client import AsyncClient
from penstock.errors import ServiceError
from tests.support.serve_command import ask, serving
from tests.support.worker_processes import DEMO, until

pytestmark = pytest.mark.long

PLACES, WAITING, NUM_NEW, NUM_SENT = 2, 4, 192, 90
MAX_OPEN = PLACES + WAITING


class Load:
    """Requests, three of which are sent whenever one is done."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.texts: dict[int, str] = {}
        self.refused: list[ServiceError] = []
        self.num_between: list[int] = []
        """Of each that was done: how many others ended while it was open."""
        self._tasks: list[asyncio.Task[None]] = []

    async def text(self, number: int) -> str:
        answer = await self.client.complete([400 + number, 7], max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == NUM_NEW
        return answer["choices"][0]["text"]

    def send(self, count: int) -> None:
        for _ in range(min(count, NUM_SENT - len(self._tasks))):
            self._tasks.append(asyncio.ensure_future(self._one(len(self._tasks))))

    async def _one(self, number: int) -> None:
        before = len(self.texts)
        try:
            text = await self.text(number)
        except ServiceError as error:
            self.refused.append(error)
            return
        self.num_between.append(len(self.texts) - before)
        self.texts[number] = text
        self.send(3)

    async def run(self) -> None:
        self.send(3 * MAX_OPEN)
        await until(
            lambda: (
                len(self.texts) + len(self.refused) == NUM_SENT
                or any(one.done() and one.exception() for one in self._tasks)
            )
        )
        await asyncio.gather(*self._tasks)


def test_overload_is_refused_and_admitted_requests_keep_order(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with AsyncClient(url, retries=0) as client:
            load = Load(client)
            await load.run()
            # One that ends makes place for one of the three that follow it.
            assert (NUM_SENT - 3 * MAX_OPEN) // 3 <= len(load.texts) <= (NUM_SENT - 3 * MAX_OPEN) // 3 + 2 * MAX_OPEN
            assert {(one.status, one.code) for one in load.refused} == {(429, "queue_full")}
            assert all(one.retry_after_s >= 1 for one in load.refused)
            # First come, first served: no longer than the queue, and twice as much for what the client sees late.
            assert max(load.num_between) <= 3 * MAX_OPEN
            assert [await load.text(number) for number in load.texts] == [*load.texts.values()]

    with serving(DEMO, "--max-requests", PLACES, "--max-waiting", WAITING, "--threads", 1, cwd=tmp_path) as (_, url, _):
        asyncio.run(main(url))
        (model,) = ask(url, "/status")["models"]
        assert [worker["num_open"] for worker in model["workers"]] == [0]
