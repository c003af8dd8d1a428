"""A link that goes silent without an end: the worker behind it is given up, and another one takes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.engine.params import SamplingParams
from penstock.llm.llm import LLM
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from tests.support.answer_reader import AnswerReader
from tests.support.joining_worker import TOKEN, joining_worker
from tests.support.link_proxy import LinkProxy
from tests.support.placements import ProxiedPlacement
from tests.support.worker_processes import CALM, DEMO, HASTY, pids, service, tokens_of, until

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100_000, temperature=0, ignore_eos=True)


def test_a_silent_link_is_noticed(certificate: tuple[Path, Path]) -> None:
    """The proxy still acknowledges what both ends send, so their kernels notice nothing."""
    placement = ProxiedPlacement()
    remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)

    async def main() -> None:
        options = {"placement": placement, "remote": remote, "supervision": HASTY, "silent_s": 2.0}
        async with service(**options) as running:
            backend = await running.models.load(str(DEMO))
            expected, before = await tokens_of(backend, [5, 6], GREEDY), pids(backend)
            reader = AnswerReader(backend, [5, 6], LONG)
            await until(lambda: reader.num_deltas)
            placement.proxies[0].cut()
            await reader.task
            reader.check(whole)
            await until(lambda: pids(backend) not in (before, []))
            assert await tokens_of(backend, [5, 6], GREEDY) == expected
            assert backend.deaths()["hang"] == 1

    with LLM(DEMO, threads=1) as llm:
        whole = llm.generate([5, 6], LONG)
    try:
        asyncio.run(main())
    finally:
        for proxy in placement.proxies:
            proxy.close()


def test_a_silent_worker_that_joined_is_given_up(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """As a placed one is.  It is told so when the link works again, and joins once more."""
    remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)

    async def main() -> None:
        async with service(remote=remote, supervision=CALM, silent_s=2.0) as running:
            backend = await running.models.load(str(DEMO))
            proxy = LinkProxy(running.primary.port)
            try:
                with joining_worker(proxy.port, tmp_path, certificate[0], again=True):
                    await until(lambda: len(backend.workers()) == 2)
                    first = backend.workers()[1].name
                    proxy.cut()
                    await until(lambda: len(backend.workers()) == 1)
                    assert len(await tokens_of(backend, [5, 6], GREEDY)) == 8
                    proxy.heal()
                    await until(lambda: len(backend.workers()) == 2)
                    assert backend.workers()[1].name != first
            finally:
                proxy.close()

    asyncio.run(main())
