"""Limits of a servable: bytes of a batch, open requests of a method, prompts of a language model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import QueueFullError, UnavailableError
from penstock.servables.api.manifest import LanguageManifest
from penstock.servables.lifecycle.language_models import LanguageQueue
from tests.support.errors import raises
from tests.support.servable_folders import PATIENCE, Host, ask, run, serving, write
from tests.support.waiting import eventually

SIZES = """
    servable.settings(max_batch_mib=1, timeout_s=600)

    @servable.stage(outputs={"size": "INT64[]"}, batch_size=64)
    def of_bytes(x):
        return np.full(len(x), len(x))

    @servable.stage(outputs={"size": "INT64[]"}, batch_size=64, padded_sizes=(4, 64))
    def of_numbers(x):
        return np.full(len(x), len(x))

    @servable.method(inputs={"x": "BYTES[]"}, outputs={"size": "INT64[]"})
    def texts(x):
        return of_bytes(x)

    @servable.method(inputs={"x": "UINT8[-1]"}, outputs={"size": "INT64[]"})
    def numbers(x):
        return of_numbers(x)
"""
WAITING = """
    servable.settings(workers=4, timeout_s=600)

    @servable.stage(outputs={"y": "TEXT[]"})
    def wait(path):
        while not os.path.exists(path): time.sleep(0.005)
        return path

    @servable.method(inputs={"path": "TEXT[]"}, outputs={"y": "TEXT[]"}, max_open=2)
    def at_once(path):
        return wait(path)
"""
ASKING = """
    servable.settings(max_waiting=8)
    model = servable.language_model("weights", max_open=3)

    @servable.method(inputs={"text": "TEXT[]"}, outputs={"text": "TEXT[]"})
    def go_on(text):
        return model(text)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("servables")
    write(root, "sizes", SIZES)
    found = Host(root)
    yield found
    found.close()


def texts(*sizes: int) -> list[bytes]:
    return [b"x" * size for size in sizes]


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("numbers", np.zeros((8, 300_000), np.uint8), [4] * 8),  # three and three go, and two, each padded to four
        ("numbers", np.zeros((2, 2 << 20), np.uint8), [4] * 2),  # each alone
        ("numbers", np.zeros((64, 10), np.uint8), [64] * 64),
        ("texts", texts(*[300_000] * 8), [3, 3, 3, 3, 3, 3, 2, 2]),
        ("texts", texts(10, 600_000, 600_000, 10), [2, 2, 2, 2]),
        ("texts", texts(1, 2 << 20, 1), [1, 1, 1]),
        ("texts", texts(*[0] * 64), [64] * 64),
    ],
)
def test_bytes_of_a_batch_are_limited(host: Host, name: str, given: Any, wanted: list[int]) -> None:
    assert host.ask(f"sizes.{name}", x=given)["size"].tolist() == wanted


def test_bytes_of_shared_batches_are_limited(host: Host) -> None:
    several = [{"x": np.full((1, 600_000), one, np.uint8)} for one in range(6)]
    statistics = host.servables.find("sizes.numbers").statistics
    before = statistics.batch_sizes.get(1, (0, 0))[0]
    assert [one["size"].tolist() for one in host.gather("sizes.numbers", *several)] == [[4]] * 6
    assert statistics.batch_sizes[1][0] == before + 6


def test_requests_that_arrive_together_share_a_batch(host: Host) -> None:
    """Without any delay, while the process is idle."""
    several = [{"x": texts(1)}, {"x": texts(1, 1)}, {"x": texts(1)}]
    assert [one["size"].tolist() for one in host.gather("sizes.texts", *several)] == [[4], [4, 4], [4]]


def test_requests_for_a_free_process_do_not_fill_queues(tmp_path: Path) -> None:
    """With room for one instance, the first of two requests runs at once, and the second waits; a third is refused."""
    write(tmp_path, "sizes", SIZES.replace("max_batch_mib=1", "max_waiting=1"))
    host = Host(tmp_path)
    try:
        first, second, third = host.gather("sizes.texts", *[{"x": texts(1)}] * 3)
    finally:
        host.close()
    assert [one["size"].tolist() for one in (first, second)] == [[1], [1]]
    assert isinstance(third, QueueFullError)


def test_open_requests_of_a_method_are_limited(tmp_path: Path) -> None:
    """The third request is refused at once, the first two are answered, and then there is room again."""
    write(tmp_path, "slow", WAITING)
    gate = tmp_path / "gate"

    async def work() -> None:
        async with serving(tmp_path) as servables:
            open_ = [asyncio.ensure_future(ask(servables, "slow", {"path": [str(gate)]})) for _ in range(2)]
            await asyncio.sleep(0)
            with raises(QueueFullError, code="queue_full", match=r"slow\.at_once .* 2 "):
                await ask(servables, "slow", {"path": [str(gate)]})
            statistics = servables.find("slow").statistics
            assert (statistics.num_rejected, statistics.num_fail) == (1, 0)
            open_[0].cancel()
            await asyncio.wait(open_[:1])
            later = asyncio.ensure_future(ask(servables, "slow", {"path": [str(gate)]}))
            await asyncio.sleep(0)
            gate.touch()
            for one in (open_[1], later):
                assert (await one)["y"].tolist() == [str(gate).encode()]

    run(work)


