"""Grammars made to take long or much memory: each ends in bounds, and other requests never notice."""

from __future__ import annotations

import resource
import sys
import threading

import pytest

from benchmarks.hostile_grammars import ask_hostile, hostile_grammar
from penstock.engine.params import SamplingParams

ENDS = {"stop", "length", "grammar_too_complex", "grammar_dead_end", "invalid_value", "unsupported_parameter"}
MAX_GROWN_MIB = 400
"""Twice what 10,000 of them take: 32 kept grammars, and those of two threads."""


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 16),
        pytest.param(16, 384, marks=pytest.mark.long),
        pytest.param(400, 9600, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_hostile_grammars_end_in_bounds(make_llm, first, count):
    llm = make_llm()
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    expected, found, ends = llm.generate("the cat", plain).token_ids, [], {}
    waiting, lock = iter(range(first, first + count)), threading.Lock()

    def send() -> None:
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return
            ends[seed] = ask_hostile(llm, seed)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(llm.generate("the cat", plain).token_ids)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (
        1 << (10 if sys.platform == "linux" else 20)
    )
    assert len(ends) == count  # no thread ended with another error
    assert {seed: end for seed, end in ends.items() if end not in ENDS} == {}
    assert all(tokens == expected for tokens in found)
    assert grown < MAX_GROWN_MIB
    llm.engine.check_integrity()
    assert not llm.engine.scheduler.has_work


def test_the_same_seed_is_the_same_grammar():
    assert [hostile_grammar(seed) for seed in range(48)] == [hostile_grammar(seed) for seed in range(48)]
