"""Memory of KV pages is made ahead of use, and no more of it."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.core.memory import make_memory
from penstock.runtime.page_prefault import PagePrefault
from tests.support.command import DEMO


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Maker:
    """Notes what is made; ``gate`` holds it up."""

    def __init__(self, works: bool = True) -> None:
        self.made: list[tuple[int, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.news = threading.Semaphore(0)
        self.works = works

    def __call__(self, part: int, start: int, stop: int) -> bool:
        self.gate.wait()
        self.made.append((part, start, stop))
        self.news.release()
        return self.works

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.news.acquire(timeout=600)


@pytest.fixture
def maker():
    return Maker()


def test_the_next_run_is_made_when_half_of_this_one_is_used(maker):
    ahead = PagePrefault(maker, 2, num_pages=150, run_len=40)
    for used in (1, 20):
        ahead.use(used)
    assert ahead._thread is None  # who uses little starts no thread
    ahead.use(21)
    maker.wait(2)
    ahead.use(60)
    ahead.use(3)
    assert maker.made == [(0, 40, 80), (1, 40, 80)]
    ahead.use(101)  # two runs at once, one after the other
    maker.wait(4)
    ahead.use(150)
    ahead.close()
    assert maker.made[2:] == [(0, 80, 120), (1, 80, 120), (0, 120, 150), (1, 120, 150)]


def test_nothing_waits_for_it_and_closing_ends_it(maker):
    maker.gate.clear()
    ahead = PagePrefault(maker, 3, num_pages=1000, run_len=8)
    ahead.use(1)
    ahead.use(900)  # returns although nothing is made yet
    assert ahead.num_made == 8
    closing = threading.Thread(target=ahead.close)
    closing.start()
    maker.gate.set()
    closing.join(600)
    assert not closing.is_alive()
    assert len(maker.made) <= 2  # not even the first run is finished
    ahead.use(1000)
    ahead.close()
    assert not ahead._thread.is_alive()


def test_a_system_that_cannot_is_asked_once():
    maker = Maker(works=False)
    ahead = PagePrefault(maker, 2, num_pages=100, run_len=20)
    ahead.use(10)
    maker.wait(1)
    ahead._thread.join(600)
    ahead.use(90)
    ahead.close()
    assert maker.made == [(0, 20, 40)]
    assert ahead.num_made == 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_made_memory_is_resident_and_keeps_what_is_in_it():
    memory = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory, np.uint8)
    address = view.__array_interface__["data"][0]
    view[5] = 77
    if not make_memory(address, 1):
        pytest.skip("the kernel is older than 5.14")
    before = resident_bytes()
    assert make_memory(address + 3, (32 << 20) - 3)
    assert resident_bytes() - before > 30 << 20
    assert view[5] == 77
    assert not make_memory(0, mmap.PAGESIZE)  # nothing is mapped there


def test_prefaulted_pages_give_the_same_tokens():
    limits = ProgramLimits(num_pages=600, max_requests=4, context_len=1024)
    prompts = [[i % 900 + 3 for i in range(start, start + 900)] for start in range(0, 4000, 1000)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(DEMO, limits=limits, prefix_cache=False) as llm:
        ahead = llm.engine.program._prefault
        expected = llm.generate(prompts[0], params).token_ids
        assert ahead._thread is None  # 30 pages are a quarter of a run
        results = llm.generate(prompts * 2, params)
        assert results[0].token_ids == results[4].token_ids == expected
        assert 120 < ahead._run_len < ahead._wanted < 600
    assert not ahead._thread.is_alive()


def flags_at(address: int) -> list[str]:
    """What Linux says of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_only_pages_after_the_first_run_are_huge():
    limits = ProgramLimits(num_pages=600, max_requests=4, context_len=1024)
    with LLM(DEMO, limits=limits) as llm:
        program = llm.engine.program
        for state in range(program.model.info.num_states):
            size = program._memory_of(state, 0, 1)[1]
            start = program._memory_of(state, 0, 1)[0]
            assert "nh" in flags_at(start + 50 * size)
            assert "nh" not in flags_at(start + 300 * size)
