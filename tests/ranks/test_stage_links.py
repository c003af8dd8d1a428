"""The link of a stage is cut, slow or comes back: the request ends within the limit, or nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.engine.params import SamplingParams
from penstock.errors import UnavailableError
from penstock.llm.llm import LLM
from tests.support.faulty_rank import plant
from tests.support.link_proxy import LinkProxy
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, tokens_of
from tests.support.services import certificate
from tests.support.stage_processes import Stages, stages
from tests.support.waiting import until

__all__ = ["certificate", "stages"]

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
PHASES = {
    "before the batch": (1, "await", 1),
    "first stage before its rows": (1, "send", 0),
    "last stage inside a step": (2, "recv", 1),
    "last stage before the reply": (2, "send", 0),
}


class Links:
    """Two stages, each behind a proxy."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.proxies: list[LinkProxy] = []

    def open_llm(self, variables: dict[str, str] | None = None) -> LLM:
        def start() -> None:
            self.proxies = [LinkProxy(self.stages.port) for _ in range(2)]
            for rank, proxy in enumerate(self.proxies, 1):
                self.stages.start("--rank", rank, port=proxy.port, variables=variables)

        return self.stages.open_llm(on_listen=start)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def links(stages: Stages) -> Iterator[Links]:
    found = Links(stages)
    yield found
    found.close()


@pytest.fixture(scope="module")
def expected() -> list:
    """What one process answers."""
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        return tokens_of(llm, PROMPTS, GREEDY)


def when_it_exists(path: Path, action: Callable[[], None], then: Path) -> None:
    def wait() -> None:
        until(lambda: path.exists())
        action()
        then.touch()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_link_ends_the_request(phase: str, links: Links, expected: list, tmp_path: Path) -> None:
    """The half that is cut off joins no group that has its stages, whatever it sends when the link is back."""
    rank, function, number = PHASES[phase]
    variables = plant(tmp_path, rank=rank, function=function, number=number, kind="cut")
    with links.open_llm(variables) as llm:
        link = links.proxies[rank - 1]
        when_it_exists(tmp_path / "cut", link.cut, tmp_path / "done")
        stream = llm.stream(PROMPTS[0], LONG)
        for _ in range(3):
            next(stream)
        (tmp_path / "armed").touch()
        with pytest.raises(UnavailableError, match=rf"rank {rank} at .* is lost: no message for 1.7 s") as caught:
            list(stream)
        assert caught.value.code == "unavailable"  # retry later
        assert (tmp_path / "done").exists()
    lost = links.stages.processes[rank - 1]

    def replace() -> None:  # the other stage joins again by itself
        links.stages.start("--rank", rank)

    with links.stages.open_llm(on_listen=replace) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == expected
        before = link.num_bytes
        link.heal()
        assert lost.stderr is not None
        while "the group has all its stages" not in (line := lost.stderr.readline()):
            assert line, "the stage ended"
        assert link.num_bytes > before
        assert tokens_of(llm, PROMPTS, GREEDY) == expected


@pytest.mark.long
def test_a_slow_link_changes_no_token(links: Links, expected: list) -> None:
    with links.open_llm() as llm:
        for proxy in links.proxies:
            proxy.delay_s, proxy.bytes_per_s = 0.02, 1_000_000
        assert tokens_of(llm, PROMPTS, GREEDY) == expected
        for proxy in links.proxies:
            proxy.delay_s, proxy.bytes_per_s = 0.0, 0
        stream = llm.stream(PROMPTS[0], LONG)
        ids = [next(stream).token_ids for _ in range(3)]
        links.proxies[1].cut()
        threading.Timer(0.4, links.proxies[1].heal).start()  # long before the limit
        ids += [delta.token_ids for delta in stream]
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        assert [token for part in ids for token in part] == llm.generate(PROMPTS[0], LONG).token_ids
