"""Idea 5 of the design: the same logits in any company, compared as bytes.

Lengths cross the borders of page (32), partition (256) and several partitions; every scheme, level and KV layout
takes part.  ``test_planted_faults.py`` proves that each of these tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Context, Model
from penstock.graph.ir import KvLayout
from penstock.ops.table import LINEAR_SCHEMES
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.invariants.steps import (
    LEVELS,
    each_format,
    each_format_and_level,
    open_program,
    run_alone,
    run_together,
    same_bits,
)

LENGTHS = (31, 32, 33, 255, 257)
LONG = 2049
SEVERAL = 801
"""Tokens of four partitions, the last of them short, for the level that computes one value at a time."""
BIT_EQUAL_SCHEMES = tuple(scheme for scheme in LINEAR_SCHEMES if scheme != "bf16")

ModelOf = Callable[[str], Model]
ContextOf = Callable[[str, int], Context]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 259, length).tolist()


@each_format_and_level
def test_batch_matches_single(scheme: str, kv: KvLayout, level: str, model_of: ModelOf, context_of: ContextOf) -> None:
    prompts = [prompt(n) for n in LENGTHS]
    program = open_program(model_of(scheme), context_of(level, 2), sum(LENGTHS), kv=kv)
    alone = [run_alone(program, p) for p in prompts]
    for chunks in ((257,) * 5, (1, 7, 33, 64, 20)):
        together = run_together(program, prompts, chunks)
        for length, a, b in zip(LENGTHS, alone, together, strict=True):
            assert same_bits(a, b), f"length {length} with chunks {chunks}"


@each_format_and_level
def test_chunked_matches_whole(scheme: str, kv: KvLayout, level: str, model_of: ModelOf, context_of: ContextOf) -> None:
    program = open_program(model_of(scheme), context_of(level, 2), 257, kv=kv)
    whole = run_alone(program, prompt(257))
    for chunk in (1, 7, 64):
        assert same_bits(whole, run_alone(program, prompt(257), chunk, seed=chunk)), f"chunks of {chunk}"


@each_format_and_level
def test_threads_match(scheme: str, kv: KvLayout, level: str, model_of: ModelOf, context_of: ContextOf) -> None:
    results = []
    for num_threads in (1, 2, 3):
        program = open_program(model_of(scheme), context_of(level, num_threads), 257, kv=kv)
        results.append((run_alone(program, prompt(257)), run_alone(program, prompt(33), 1)))
    for whole, single in results[1:]:
        assert same_bits(whole, results[0][0])
        assert same_bits(single, results[0][1])


@pytest.mark.long
@each_format
def test_levels_match(scheme: str, kv: KvLayout, model_of: ModelOf, context_of: ContextOf) -> None:
    results = []
    for level in LEVELS:
        program = open_program(model_of(scheme), context_of(level, 2), SEVERAL, kv=kv)
        results.append((level, run_alone(program, prompt(SEVERAL)), run_alone(program, prompt(33), 1)))
    for level, whole, single in results[1:]:
        for expected, found in ((results[0][1], whole), (results[0][2], single)):
            if scheme in BIT_EQUAL_SCHEMES:
                assert same_bits(expected, found), f"{level} differs from {results[0][0]}"
            else:
                scale = float(np.abs(expected).max())
                assert float(np.abs(expected - found).max()) < 2e-2 * scale


@pytest.mark.long
@each_format
def test_long_prompts_match(scheme: str, kv: KvLayout, model_of: ModelOf, context_of: ContextOf) -> None:
    """2,049 tokens, nine partitions: chunks, company and numbers of threads at the machine's own level."""
    model, level = model_of(scheme), LEVELS[0]
    program = open_program(model, context_of(level, 2), LONG + 64, kv=kv)
    whole = run_alone(program, prompt(LONG))
    for chunk in (64, 7, 1):
        assert same_bits(whole, run_alone(program, prompt(LONG), chunk, seed=3)), f"chunks of {chunk}"
    together = run_together(program, [prompt(LONG), prompt(33)], (512, 1))
    assert same_bits(whole, together[0])
    for num_threads in (1, 3):
        other = open_program(model, context_of(level, num_threads), LONG + 64, kv=kv)
        assert same_bits(whole, run_alone(other, prompt(LONG))), f"{num_threads} threads"


@each_format
def test_save_load_matches(
    scheme: str, kv: KvLayout, checkpoint: Path, model_of: ModelOf, context_of: ContextOf, bundles: Path
) -> None:
    """The network that was never saved, run eagerly on one thread, and its bundle, mapped and read, on two."""
    limits = ProgramLimits(257, 1, max_rows=257, num_pages=9, context_len=257, kv_layout=kv.name.lower())
    network = EagerProgram(checkpoint, scheme=scheme, threads=1, limits=limits)
    unsaved = [run_alone(network, prompt(257)), run_alone(network, prompt(33), 7)]
    model_of(scheme)
    for mmap in (True, False):
        with (
            Model.open(bundles / f"{scheme}.psm", verify=True, mmap=mmap) as model,
            open_program(model, context_of(LEVELS[0], 2), 257, kv=kv) as program,
        ):
            assert same_bits(unsaved[0], run_alone(program, prompt(257)))
            assert same_bits(unsaved[1], run_alone(program, prompt(33), 7))
