"""The engine's invariants on the demo model: the native core and eager mode, one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock import LLM, InvalidArgumentError, OutOfMemoryError, ProgramLimits, SamplingParams
from penstock.core import arrays, native
from penstock.runtime.native import fit_limits
from tests.support.command import DEMO, FOLDER
from tests.support.errors import raises

TEXTS = ["import os\n", "def add(a, b):\n    return", "class Stack:\n" + "    x = 1\n" * 30, "x"]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=50, temperature=0.8, top_k=20, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=35, temperature=1.2, top_p=0.9, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=70, temperature=0.5, seed=2**64 - 1, ignore_eos=True),
]
MODES = [("graph", DEMO), ("eager", FOLDER)]


def open_llm(mode: str, path, **limits) -> LLM:
    return LLM(path, mode=mode, scheme="w8a8", limits=ProgramLimits(**limits))


@pytest.fixture(
    scope="module", params=[MODES[0], pytest.param(MODES[1], marks=pytest.mark.long)], ids=["graph", "eager"]
)
def reference(request):
    """Return mode, path, and each answer generated alone."""
    mode, path = request.param
    with open_llm(mode, path, max_requests=1, context_len=512) as llm:
        yield mode, path, [llm.generate(t, p) for t, p in zip(TEXTS, PARAMS, strict=True)]


def ids(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_batch_matches_single(reference):
    mode, path, alone = reference
    with open_llm(mode, path, max_requests=4, context_len=512) as llm:
        together = llm.generate(TEXTS, PARAMS)
        assert ids(together) == ids(alone)
        assert [r.text for r in together] == [r.text for r in alone]
        assert all(pool.num_free == pool.num_pages for pool in llm.engine.scheduler.ledger.pools)


@pytest.mark.parametrize("budget", [5, 33])
def test_chunked_matches_whole(reference, budget):
    mode, path, alone = reference
    with open_llm(mode, path, max_requests=4, max_tokens=budget, context_len=512) as llm:
        assert ids(llm.generate(TEXTS, PARAMS)) == ids(alone)


def test_preempted_matches_uninterrupted(reference):
    mode, path, alone = reference
    with open_llm(mode, path, max_requests=4, num_pages=8, context_len=256) as llm:
        assert ids(llm.generate(TEXTS, PARAMS)) == ids(alone)
        assert llm.engine.scheduler.num_preemptions > 0


def test_cached_matches_uncached(reference):
    mode, path, alone = reference
    beginning = alone[2].prompt_token_ids
    prompts = [beginning + one.prompt_token_ids for one in alone]
    sizes = ProgramLimits(max_requests=4, context_len=512)
    with LLM(path, mode=mode, scheme="w8a8", limits=sizes, prefix_cache=False) as llm:
        uncached = ids(llm.generate(prompts, PARAMS))
        assert llm.engine.figures().num_cached_tokens == 0
    with LLM(path, mode=mode, scheme="w8a8", limits=sizes) as llm:
        assert ids(llm.generate(prompts, PARAMS)) == uncached
        again = llm.generate(prompts, PARAMS)
    assert ids(again) == uncached
    assert [r.num_cached_tokens for r in again] == [(len(p) - 1) // 32 * 32 for p in prompts]


def test_streamed_matches_whole(reference):
    mode, path, alone = reference
    with open_llm(mode, path, max_requests=2, context_len=512) as llm:
        deltas = list(llm.stream(TEXTS[1], PARAMS[1]))
    assert "".join(d.text for d in deltas) == alone[1].text
    assert [i for d in deltas for i in d.token_ids] == alone[1].token_ids


def test_logits_have_a_row_per_position_and_match_greedy(reference):
    mode, path, alone = reference
    with open_llm(mode, path, max_requests=4, max_rows=16, context_len=512) as llm:
        prompt = alone[0].prompt_token_ids
        logits = llm.logits(prompt + alone[0].token_ids)
        again = llm.logits(prompt)
    assert logits.shape == (len(prompt) + 40, 4096)
    assert logits.dtype == np.float32
    assert logits.argmax(axis=1)[len(prompt) - 1 : -1].tolist() == alone[0].token_ids
    assert again.tobytes() == logits[: len(prompt)].tobytes()


@pytest.mark.long
def test_eager_and_graph_make_the_same_answers():
    found = []
    for mode, path in MODES:
        with open_llm(mode, path, max_requests=4, context_len=512) as llm:
            found.append((ids(llm.generate(TEXTS, PARAMS)), llm.logits(TEXTS[2]).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(("mode", "path"), MODES, ids=["graph", "eager"])
def test_a_batch_may_name_the_token_last_sampled_in_a_slot(mode, path):
    def batch(token: int, position: int) -> native.StepBatch:
        one = np.zeros(1, np.int32)
        return native.StepBatch(one + token, one + position, np.array([0, 1], np.int32), one.reshape(1, 1, 1), one)

    def sampling(slot: int) -> native.Sampling:
        row = np.zeros(1, np.float32)
        ints, seed = np.zeros(1, np.int32), np.zeros(1, np.uint64)
        return native.Sampling(row, ints, row + 1, seed, np.zeros((1, 2), np.int64), np.array([slot], np.int32))

    with open_llm(mode, path, max_requests=2, context_len=64) as llm:
        program = llm.engine.program
        token = int(program.step(batch(7, 0), sampling(1))[0][0])
        program.run(batch(token, 1))
        expected = program.logits().tobytes()
        program.run(batch(-2, 1))
        assert program.logits().tobytes() == expected
        with raises(InvalidArgumentError, param="token_ids", match="slot"):
            program.run(batch(-1, 1))
        with raises(InvalidArgumentError, param="slot"):
            program.step(batch(7, 0), sampling(2))


@pytest.mark.parametrize(("mode", "path"), MODES, ids=["graph", "eager"])
def test_failed_row_spares_the_next_batch(mode, path):
    """A batch that names the slot of a failed row runs, and only that request's row fails again."""
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    ints, starts, rows = np.zeros(2, np.int32), np.array([0, 1, 2], np.int32), np.array([0, 1], np.int32)
    tables = np.array([[[0], [1]]], np.int32)

    def batch(*tokens: int, position: int) -> native.StepBatch:
        return native.StepBatch(np.array(tokens, np.int32), ints + position, starts, tables, rows)

    with open_llm(mode, path, max_requests=2, context_len=64) as llm:
        program = llm.engine.program
        plain = native.Sampling(
            zeros, ints, ones, ints.astype(np.uint64), np.zeros((2, 2), np.int64), rows, per_row=True
        )
        mask = np.zeros((2, (program.info.vocab_size + 31) // 32), np.uint32)
        mask[1] = 0xFFFFFFFF
        first = program.step(batch(7, 8, position=0), dataclasses.replace(plain, mask=mask))
        assert first.status.tolist() == [arrays.ROW_MASKED, arrays.ROW_OK]
        program.run(batch(7, int(first.ids[1]), position=1))
        expected = program.logits()[1].tobytes()
        second = program.step(batch(-1, -2, position=1), plain)
        assert second.status.tolist() == [arrays.ROW_NOT_FINITE, arrays.ROW_OK]
        assert program.logits()[1].tobytes() == expected
        counted = native.Penalties(ones * 2, zeros, zeros, starts, ints, np.array([-1, -2], np.int32))
        program.run(batch(7, 8, position=2))
        third = program.sample(dataclasses.replace(plain, penalties=counted))
        assert third.status.tolist() == [arrays.ROW_NOT_FINITE, arrays.ROW_OK]


def test_a_plan_that_does_not_fit_is_refused_with_its_figures():
    with native.Context(1) as context, native.Model.open(DEMO) as model:
        with raises(OutOfMemoryError, code="out_of_memory", match=r"MiB, .* MiB .*32 "):
            fit_limits(model, context, ProgramLimits(context_len=1024, max_requests=1), available=70 << 20)
        with pytest.raises(OutOfMemoryError):
            fit_limits(model, context, ProgramLimits(), available=1 << 20)


@pytest.mark.parametrize("value", [-1, 10**12, True, 1.5])
def test_a_size_that_no_program_has_is_refused_with_its_bounds(value):
    with raises(InvalidArgumentError, param="num_pages", match=f"got {value}"):
        ProgramLimits(num_pages=value)


def test_memory_is_shared_out_by_the_rules():
    with native.Context(1) as context, native.Model.open(DEMO) as model:
        roomy, plan = fit_limits(model, context, ProgramLimits(max_requests=4), available=64 << 30)
        assert (roomy.context_len, roomy.num_pages, roomy.max_rows) == (1024, 128, 4)
        assert plan.total_bytes < 64 << 30
        assert roomy.kv_layout == "bf16"  # the value that "auto" chose
        one, _ = fit_limits(model, context, ProgramLimits(max_requests=1, context_len=100), available=64 << 30)
        assert (one.context_len, one.num_pages) == (100, 4)
        fixed = plan.total_bytes - plan.kv_bytes + (64 << 20)
        tight, _ = fit_limits(model, context, ProgramLimits(max_requests=4), available=fixed + 40 * plan.kv_page_bytes)
        assert tight.num_pages == 32


def test_one_answer_beyond_the_context_ends_by_length():
    with LLM(DEMO, limits=ProgramLimits(max_requests=1, context_len=64)) as llm:
        result = llm.generate("import os\n", SamplingParams(max_tokens=500, temperature=0, ignore_eos=True))
        assert result.finish_reason == "length"
        assert len(result.token_ids) + len(result.prompt_token_ids) == 64
        with raises(InvalidArgumentError, param="prompt", match="holds 64"):
            llm.generate([5] * 64)
