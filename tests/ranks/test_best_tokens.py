"""Greedy steps of ranks: each sends its best token instead of its logits, and the answer is that of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import Context, CoreProgram, Model, Sampled, StepBatch
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import BundleWriter, read_graph
from tests.support.core_steps import batch, sampling
from tests.support.errors import raises
from tests.support.rank_threads import OPTIONS, RankThreads, steps

BundleOf = Callable[[str, str], Path]
PartsOf = Callable[[Path, int], list[Path]]
NONE = np.int32(-1)


def greedy(num_rows: int, **changes: object) -> object:
    """Only token ids: no log-probability of any row."""
    return sampling(num_rows, per_row=True, num_logprobs=np.full(num_rows, NONE), **changes)


def answers(program: CoreProgram, batches: list[StepBatch], **changes: object) -> list[tuple[list[int], list[int]]]:
    found: list[Sampled] = [program.step(one, greedy(len(one.output_rows), **changes)) for one in batches]
    return [(result.ids.tolist(), result.status.tolist()) for result in found]


def whole_answers(path: Path, batches: list[StepBatch]) -> list[tuple[list[int], list[int]]]:
    with Model.open(path) as model, Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        return answers(program, batches)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_greedy_tokens_match(world: int, num_threads: int, bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of("llama_head_dim", "w8a8")
    with RankThreads(parts_of(path, world), num_threads=num_threads) as ranks:
        assert answers(ranks.program, steps(1)) == whole_answers(path, steps(1))


def with_rows(path: Path, out: Path, change: Callable[[np.ndarray], None]) -> Path:
    """The bundle with the f32 rows of its head changed: [tiles, columns, 16]."""
    graph, segments = read_graph(path)
    start = next(segment.offset for segment in segments if segment.name == "weights")
    data = np.frombuffer(path.read_bytes(), np.uint8)
    with BundleWriter(out, graph, {}) as writer:
        for weight in graph.weights.values():
            stored = data[start + weight.offset : start + weight.offset + weight.num_bytes].copy()
            if weight.name == "lm_head.weight":
                change(stored.view(np.float32).reshape(-1, weight.cols, 16))
            writer.add_weight(weight.name, stored)
    return out


def test_of_equal_logits_the_lowest_id_is_taken(bundle_of: BundleOf, tmp_path: Path, parts_of: PartsOf) -> None:
    """Every row of the head is equal: each rank's best token has the same logit."""

    def equal(tiles: np.ndarray) -> None:
        tiles[:] = tiles[0, :, :1]

    path = with_rows(bundle_of("llama", "f32"), tmp_path / "equal.psm", equal)
    with RankThreads(parts_of(path, 3)) as ranks:
        found = answers(ranks.program, steps(1))
    assert found == whole_answers(path, steps(1))
    assert {token for ids, _ in found for token in ids} == {0}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("token", [0, 500, 1002])
def test_a_logit_that_is_not_finite_fails_the_row(
    value: float, token: int, bundle_of: BundleOf, tmp_path: Path, parts_of: PartsOf
) -> None:
    def break_row(tiles: np.ndarray) -> None:
        tiles[token // 16, :, token % 16] = value

    path = with_rows(bundle_of("llama", "f32"), tmp_path / "broken.psm", break_row)
    with RankThreads(parts_of(path, 3)) as ranks:
        found = answers(ranks.program, steps(1))
    assert found == whole_answers(path, steps(1))
    assert {token for ids, _ in found for token in ids} == {-1}


def test_slots_remember_the_tokens_of_greedy_steps(bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path = bundle_of("llama", "w8a8")
    first = batch([(0, [5, 6, 7], (0,))], output_rows=np.array([2], np.int32))
    then = [batch([(3 + i, [-1], (0,))]) for i in range(5)]
    slot = np.zeros(1, np.int32)
    with RankThreads(parts_of(path, 2)) as ranks:
        found = answers(ranks.program, [first, *then], slot=slot)
    with Model.open(path) as model, Context(1) as context, CoreProgram(model, context, OPTIONS) as program:
        assert found == answers(program, [first, *then], slot=slot)


def test_logits_of_a_greedy_step_must_be_asked_for(bundle_of: BundleOf, parts_of: PartsOf) -> None:
    path, step = bundle_of("llama", "w8a8"), steps(1)[0]
    with RankThreads(parts_of(path, 2)) as ranks:
        program, rows = ranks.program, len(step.output_rows)
        program.step(step, greedy(rows))
        with raises(InvalidArgumentError, param="logits"):
            program.logits()
        with raises(InvalidArgumentError, param="logits"):
            program.sample(greedy(rows))
        for asked in (
            lambda: program.step(dataclasses.replace(step, logits=True), greedy(rows)),
            lambda: program.step(step, sampling(rows)),  # with log-probabilities
            lambda: program.step(step, greedy(rows, mask=np.full((rows, 32), 0xFFFFFFFF, np.uint32))),
            lambda: program.run(step),
        ):
            asked()
            assert program.logits().shape == (rows, 1003)
