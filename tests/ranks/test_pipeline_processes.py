"""Stages as processes: the same answers as one process, with a step in flight for each, and what happens at ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, OutOfMemoryError, UnavailableError, UnsupportedError
from penstock.llm.llm import LLM
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.open_ranks import plan_ranks
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS, rank_pids, tokens_of

LAYOUTS = [RankLayout(2, 2), RankLayout(pp=2), RankLayout(pp=4)]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=3, n=2, repetition_penalty=1.2, logprobs=3)


def open_llm(layout: RankLayout, limits: ProgramLimits = LIMITS) -> LLM:
    ranks = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp}
    return LLM(DEMO, threads=1, limits=limits, **ranks)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with open_llm(RankLayout()) as llm:
        yield llm


@pytest.mark.long
@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, LAYOUTS[0]), ids=str)
def test_answers_equal_those_of_one_process(layout: RankLayout, one: LLM) -> None:
    """Prompts are cut into chunks, repeated, and answered together."""
    prompts = [*PROMPTS, [7, 8, 9, 10] * 40, "while True:", [5] * 70]
    with open_llm(layout) as llm:
        assert len(rank_pids()) == layout.world - 1
        assert (llm.info.num_stages, llm.info.num_ranks) == (layout.pp, layout.num_computing)
        for _ in range(2):  # the second time from cached pages
            assert tokens_of(llm, prompts, GREEDY) == tokens_of(one, prompts, GREEDY)
        assert tokens_of(llm, prompts, SAMPLED) == tokens_of(one, prompts, SAMPLED)
        assert llm.logits(PROMPTS[0]).tobytes() == one.logits(PROMPTS[0]).tobytes()
        assert llm.score(PROMPTS, 2) == one.score(PROMPTS, 2)
        assert [list(e.vector) for e in llm.embed(PROMPTS)] == [list(e.vector) for e in one.embed(PROMPTS)]
        llm.engine.check_integrity()
    assert rank_pids() == []


def test_requests_that_lose_their_pages_get_the_same_tokens(one: LLM) -> None:
    """Pages for two of four requests: some are preempted while a step computes them."""
    prompts = [[3 + i] * 50 for i in range(4)]
    long = SamplingParams(max_tokens=60, temperature=0.8, seed=1, ignore_eos=True)
    few = ProgramLimits(max_tokens=64, max_requests=4, context_len=128, num_pages=8)
    with open_llm(RankLayout(pp=2), few) as llm:
        assert tokens_of(llm, prompts, long) == tokens_of(one, prompts, long)
        assert llm.engine.scheduler.num_preemptions > 0
        llm.engine.check_integrity()


def test_aborted_requests_leave_the_others_alone(one: LLM) -> None:
    with open_llm(RankLayout(pp=2)) as llm:
        for num_tokens in range(1, 6):  # aborted in different states of the steps in flight
            kept = llm.stream(PROMPTS[0], GREEDY)
            dropped = llm.stream(PROMPTS[1], GREEDY)
            for _ in range(num_tokens):
                next(dropped)
            dropped.abort()
            assert "".join(delta.text for delta in kept) == one.generate(PROMPTS[0], GREEDY).text
        llm.engine.check_integrity()
        assert llm.engine.figures().num_running == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_stage_that_is_killed_ends_the_request_at_once(killed: int) -> None:
    with open_llm(RankLayout(pp=2)) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(sorted(rank_pids())[killed], signal.SIGKILL)
        with raises(UnavailableError, match=f"rank {killed + 1} was killed by SIGKILL"):
            list(stream)
        with raises(UnavailableError, match="was killed by SIGKILL"):
            llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))
    assert rank_pids() == []


def test_a_rank_of_a_stage_that_is_killed_ends_all_stages() -> None:
    with open_llm(RankLayout(2, 2)) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(sorted(rank_pids())[3], signal.SIGKILL)
        with raises(UnavailableError, match="rank 4 was killed by SIGKILL"):
            list(stream)
    assert rank_pids() == []


def test_stages_that_were_stopped_while_idle_go_on() -> None:
    with open_llm(RankLayout(pp=2)) as llm:
        expected = llm.generate(PROMPTS[0], GREEDY).token_ids
        for pid in rank_pids():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        for pid in rank_pids():
            os.kill(pid, signal.SIGCONT)
        assert llm.generate(PROMPTS[0], GREEDY).token_ids == expected


def test_impossible_numbers_of_stages_are_refused(parts_of: Callable[[Path, int], list[Path]]) -> None:
    with raises(InvalidArgumentError, param="pipeline_parallel_size"):
        open_llm(RankLayout(pp=20))
    with raises(InvalidArgumentError, match="pipeline_parallel_size"):
        LLM(DEMO, pipeline_parallel_size=0)
    with raises(UnsupportedError, param="pipeline_parallel_size"):
        LLM(parts_of(DEMO, 2)[0], pipeline_parallel_size=2)


def test_stages_that_do_not_fit_are_refused_before_they_start() -> None:
    with pytest.raises(OutOfMemoryError):
        plan_ranks(DEMO, RankLayout(pp=2), threads=1, limits=LIMITS, available=8 << 20)
    plan = plan_ranks(DEMO, RankLayout(pp=2), threads=1, limits=LIMITS)
    assert [found.weight_bytes > 0 for found in plan.plans] == [False, True, True]
    assert [found.kv_bytes > 0 for found in plan.plans] == [False, True, True]


def test_eager_mode_has_one_stage(tmp_path: Path) -> None:
    with raises(UnsupportedError, param="pipeline_parallel_size", match="expected 1 in eager mode"):
        LLM(tmp_path, mode="eager", pipeline_parallel_size=2)
