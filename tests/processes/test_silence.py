"""Silence of a peer is measured while this process runs: after a stop, or a stall of the machine, it begins anew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from penstock.processes import silence
from penstock.processes.silence import Silence, comes_in_time


class Clock:
    """A clock that each sleep, and each wait for something, moves by the next of some steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: float) -> None:
        self.now, self._steps = 1000.0, iter(steps)
        monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(
            silence, "asyncio", SimpleNamespace(sleep=self._sleep, wait=self._wait, ensure_future=asyncio.ensure_future)
        )

    async def _sleep(self, seconds: float) -> None:
        self.now += next(self._steps)

    async def _wait(self, awaited: list[asyncio.Future[None]], timeout: float) -> tuple[set[object], set[object]]:
        self.now += next(self._steps)
        return {one for one in awaited if one.done()}, set()


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.5, 0.6, 3600.0, 0.5)

    async def main() -> None:
        measured, found = Silence(), []
        for _ in range(4):
            await measured.sleep(0.5)
            found.append(round(measured.seconds(), 6))
        assert found == [0.5, 1.1, 0.0, 0.5]
        assert measured.seconds(clock.now - 0.1) == pytest.approx(0.1), "something came since"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("steps", "heard", "expected"),
    [
        ([0.25] * 7, 0.0, 1001.75),
        ([0.25] * 6 + [3600.0] + [0.25] * 7, 0.0, 4603.25),  # stopped just before the limit
        ([0.25] * 9, 1000.5, 1002.25),
    ],
)
def test_a_silent_peer_is_given_up(
    steps: list[float], heard: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, *steps, 0.25)

    async def main() -> None:
        awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert not await comes_in_time(awaited, 2.0, lambda: heard)
        assert clock.now - expected == pytest.approx(0.25)  # the first look after more than seven eighths

    asyncio.run(main())


def test_what_came_is_taken_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 3600.0)

    async def main() -> None:
        awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        awaited.set_result(None)
        assert await comes_in_time(awaited, 2.0)

    asyncio.run(main())