class Model:
    """Stands for a language model: it answers with the prompt's bytes once it may, and counts."""

    is_ready = True
    is_isolated = False

    def __init__(self) -> None:
        self.tokenizer = self
        self.num_open = self.max_open = 0
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    def encode(self, prompt: str) -> list[int]:
        return [*prompt.encode()]

    async def submit(self, ids: list[int], params: object, options: object, request_id: str) -> Answer:
        self.asked.append(request_id)
        return Answer(self, bytes(ids).decode())

    async def open(self, manifest: Any, source: Any) -> LanguageQueue:
        async def end() -> None:
            pass

        queue = LanguageQueue("it", manifest, lambda: self, end)  # type: ignore[arg-type, return-value]
        self.num_waiting = lambda: queue.num_waiting
        return queue


class Answer:
    def __init__(self, model: Model, text: str) -> None:
        self.model, self.text = model, text

    async def __aenter__(self) -> Answer:
        self.model.num_open += 1
        self.model.max_open = max(self.model.max_open, self.model.num_open)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.model.num_open -= 1

    async def __aiter__(self) -> AsyncIterator[Answer]:
        await self.model.gate.wait()
        yield self


def test_prompts_of_a_language_model_are_limited(tmp_path: Path) -> None:
    """Three at a time, of several requests by turns; what is too much to wait is refused; who leaves makes room."""
    write(tmp_path, "it", ASKING)

    async def work() -> None:
        model = Model()
        async with serving(tmp_path, languages=model) as servables:
            given = [f"text {one}" for one in range(20)]
            many = asyncio.ensure_future(ask(servables, "it", {"text": given}, request_id="many"))
            await eventually(lambda: model.num_open >= 3)
            with raises(QueueFullError, code="queue_full", match=r"17 .* 1 .* max_waiting .8"):
                await ask(servables, "it", {"text": ["late"]})
            model.gate.set()
            assert (await many)["text"].tolist() == [one.encode() for one in given]
            model.gate.clear()
            assert model.max_open == 3
            first = asyncio.ensure_future(ask(servables, "it", {"text": given[:8]}, request_id="first"))
            await eventually(lambda: model.num_open >= 3)
            second = asyncio.ensure_future(ask(servables, "it", {"text": given[:2]}, request_id="second"))
            await eventually(lambda: model.num_waiting() == 7)
            first.cancel()
            await eventually(lambda: model.asked[-2:] == ["second"] * 2)
            model.gate.set()
            assert (await second)["text"].tolist() == [one.encode() for one in given[:2]]
            assert (model.num_open, model.max_open) == (0, 3)
            await ask(servables, "it", {"text": given[:20]})  # nothing that left is counted any more

    run(work)


def test_open_prompts_are_refused_when_a_version_stops(tmp_path: Path) -> None:
    """Requests that wait for a language model are refused when the drain times out."""
    write(tmp_path, "it", ASKING)

    async def work() -> None:
        model = Model()
        async with serving(tmp_path, replace(PATIENCE, drain_s=0.2), languages=model) as servables:
            asked = asyncio.ensure_future(ask(servables, "it", {"text": ["text"] * 5}))
            await eventually(lambda: model.num_open >= 3)
            await servables.unload("it")
            with pytest.raises(UnavailableError, match="unloaded"):
                await asyncio.wait_for(asked, 300)
            assert model.num_open == 0

    run(work)


def test_closed_language_model_refuses_prompts() -> None:
    async def work() -> None:
        async def end() -> None: ...

        queue = LanguageQueue("it", LanguageManifest("", "it", None, {}, 1, 2), lambda: None, end)  # type: ignore[arg-type, return-value]
        await queue.close()
        with pytest.raises(UnavailableError, match="unloaded"):
            queue.add(None)  # type: ignore[arg-type]

    asyncio.run(work())


def test_prompts_cancelled_before_start_free_their_slot() -> None:
    class Two:
        count = 2

    async def work() -> None:
        async def end() -> None: ...

        queue = LanguageQueue("it", LanguageManifest("", "it", None, {}, 1, 2), lambda: None, end)  # type: ignore[arg-type, return-value]
        for _ in range(3):
            job: Any = Two()
            queue.add(job)
            with raises(QueueFullError, code="queue_full", match=r"2 .* 2 .* max_waiting .2"):
                queue.add(Two())  # type: ignore[arg-type]
            queue.cancel(job)
            await eventually(lambda: queue.num_waiting == 0)

    asyncio.run(work())
