"""Context parallelism: partitions of a context on several ranks give the bits of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Model, StepBatch
from penstock.core.rank_layout import RankLayout
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import KvLayout
from penstock.llm.llm import LLM
from penstock.ops.table import LINEAR_SCHEMES
from penstock.runtime.program import PARTITION_PAGES, ProgramLimits
from tests.support.core_steps import batch
from tests.support.errors import raises
from tests.support.families import RANK_FAMILIES
from tests.support.marks import mostly_long
from tests.support.rank_threads import OPTIONS, RankThreads, logits_of, whole_logits

_LEFT_OUT = ("lfm2", "gpt", "bloom", "phi3_long", "chatglm")
FAMILIES = [row for row in RANK_FAMILIES if not str(row.values[0]).startswith(_LEFT_OUT)]
"""Without convolutions and sinks, and with max_position_embeddings in config.json, which these tests raise and which
decides alone how long a context is."""
BundleOf = Callable[..., Path]
PartsOf = Callable[[Path, RankLayout], list[Path]]
WORLDS = (2, 3, 4)
PAGES_OF_RANK = 32
CONTEXT = dataclasses.replace(OPTIONS, max_tokens=300, max_rows=300, num_pages=PAGES_OF_RANK)


def tables(world: int, *requests: tuple[int, int]) -> list[list[int]]:
    """Page tables of requests, each a number of pages and the rank of its first partition."""
    unused = [iter(range(rank, PAGES_OF_RANK * world, world)) for rank in range(world)]
    return [
        [next(unused[(index // PARTITION_PAGES + first) % world]) for index in range(count)]
        for count, first in requests
    ]


def context_steps(world: int, num_groups: int) -> list[StepBatch]:
    """Two prompts in chunks beyond two partitions, then single tokens, mixed steps, and few of many output rows."""
    rng = np.random.default_rng(7)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 1003, count)]

    first, second, third = tables(world, (18, 0), (10, 1), (2, 1))
    rows = np.array([0, 250, 255], np.int32)
    return [
        batch([(0, tokens(290), first)], num_groups),
        batch([(290, tokens(200), first), (0, tokens(60), second)], num_groups, output_rows=rows),
        batch([(490, tokens(40), first), (60, tokens(240), second)], num_groups, output_rows=np.array([39], np.int32)),
        batch([(530, tokens(1), first), (300, tokens(1), second), (0, tokens(3), third)], num_groups),
        batch([(531, tokens(1), first), (301, tokens(1), second), (3, tokens(1), third)], num_groups),
        batch([(532, tokens(1), first)], num_groups),
    ]


def whole_options(world: int) -> object:
    return dataclasses.replace(CONTEXT, num_pages=PAGES_OF_RANK * world)


@pytest.mark.parametrize("world", mostly_long(WORLDS, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_families_match(family: str, world: int, long_context_of: BundleOf, parts_of: PartsOf) -> None:
    path = long_context_of(family, "w8a8")
    with Model.open(path) as model:
        num_groups = model.info.num_page_groups
    batches = context_steps(world, num_groups)
    with RankThreads(parts_of(path, RankLayout(cp=world)), CONTEXT) as ranks:
        actual = logits_of(ranks.program, batches)
    assert actual == whole_logits(path, batches, whole_options(world))
    assert not ranks.errors


def test_sinks_are_refused(long_context_of: BundleOf, parts_of: PartsOf) -> None:
    with raises(UnsupportedError, param="context_parallel_size", match="expected 1 for a network whose attention has"):
        parts_of(long_context_of("gpt_oss", "f32"), RankLayout(cp=2))


def test_convolutions_are_refused(long_context_of: BundleOf, parts_of: PartsOf) -> None:
    with raises(UnsupportedError, param="context_parallel_size", match="expected 1 for a network with convolutions"):
        parts_of(long_context_of("lfm2", "f32"), RankLayout(cp=2))


@pytest.mark.parametrize("scheme", mostly_long(LINEAR_SCHEMES, "f32", "w4a8"))
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
        (33, r"page_tables\[0\]\[0\]\[16\]: expected a page of rank 0, found 33 of rank 1"),
        (64, r"page_tables\[0\]\[0\]\[16\]: expected a page from 0 to 63, found 64"),
    ):
        step = batch([(0, [5] * 300, [*table[:16], page])])
        with RankThreads(parts_of(path, RankLayout(cp=2)), CONTEXT) as ranks:
            ranks.program.run(step)
            with pytest.raises(InvalidArgumentError, match=message):
                ranks.program.run(batch([(300, [5] * 213, [*table[:16], page])]))


DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
LIMITS = ProgramLimits(max_tokens=200, max_requests=4, context_len=900)
LONG = [int(token) for token in np.random.default_rng(2).integers(0, 4096, 700)]
PROMPTS = ["def add(a, b):", LONG, LONG[:600], [9, *LONG[:200]], LONG[:290]]


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
    with pytest.raises(InvalidArgumentError, match=r"context_parallel_size: .*65"):
        LLM(DEMO, context_parallel_size=65)
