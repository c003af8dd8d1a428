"""The two halves of a step of a pipeline: launch and collect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Context, CoreProgram, Model
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.engine.scheduler import Chunk
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError, UnsupportedError
from penstock.llm.llm import LLM
from tests.support.core_steps import batch, sampling
from tests.support.errors import raises
from tests.support.rank_processes import DEMO, LIMITS, PROMPTS
from tests.support.rank_threads import OPTIONS, RankThreads, SharedMemory, logits_of, steps, whole_logits

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]


@pytest.fixture
def whole(bundle_of: BundleOf) -> Path:
    return bundle_of("llama_head_dim", "w8a8")


def open_stages(whole: Path, parts_of: PartsOf, num_stages: int = 2, tp: int = 1) -> RankThreads:
    return RankThreads(parts_of(whole, RankLayout(tp, num_stages)), stage_ranks=tp)


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_steps_in_flight_compute_the_same_logits(num_in_flight: int, whole: Path, parts_of: PartsOf) -> None:
    """Steps follow each other on the same requests: a stage computes them in their order."""
    batches, found = steps(1), []
    with open_stages(whole, parts_of, 3) as ranks:
        waiting = []
        for step in batches:
            if len(waiting) == num_in_flight:
                waiting.pop(0).collect()
                found.append(ranks.program.logits().tobytes())
            call = ranks.program.step_call(step)
            call.launch()
            waiting.append(call)
        for call in waiting:
            call.collect()
            found.append(ranks.program.logits().tobytes())
    assert found == whole_logits(whole, batches)


@pytest.mark.parametrize("tp", [1, 3])
def test_greedy_tokens_match(tp: int, whole: Path, parts_of: PartsOf) -> None:
    """Stages send the best token of a row instead of its logits."""

    def greedy(program: CoreProgram) -> list[list[int]]:
        found = []
        for step in steps(1):
            count = len(step.output_rows)
            none = np.full(count, -1, np.int32)
            found.append(program.step(step, sampling(count, per_row=True, num_logprobs=none)).ids.tolist())
        return found

    with open_stages(whole, parts_of, 2, tp) as ranks:
        found = greedy(ranks.program)
        with raises(InvalidArgumentError, param="logits"):
            ranks.program.logits()
        assert logits_of(ranks.program, steps(1)[:1]) == whole_logits(whole, steps(1)[:1])
    with Model.open(whole) as model, Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        assert found == greedy(program)


def test_hidden_rows_come_only_when_asked_for(whole: Path, parts_of: PartsOf) -> None:
    asked = [dataclasses.replace(step, hidden=i % 2 == 0) for i, step in enumerate(steps(1))]

    def hidden(program: CoreProgram) -> list[bytes]:
        found = []
        for step in asked:
            program.run(step)
            found.append(program.hidden().tobytes() if step.hidden else program.logits().tobytes())
        return found

    with open_stages(whole, parts_of) as ranks:
        found = hidden(ranks.program)
    with Model.open(whole) as model, Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        assert found == hidden(program)


def test_more_steps_than_stages_are_refused(whole: Path, parts_of: PartsOf) -> None:
    step = batch([(0, [5, 6, 7], (0,))])
    with open_stages(whole, parts_of) as ranks:
        calls = [ranks.program.step_call(step) for _ in range(3)]
        with raises(InvalidArgumentError, param="program"):
            calls[0].collect()
        calls[0].launch()
        calls[1].launch()
        with raises(InvalidArgumentError, param="program"):
            calls[2].launch()
        with raises(InvalidArgumentError, param="program", match=" 2$"):
            ranks.program.run(step)
        calls[0].collect()
        calls[1].collect()
        ranks.program.run(step)
        with raises(UnsupportedError, param="token_ids"):
            ranks.program.step_call(batch([(3, [-1], (0,))])).launch()


def test_a_program_without_stages_has_no_steps_in_flight(whole: Path) -> None:
    with (
        Model.open(whole) as model,
        Context(1) as context,
        CoreProgram(model, context, OPTIONS) as program,
        raises(InvalidArgumentError, param="program"),
    ):
        program.step_call(steps(1)[0]).launch()


def test_stages_of_other_sizes_are_refused(whole: Path, parts_of: PartsOf) -> None:
    memory = SharedMemory(4)
    with raises(InvalidArgumentError, param="stage_ranks"):
        Context(1, links=memory.comm(0, 4), stage_ranks=2)
    with raises(InvalidArgumentError, param="comm"):
        Context(1, links=memory.comm(1, 4), stage_ranks=3)
    with (
        Context(1, links=memory.comm(1, 4)) as context,
        Model.open(parts_of(whole, RankLayout(pp=2))[1]) as model,
        raises(InvalidArgumentError, param="comm"),
    ):
        CoreProgram(model, context, OPTIONS)


def test_a_stage_without_links_is_refused(whole: Path, parts_of: PartsOf) -> None:
    memory = SharedMemory(3)
    for rank, part in enumerate(parts_of(whole, RankLayout(pp=2))):
        with (
            Context(1, comm=memory.comm(rank, 3)) as context,
            Model.open(part) as model,
            raises(
                UnsupportedError,
                param="pipeline_parallel_size",
                match=rf"^pipeline_parallel_size: .* links, \w+ rank {rank} of .* 3 ranks",
            ),
        ):
            CoreProgram(model, context, OPTIONS)


def test_a_stage_that_fails_ends_all_waits(whole: Path, parts_of: PartsOf) -> None:
    with open_stages(whole, parts_of, 3) as ranks:
        ranks.program.run(steps(1)[0])
        call = ranks.program.step_call(steps(1)[1])
        call.launch()
        call.collect()
        ranks.comms[2].abort("rank 2: out of luck")
        with raises(UnavailableError, param="ranks", match="out of luck"):
            ranks.program.run(steps(1)[2])


def test_a_later_launch_leaves_the_logits_that_were_collected(whole: Path, parts_of: PartsOf) -> None:
    greedy = {"per_row": True, "num_logprobs": np.full(1, -1, np.int32)}
    first, second = (
        batch([(0, [token], [page])], logits=logits) for token, page, logits in ((5, 0, True), (6, 1, False))
    )
    (expected,) = whole_logits(whole, [first])
    with open_stages(whole, parts_of) as ranks:
        calls = [ranks.program.step_call(step, sampling(1, **greedy)) for step in (first, second)]
        calls[0].launch()
        calls[0].collect()
        calls[1].launch()  # needs only the best token
        assert ranks.program.logits().tobytes() == expected
        calls[1].collect()


def test_an_error_after_a_launch_ends_only_its_step() -> None:
    """The step is collected all the same, so that later ones get their own rows."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    with (
        LLM(DEMO, threads=1, limits=LIMITS) as one,
        LLM(DEMO, threads=1, limits=LIMITS, pipeline_parallel_size=2) as llm,
    ):
        expected = [result.token_ids for result in one.generate(PROMPTS, greedy)]
        scheduler = llm.engine.scheduler
        advance, calls = scheduler.advance, iter(range(1000))

        def fail_once(chunk: Chunk) -> None:
            if next(calls) == 6:
                raise RuntimeError("planted")
            advance(chunk)

        scheduler.advance = fail_once
        results = dict(llm.generate_each([(prompt, greedy) for prompt in PROMPTS]))
        assert any(isinstance(result, PenstockError) for result in results.values())
        for index, result in results.items():
            assert isinstance(result, PenstockError) or result.token_ids == expected[index]
        assert [result.token_ids for result in llm.generate(PROMPTS, greedy)] == expected
