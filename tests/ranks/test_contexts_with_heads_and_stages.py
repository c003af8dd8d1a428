"""Context parallelism together with tensor and pipeline parallelism gives the bits of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.native import Model
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
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
)
from tests.support.errors import raises
from tests.support.marks import in_turn, mostly_long
from tests.support.rank_threads import RankThreads, logits_of, whole_logits

BundleOf = Callable[..., Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]
HEADS, STAGES, BOTH = RankLayout(2, 1, 2), RankLayout(1, 2, 2), RankLayout(2, 2, 2)
LAYOUTS = [HEADS, STAGES, RankLayout(4, 1, 2), RankLayout(2, 1, 3), BOTH, RankLayout(1, 3, 3)]
WHOLE = dataclasses.replace(CONTEXT, num_pages=PAGES_OF_RANK * 3)


def threads_of(parts: list[Path], layout: RankLayout, options: object = CONTEXT, num_threads: int = 1) -> RankThreads:
    stage_ranks = layout.stage_ranks if layout.pp > 1 else 0
    return RankThreads(parts, options, num_threads, stage_ranks=stage_ranks, contexts=layout.cp)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout"), in_turn(FAMILIES, [HEADS, STAGES, BOTH]), ids=str)
def test_families_match(family: str, layout: RankLayout, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path = long_context_of(family, "w8a8")
    with Model.open(path) as model:
        num_groups = model.info.num_page_groups
    batches = context_steps(layout.cp, num_groups)
    try:
        parts = parts_of(path, layout)
    except UnsupportedError:  # five heads
        layout = dataclasses.replace(layout, tp=5)
        parts = parts_of(path, layout)
    with threads_of(parts, layout) as ranks:
        actual = logits_of(ranks.program, batches)
    assert actual == whole_logits(path, batches, WHOLE)
    assert not ranks.errors


@pytest.mark.parametrize(("scheme", "layout"), in_turn(mostly_long(LINEAR_SCHEMES, "w4a8"), LAYOUTS, times=2), ids=str)
def test_schemes_match(scheme: str, layout: RankLayout, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path, batches = long_context_of("llama_head_dim", scheme), context_steps(layout.cp, 1)
    for kv, num_threads in zip(KvLayout, (1, 2) * len(KvLayout), strict=False):
        options, whole = (dataclasses.replace(o, kv_layout=kv) for o in (CONTEXT, WHOLE))
        with threads_of(parts_of(path, layout), layout, options, num_threads) as ranks:
            assert logits_of(ranks.program, batches) == whole_logits(path, batches, whole), kv.name
        assert not ranks.errors


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(DEMO, threads=1, limits=LIMITS) as llm:
        yield llm


@pytest.mark.parametrize("layout", mostly_long([HEADS, STAGES, BOTH]), ids=str)
def test_answers_equal_those_of_one_process(layout: RankLayout, one: LLM) -> None:
    """Prompts in chunks, answered together and again from cached pages; sampled, and several answers to a prompt."""
    greedy = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)
    sampled = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=3, n=2, ignore_eos=True)

    def answers(llm: LLM, params: SamplingParams) -> list:
        results = llm.generate(PROMPTS, params)
        return [(answer.token_ids, answer.logprobs) for result in results for answer in result.choices]

    sizes = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp}
    with LLM(DEMO, threads=1, limits=LIMITS, context_parallel_size=layout.cp, **sizes) as llm:
        assert (llm.info.context_ranks, llm.info.num_ranks) == (layout.cp, layout.num_computing)
        for params in (greedy, greedy, sampled):
            assert answers(llm, params) == answers(one, params)
        assert llm.logits(LONG).tobytes() == one.logits(LONG).tobytes()
        assert llm.score([LONG[:400]], 2) == one.score([LONG[:400]], 2)
        assert llm.engine.figures().num_cached_tokens > 0
        llm.engine.check_integrity()


def test_ranks_with_unequal_heads_are_refused(long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path = long_context_of("llama", "f32")
    with raises(UnsupportedError, param="tensor_parallel_size", match="ranks with equally many of 5 attention heads"):
        parts_of(path, HEADS)


@pytest.mark.parametrize("layout", [(16, 1, 8), (4, 8, 2)])
def test_more_than_64_ranks_are_refused(layout: tuple[int, int, int]) -> None:
    with raises(InvalidArgumentError, param="tensor_parallel_size", match="expected at most 6[34] ranks in all, got"):
        RankLayout(*layout)
