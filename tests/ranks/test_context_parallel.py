"""Context parallelism: partitions of a context on several ranks give the bits of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.native import Model, ProgramOptions
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.graph.ir import KvLayout
from penstock.llm.llm import LLM
from penstock.ops.table import LINEAR_SCHEMES
from tests.support.context_steps import (
    CONTEXT,
    DEMO,
    FAMILIES,
    LIMITS,
    LONG,
    PAGES_OF_RANK,
    PROMPTS,
    context_steps,
    tables,
)
from tests.support.core_steps import batch
from tests.support.errors import raises
from tests.support.marks import in_turn, mostly_long
from tests.support.rank_threads import RankThreads, logits_of, whole_logits

BundleOf = Callable[..., Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]
WORLDS = (2, 3, 4)


def whole_options(world: int) -> ProgramOptions:
    return dataclasses.replace(CONTEXT, num_pages=PAGES_OF_RANK * world)


@pytest.mark.parametrize(("family", "world"), in_turn(FAMILIES, WORLDS))
def test_families_match(family: str, world: int, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path = long_context_of(family, "w8a8")
    with Model.open(path) as model:
        num_groups = model.info.num_page_groups
    batches = context_steps(world, num_groups)
    with RankThreads(parts_of(path, RankLayout(cp=world)), CONTEXT, contexts=world) as ranks:
        actual = logits_of(ranks.program, batches)
    assert actual == whole_logits(path, batches, whole_options(world))
    assert not ranks.errors


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, "w4a8"))
def test_schemes_and_kv_types_match(scheme: str, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path, batches = long_context_of("llama_head_dim", scheme), context_steps(2, 1)
    for kv in KvLayout:
        for num_threads in (1, 2):
            options, whole = (dataclasses.replace(o, kv_layout=kv) for o in (CONTEXT, whole_options(2)))
            with RankThreads(parts_of(path, RankLayout(cp=2)), options, num_threads) as ranks:
                assert logits_of(ranks.program, batches) == whole_logits(path, batches, whole), (kv.name, num_threads)


@pytest.mark.parametrize("max_tokens", [5, 6, 9])
def test_every_token_of_wide_tables_is_computed(max_tokens: int, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    """A token's partial results are so many that an exchange takes two tokens: the blocks differ from step to step."""
    path = long_context_of("llama_head_dim", "w8a8", 2 * 2180 * 256)
    sizes = {"max_tokens": max_tokens, "max_rows": max_tokens, "num_pages": PAGES_OF_RANK}
    options = dataclasses.replace(CONTEXT, **sizes)
    (table,) = tables(2, (1, 0))
    width = 2 * 2180 * 8
    batches = [
        batch([(0, [*range(7, 7 + count)], [*table, *[-1] * (width - 1)])]) for count in range(1, max_tokens + 1)
    ]
    with RankThreads(parts_of(path, RankLayout(cp=2)), options) as ranks:
        actual = logits_of(ranks.program, batches)
    assert actual == whole_logits(path, batches, dataclasses.replace(options, num_pages=2 * PAGES_OF_RANK))


def test_pages_of_another_rank_are_refused(long_context_of: BundleOf, parts_of: PartsOf) -> None:
    """The third partition must be on the rank of the first; a page that no rank has is refused before that."""
    (table,) = tables(2, (17, 0))
    path = long_context_of("llama_head_dim", "w8a8")
    for page, message in (
        (33, r"page_tables\[0\]\[0\]\[16\]: expected a page of rank 0, \w+ 33 of rank 1"),
        (64, r"page_tables\[0\]\[0\]\[16\]: expected a page from 0 to 63, \w+ 64"),
    ):
        step = batch([(0, [5] * 300, [*table[:16], page])])
        with RankThreads(parts_of(path, RankLayout(cp=2)), CONTEXT) as ranks:
            ranks.program.run(step)
            with raises(InvalidArgumentError, param="page_tables[0][0][16]", match=message):
                ranks.program.run(batch([(300, [5] * 213, [*table[:16], page])]))


@pytest.mark.long
def test_answers_equal_those_of_one_process() -> None:
    """Prompts in chunks, answered together and again from cached pages; sampled, and several answers to a prompt."""
    greedy = SamplingParams(max_tokens=40, temperature=0.0, logprobs=3, ignore_eos=True)
    sampled = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=3, n=2, ignore_eos=True)

    def answers(llm: LLM, params: SamplingParams) -> list:
        results = llm.generate(PROMPTS, params)
        return [(answer.token_ids, answer.logprobs) for result in results for answer in result.choices]

    with (
        LLM(DEMO, threads=1, limits=LIMITS) as one,
        LLM(DEMO, threads=1, limits=LIMITS, context_parallel_size=3) as llm,
    ):
        assert llm.info.context_ranks == 3
        for params in (greedy, greedy, sampled):
            assert answers(llm, params) == answers(one, params)
        assert llm.logits(LONG).tobytes() == one.logits(LONG).tobytes()
        assert llm.score([LONG[:400]], 2) == one.score([LONG[:400]], 2)
        assert llm.engine.figures().num_cached_tokens > 0
        llm.engine.check_integrity()


def test_pages_run_out_on_ranks_as_on_one_process() -> None:
    """Requests are preempted and computed again; a context may fill the pages of all ranks."""
    limits = dataclasses.replace(LIMITS, num_pages=32)
    greedy = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
    with (
        LLM(DEMO, threads=1, limits=limits, context_parallel_size=2) as llm,
        LLM(DEMO, threads=1, limits=LIMITS) as one,
    ):
        prompts = [LONG[i : 60 + i] for i in range(4)] + [LONG[:640]]
        expected, actual = ([result.token_ids for result in engine.generate(prompts, greedy)] for engine in (one, llm))
        assert actual == expected
        assert llm.engine.figures().num_preemptions > 0


def test_layouts_that_cannot_be_are_refused() -> None:
    with raises(InvalidArgumentError, param="context_parallel_size"):
        LLM(DEMO, context_parallel_size=65)
