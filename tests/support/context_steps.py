"""Steps and prompts beyond two partitions of a context, whose pages are dealt out to ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from penstock.core.native import StepBatch
from penstock.runtime.program import PARTITION_PAGES, ProgramLimits
from tests.support.core_steps import batch
from tests.support.families import LONG_ON_RANKS, RANK_FAMILIES
from tests.support.marks import mostly_exhaustive
from tests.support.rank_threads import OPTIONS

_LEFT_OUT = ("gpt2", "gpt_neox", "bloom", "phi3_long", "chatglm", "mistral4")
_QUICK_ON_CONTEXTS = ("lfm2", "gpt_oss")  # convolutions and sinks, whose pages are not dealt out
_ROWS = [row for row in RANK_FAMILIES if not str(row.values[0]).startswith(_LEFT_OUT)]
FAMILIES = mostly_exhaustive(
    [str(row.values[0]) for row in _ROWS],
    [*(str(row.values[0]) for row in _ROWS if not row.marks), *_QUICK_ON_CONTEXTS],
    [name for name in LONG_ON_RANKS if name not in _QUICK_ON_CONTEXTS],
)
"""Families whose longest context is max_position_embeddings in config.json; these tests raise it."""
DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
LIMITS = ProgramLimits(max_tokens=200, max_requests=4, context_len=900)
LONG = [int(token) for token in np.random.default_rng(2).integers(0, 4096, 700)]
PROMPTS = ["def add(a, b):", LONG, LONG[:600], [9, *LONG[:200]], LONG[:290]]
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
