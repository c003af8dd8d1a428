"""A row that failed leaves its slot failed: a batch that names the slot runs, and only that request's rows fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.core.native import Context, CoreProgram, Model, Penalties
from penstock.errors import InvalidArgumentError
from tests.support.core_steps import OPTIONS, batch, i32, sampling
from tests.support.errors import raises
from tests.support.tiny_graph import VOCAB

OK, NOT_FINITE, MASKED = 0, 1, 2
WORDS = (VOCAB + 31) // 32


def mask(*allowed: bool) -> np.ndarray:
    """Rows for which every token or no token is allowed."""
    return np.array([[0xFFFFFFFF * one] * WORDS for one in allowed], np.uint32)


def fail_first(program: CoreProgram) -> int:
    """Runs two requests; the row of the first fails.  Returns the token of the second."""
    step = batch([(0, [7, 8], (1,)), (0, [9], (2,))], output_rows=i32(1, 2))
    sampled = program.step(step, sampling(2, slot=i32(0, 1), mask=mask(False, True), per_row=True))
    assert sampled.status.tolist() == [MASKED, OK]
    assert sampled.ids[0] == -1
    return int(sampled.ids[1])


def test_failed_row_spares_the_next_batch(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        token = fail_first(program)
        program.run(batch([(1, [token], (2,))]))
        expected = program.logits().tobytes()
        step = batch([(2, [-1], (1,)), (1, [-2], (2,))])
        sampled = program.step(step, sampling(2, slot=i32(0, 1), per_row=True))
        assert sampled.status.tolist() == [NOT_FINITE, OK]
        assert program.logits()[1].tobytes() == expected
        assert np.isnan(program.logits()[0]).all()
        sampled = program.step(batch([(3, [-1], (1,)), (2, [-2], (2,))]), sampling(2, per_row=True))
        assert sampled.status.tolist() == [NOT_FINITE, OK]  # still
        with raises(InvalidArgumentError, param="logits"):
            program.step(batch([(3, [-1], (1,))]), sampling(1))


def test_failed_rows_are_found_among_wanted_rows(model: Model, context: Context) -> None:
    """Find failed rows if wanted-only nodes run over the wanted tokens, and if they run over all tokens."""
    for rows in ([4, 6], [0, 4, 5, 6], [6, 0]):
        with CoreProgram(model, context, OPTIONS) as program:
            fail_first(program)
            step = batch([(0, [1, 2, 3, 4, 5], (3,)), (2, [-1, 6], (1,))], output_rows=i32(*rows))
            program.run(step)
            assert np.isnan(program.logits()).all(axis=1).tolist() == [row >= 5 for row in rows]
            assert np.isfinite(program.logits()).all(axis=1).tolist() == [row < 5 for row in rows]


def test_new_token_mends_a_failed_slot(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        fail_first(program)
        token = int(program.step(batch([(0, [3], (4,))]), sampling(1, slot=i32(0))).ids[0])
        program.run(batch([(1, [token], (4,))]))
        expected = program.logits().tobytes()
        program.run(batch([(1, [-1], (4,))]))
        assert program.logits().tobytes() == expected


def test_history_of_a_failed_slot_fails_its_row(model: Model, context: Context) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        fail_first(program)
        program.run(batch([(0, [3, 4], (4,))]))
        ones = np.ones(2, np.float32)
        counted = Penalties(ones * 2, ones, ones, i32(0, 2, 4), i32(1, 1), i32(3, -1, 3, -2))
        sampled = program.sample(sampling(2, penalties=counted, per_row=True))
    assert sampled.status.tolist() == [NOT_FINITE, OK]


def test_refused_sampling_leaves_slots(bundle_of: Callable[..., Path], context: Context) -> None:
    """Without statuses of rows the whole call fails, and nothing was sampled."""
    with Model.open(bundle_of()) as model, CoreProgram(model, context, OPTIONS) as program:
        token = int(program.step(batch([(0, [3], (4,))]), sampling(1, slot=i32(0))).ids[0])
        program.run(batch([(1, [token], (4,))]))
        expected = program.logits().tobytes()
        with raises(InvalidArgumentError, param="mask"):
            program.sample(sampling(1, slot=i32(0), mask=mask(False)))
        program.run(batch([(1, [-1], (4,))]))
        assert program.logits().tobytes() == expected
