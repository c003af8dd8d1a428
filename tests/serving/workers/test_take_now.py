"""Deltas that ``take_now`` accepts stay in order and wake no reader; a reader that is behind gets them itself."""

from __future__ import annotations

import asyncio

import pytest

from penstock.llm.answer import EventAnswer
from penstock.llm.engine_thread import Started, StepEvent


async def rounds(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def piece(text: str, **more) -> StepEvent:
    return StepEvent(1, 0, text, [7], **more)


def test_deltas_taken_at_once_wake_no_reader() -> None:
    async def main() -> None:
        answer = EventAnswer(lambda: None)
        taken: list[str] = []
        accepts = True

        def take_now(delta) -> bool:
            if accepts:
                taken.append(delta.text)
            return accepts

        answer.take_now = take_now
        answer.put(piece("a", started=Started(1, 1)))  # the first is the reader's
        assert (await anext(answer)).text == "a"
        reading = asyncio.ensure_future(anext(answer))
        await rounds(2)
        answer.put(piece("b"))
        answer.put(piece("c"))
        await rounds(3)
        assert taken == ["b", "c"]
        assert not reading.done()
        accepts = False
        answer.put(piece("d"))
        accepts = True
        answer.put(piece("e"))  # behind one that the reader did not see yet
        assert (await reading).text == "de"
        answer.put(piece("f"))  # nobody waits
        assert (await anext(answer)).text == "f"
        reading = asyncio.ensure_future(anext(answer))
        await rounds(2)
        answer.put(piece("g", finish_reason="length", is_last=True))  # the end is the reader's
        assert (await reading).finish_reason == "length"
        assert taken == ["b", "c"]
        with pytest.raises(StopAsyncIteration):
            await anext(answer)

    asyncio.run(main())


def test_the_reader_gets_errors_of_take_now() -> None:
    async def main() -> None:
        aborted: list[bool] = []
        answer = EventAnswer(lambda: aborted.append(True))
        answer.take_now = lambda delta: [][0]
        answer.put(piece("a", started=Started(1, 1)))

        async def read() -> None:
            async with answer:
                async for _ in answer:
                    pass

        reading = asyncio.ensure_future(read())
        await rounds(3)
        answer.put(piece("b"))  # whoever brings the news goes on
        with pytest.raises(IndexError):
            await reading
        assert aborted == [True]

    asyncio.run(main())
