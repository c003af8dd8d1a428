"""Pages pass from one worker to another through the primary; whatever fails, the answer is right and no page leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.engine.params import SamplingParams
from penstock.llm.engine_thread import EngineThread
from penstock.runtime.program import PAGE_TOKENS
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.moving import copy_pages as copying
from penstock.serving.workers.moving import worker_pages
from penstock.serving.workers.moving.copy_pages import copy_pages
from penstock.serving.workers.moving.worker_pages import WorkerPages
from tests.support.engine_requests import prompt_of
from tests.support.inbox import Inbox
from tests.support.worker_processes import until

PROMPT = prompt_of(6 * PAGE_TOKENS + 5)
PARAMS = SamplingParams(max_tokens=8, temperature=1, seed=5, ignore_eos=True)


class Worker:
    """An engine with its part in transfers, and what the primary knows as its connection."""

    def __init__(self, llm) -> None:
        self.inbox = Inbox()
        self.thread = EngineThread(llm, self.inbox)
        self.pages = WorkerPages(self.thread, self._on_message)
        self.transfers: dict[int, Callable] = {}
        self.gone = asyncio.Event()
        self.change: Callable[[pb.FromWorker], pb.FromWorker | None] = lambda message: message
        self.kinds: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._key = 0

    def send_page_message(self, message: pb.ToWorker) -> None:
        self.pages.handle(pb.ToWorker.FromString(message.SerializeToString()))

    def _on_message(self, message: pb.FromWorker) -> None:
        self._loop.call_soon_threadsafe(self._deliver, message)

    def _deliver(self, message: pb.FromWorker) -> None:
        changed = self.change(message)
        if changed is None or self.gone.is_set():
            return
        kind = changed.WhichOneof("kind")
        self.kinds.append(kind)
        on_message = self.transfers.get(getattr(changed, kind).transfer)
        if on_message is not None:
            on_message(changed)

    def lose(self) -> None:
        self.gone.set()
        for on_message in [*self.transfers.values()]:
            on_message(None)

    async def answer(self, prompt=PROMPT) -> list[int]:
        self._key += 1
        key = self._key
        self.thread.submit(key, prompt, PARAMS)
        await until(lambda: any(event.is_last for event in self.inbox.of(key)))
        return [token for event in self.inbox.of(key) for token in event.token_ids]

    def num_cached(self) -> int:
        return self.thread.llm.engine.figures().num_cached_tokens

    async def is_empty(self) -> None:
        """Wait until no transfer holds a page."""
        pools = self.thread.llm.engine.scheduler.ledger.pools
        await until(lambda: all(pool.num_free == pool.num_pages for pool in pools))


def play(make_llm, test, **options) -> None:
    async def main() -> None:
        workers = [Worker(make_llm(max_tokens=256, **options)) for _ in range(2)]
        try:
            await test(*workers)
            for worker in workers:
                worker.pages.close()
                await worker.is_empty()
        finally:
            for worker in workers:
                worker.pages.close()
                worker.thread.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """A busy machine must not end a transfer."""
    monkeypatch.setattr(worker_pages, "LEASE_S", 600.0)
    monkeypatch.setattr(copying, "_ANSWER_S", 600.0)


@pytest.mark.parametrize("windows", [(0,), (0, 33), (40, 0)], ids=str)
def test_the_receiver_computes_only_the_end(make_llm, windows) -> None:
    async def test(source: Worker, target: Worker) -> None:
        expected = await source.answer()
        assert await copy_pages(source, target, PROMPT, "", "") > 0
        assert await target.answer() == expected
        assert target.num_cached() == 6 * PAGE_TOKENS
        assert await copy_pages(source, target, PROMPT, "", "") == 0, "it has them"
        assert "page_data" not in target.kinds
        assert await copy_pages(source, target, PROMPT[: 2 * PAGE_TOKENS - 1], "", "") == 0, "computing it is as fast"
        assert await copy_pages(source, target, prompt_of(200, 9), "", "") == 0, "no worker has these pages"
        assert await copy_pages(source, target, PROMPT, "other", "") == 0, "it has computed it for others"
        assert await copy_pages(source, target, PROMPT, "", "other") > 0
        await target.answer()
        assert target.num_cached() == 2 * 6 * PAGE_TOKENS, "those of the right salt"

    play(make_llm, test, windows=windows)


def flip(message: pb.FromWorker) -> pb.FromWorker:
    if message.HasField("page_data") and message.page_data.part == 3:
        message.page_data.data = message.page_data.data[:-1] + bytes([message.page_data.data[-1] ^ 1])
    return message


def shorten(message: pb.FromWorker) -> pb.FromWorker:
    if message.HasField("page_data") and message.page_data.part == 2:
        message.page_data.data = message.page_data.data[:-8]
    return message


def renumber(message: pb.FromWorker) -> pb.FromWorker:
    if message.HasField("page_data") and message.page_data.part == 2:
        message.page_data.part = 1
    return message


def wrong_checksum(message: pb.FromWorker) -> pb.FromWorker:
    if message.HasField("pages_ended"):
        message.pages_ended.checksum = bytes(16)
    return message


def other_kind(message: pb.FromWorker) -> pb.FromWorker:
    if message.HasField("page_data") and message.page_data.part == 1:
        return pb.FromWorker(page_stored=pb.PageStored(transfer=message.page_data.transfer))
    return message


@pytest.mark.parametrize("damage", [flip, shorten, renumber, wrong_checksum, other_kind])
def test_damaged_pages_are_computed_again(make_llm, damage) -> None:
    async def test(source: Worker, target: Worker) -> None:
        expected = await source.answer()
        source.change = damage
        assert await copy_pages(source, target, PROMPT, "", "") == 0
        assert await target.answer() == expected
        assert target.num_cached() == 0

    play(make_llm, test)


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("kind", ["pages_offered", "pages_granted", "page_data", "page_stored"])
def test_a_lost_worker_ends_the_transfer(make_llm, victim, kind) -> None:
    async def test(source: Worker, target: Worker) -> None:
        expected = await source.answer()
        lost = source if victim == "source" else target

        def lose(message: pb.FromWorker) -> pb.FromWorker:
            if message.WhichOneof("kind") == kind:
                lost.lose()
            return message

        source.change = target.change = lose
        assert await copy_pages(source, target, PROMPT, "", "") == 0
        assert await target.answer() == expected
        assert target.num_cached() == 0

    play(make_llm, test)


def test_pages_of_a_silent_transfer_are_released(make_llm, monkeypatch) -> None:
    monkeypatch.setattr(worker_pages, "LEASE_S", 0.2)
    monkeypatch.setattr(copying, "_ANSWER_S", 1.0)

    async def test(source: Worker, target: Worker) -> None:
        expected = await source.answer()
        free = target.thread.llm.engine.scheduler.ledger.pools[0]
        held: list[int] = []

        def silence(message: pb.FromWorker) -> pb.FromWorker | None:
            if not message.HasField("page_stored"):
                return message
            held.append(free.num_pages - free.num_free)
            return None

        target.change = silence
        task = asyncio.ensure_future(copy_pages(source, target, PROMPT, "", ""))
        await until(lambda: held and free.num_free == free.num_pages)
        assert held[0] > 0
        assert await task == 0
        assert await target.answer() == expected

    play(make_llm, test)


def test_steps_go_on_during_a_transfer(make_llm) -> None:
    """A request of each engine runs while pages pass; its tokens are those of an idle machine."""

    async def test(source: Worker, target: Worker) -> None:
        await source.answer()
        expected = await source.answer(PROMPT[:40])
        busy = [asyncio.ensure_future(worker.answer(PROMPT[:40])) for worker in (source, target) for _ in range(6)]
        assert await copy_pages(source, target, PROMPT, "", "") > 0
        assert await asyncio.gather(*busy) == [expected] * 12

    play(make_llm, test)


def test_an_error_of_a_transfer_does_not_end_the_engine(make_llm, monkeypatch, capfd) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("planted")

    async def test(source: Worker, target: Worker) -> None:
        expected = await source.answer()
        monkeypatch.setattr(worker_pages, "grant_pages", fail)
        assert await copy_pages(source, target, PROMPT, "", "") == 0
        assert await target.answer() == expected
        assert "a transfer of pages failed: MemoryError('planted')" in capfd.readouterr().err

    play(make_llm, test)
