"""The hidden rows of a step: what its logits are made of, in whatever memory, chunks and threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.native import ALL_THREADS, POISON, Context, CoreProgram, Model
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Node
from tests.support.core_steps import OPTIONS, PROMPT, batch, i32
from tests.support.errors import raises
from tests.support.tiny_graph import HIDDEN, R, c, tiny_graph, tiny_values, value, write_bundle


def hidden_in_chunks(program: CoreProgram, chunks: list[int]) -> npt.NDArray[np.float32]:
    rows, at = [], 0
    for size in chunks:
        program.run(batch([(at, PROMPT[at : at + size], (3, 7))], output_rows=i32(), hidden=True))
        rows.append(program.hidden().copy())
        at += size
    return np.concatenate(rows)


def test_logits_are_made_of_the_hidden_rows(model: Model, context: Context) -> None:
    head = tiny_values(tiny_graph())["lm_head.weight"]
    with CoreProgram(model, context, OPTIONS) as program:
        program.run(batch([(0, PROMPT, (1, 2))], hidden=True))
        assert program.hidden().shape == (len(PROMPT), model.info.hidden_size) == (len(PROMPT), HIDDEN)
        np.testing.assert_allclose(program.hidden() @ head.T, program.logits(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["f32", "w4a8"])
def test_hidden_rows_are_bit_equal_in_any_chunks_and_threads(scheme: str, bundle_of: Callable[..., Path]) -> None:
    found = set()
    with Model.open(bundle_of(scheme)) as model:
        for threads, flags, chunks in ((1, 0, [40]), (2, POISON, [1, 7, 31, 1]), (3, POISON, [20, 20])):
            options = dataclasses.replace(OPTIONS, flags=flags | ALL_THREADS)
            with Context(threads) as context, CoreProgram(model, context, options) as program:
                hidden = hidden_in_chunks(program, chunks)
                assert np.isfinite(hidden).all()
                found.add(hidden.tobytes())
    assert len(found) == 1


def test_hidden_rows_are_refused_without_the_flag(model: Model, context: Context, tmp_path: Path) -> None:
    with CoreProgram(model, context, OPTIONS) as program:
        with raises(InvalidArgumentError, param="program"):
            program.hidden()
        for rows in (i32(), np.arange(len(PROMPT), dtype=np.int32)):
            program.run(batch([(0, PROMPT, (1, 2))], output_rows=rows))
            with raises(InvalidArgumentError, param="hidden"):
                program.hidden()
    graph = tiny_graph()
    gather = next(node for node in graph.nodes if node.op == "gather_rows")
    graph.values["again"] = dataclasses.replace(graph.values["last"], name="again", shape=(R, c(HIDDEN)))
    graph.nodes.insert(graph.nodes.index(gather), Node("gather_rows", "other", gather.inputs, ["again"], {}))
    graph.nodes[-1].inputs[0] = value("again")
    with (
        Model.open(write_bundle(tmp_path / "two.psm", graph)) as other,
        CoreProgram(other, context, OPTIONS) as program,
    ):
        assert other.info.hidden_size == 0
        program.run(batch([(0, PROMPT, (1, 2))], hidden=True))
        with raises(UnsupportedError, param="hidden", match="one gather_rows"):
            program.hidden()
