"""What workers report of their pages: the router knows it, also after a gap, a lost worker and a restart of its own."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock.engine.options import RequestOptions
from penstock.engine.page_journal import PageReport
from penstock.engine.params import SamplingParams
from penstock.errors import InternalError
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import pages_from, pages_to
from penstock.serving.workers.worker_connection import WorkerConnection, page_keys
from penstock.serving.workers.worker_routing import WorkerRouting
from tests.support.worker_processes import DEMO, HASTY, pids, service, tokens_of, until

PROMPT = [number % 500 for number in range(100)]
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def message_of(report: PageReport) -> pb.FromWorker:
    message = pb.FromWorker()
    pages_to(report, message.step.pages)
    return message


def test_a_gap_in_the_reports_asks_for_all() -> None:
    async def main() -> None:
        link = WorkerConnection("m", 0)
        heard: list[int] = []

        def asked() -> int:
            return sum(message.HasField("ask_pages") for message in link._unsent)

        link.on_message(message_of(PageReport(1, True, [b"a" * 16], (), 1)))
        link.follow_pages(lambda report: heard.append(report.number))
        assert (heard, asked()) == ([], 1)
        link.on_message(message_of(PageReport(2, False, (), (), 1)))
        assert heard == [], "a part before the whole says nothing"
        for number, is_full in ((3, True), (4, False), (6, False), (7, False), (8, True), (9, False)):
            link.on_message(message_of(PageReport(number, is_full, (), (), 1)))
        assert (heard, asked()) == ([3, 4, 8, 9], 2)
        link.fail("over")

    asyncio.run(main())


def test_reports_carry_the_first_bytes_of_keys() -> None:
    message = message_of(PageReport(7, False, [b"a" * 16, b"b" * 16], [b"c" * 16], 5)).step.pages
    assert pages_from(message) == PageReport(7, False, [b"a" * 8, b"b" * 8], [b"c" * 8], 5)
    message.gained += b"d"
    with pytest.raises(InternalError, match="page report: expected keys of 8 bytes, got 17 bytes"):
        pages_from(message)


def test_the_router_knows_what_workers_report() -> None:
    async def main() -> None:
        async with service(supervision=HASTY) as running:
            backend = await running.models.load(str(DEMO))

            def known(prompt: list[int] = PROMPT, salt: str = "") -> list[int]:
                return backend._routing.router.matches(page_keys(prompt, salt)).tolist()

            async def ask(prompt: list[int], salt: str = "") -> list[int]:
                answer = await tokens_of(backend, prompt, GREEDY, RequestOptions(cache_salt=salt))
                return [*prompt, *answer]

            whole = await ask(PROMPT, "one tenant")
            await until(lambda: known(salt="one tenant") == [3])
            assert (known(), known(salt="another")) == ([0], [0]), "nothing of it is known to others"
            await ask(whole[:-1] + [1] * 30)
            await until(lambda: known(whole[:-1]) == [3])

            backend._routing = WorkerRouting()  # a router that starts again asks its workers
            await ask([1, 2, 3])
            await until(lambda: (known(), known(salt="one tenant")) == ([3], [3]))

            before = pids(backend)
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: pids(backend) not in (before, []))
            await ask([1, 2, 3])
            assert (known(), backend._routing.router.num_keys) == ([0], 0), "another process has no pages yet"

    asyncio.run(main())


def test_pages_of_an_answer_are_known_to_the_next_turn() -> None:
    async def main() -> None:
        async with service(supervision=HASTY) as running:
            backend = await running.models.load(str(DEMO))
            answer = await tokens_of(backend, PROMPT, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
            matches = backend._routing.router.matches
            await until(lambda: matches(page_keys([*PROMPT, *answer], "")).tolist() == [4])

    asyncio.run(main())
