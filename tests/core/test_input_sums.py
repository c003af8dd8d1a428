"""Sums over the inputs of linears: the same on any number of threads, and without effect on the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import ALL_THREADS, INPUT_SUMS, POISON, Context, CoreProgram, Model
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from tests.support.core_steps import OPTIONS, PROMPT, batch
from tests.support.errors import raises


def linears(path: Path) -> dict[int, int]:
    """The columns of each linear, by node."""
    graph, _ = read_graph(path)
    return {i: graph.weights[node.inputs[1].name].cols for i, node in enumerate(graph.nodes) if node.op == "linear"}


@pytest.mark.parametrize("scheme", ["f32", "w4a8"])
def test_sums_are_those_of_the_rows(scheme: str, bundle_of: Callable[..., Path]) -> None:
    path, results, logits = bundle_of(scheme), set(), set()
    columns = linears(path)
    assert len(columns) > 3
    with Model.open(path) as model:
        for threads, flags in ((1, 0), (3, POISON)):
            options = dataclasses.replace(OPTIONS, flags=flags | ALL_THREADS | INPUT_SUMS)
            with Context(threads) as context, CoreProgram(model, context, options) as program:
                sums = {i: (np.zeros(n), np.zeros(n, np.float32)) for i, n in columns.items()}
                rows = {i: np.zeros((64, n), np.float32) for i, n in columns.items()}
                for i, (squares, maxima) in sums.items():
                    program.sum_inputs(i, squares=squares, maxima=maxima, rows=rows[i])
                inputs: dict[int, list[np.ndarray]] = {i: [] for i in columns}
                for at, end in ((0, 17), (17, 40)):
                    program.run(batch([(at, PROMPT[at:end], (1, 2))]))
                    for i in columns:
                        inputs[i].append(rows[i][: end - at].copy())
                logits.add(program.logits().tobytes())
                for i, (squares, maxima) in sums.items():
                    x = np.concatenate(inputs[i])
                    np.testing.assert_allclose(squares, (x.astype(np.float64) ** 2).sum(axis=0), rtol=1e-12)
                    assert maxima.tobytes() == np.abs(x).max(axis=0).tobytes()
                results.add(b"".join(squares.tobytes() + maxima.tobytes() for squares, maxima in sums.values()))
        with Context(2) as context, CoreProgram(model, context, OPTIONS) as program:
            for at, end in ((0, 17), (17, 40)):
                program.run(batch([(at, PROMPT[at:end], (1, 2))]))
            logits.add(program.logits().tobytes())
    assert len(results) == 1
    assert len(logits) == 1


def test_sums_need_the_flag_and_a_linear(bundle_of: Callable[..., Path]) -> None:
    squares = np.zeros(4096)
    columns = linears(bundle_of())
    other = next(i for i in range(len(columns) + 1) if i not in columns)
    with Model.open(bundle_of()) as model, Context(1) as context:
        with CoreProgram(model, context, OPTIONS) as program, raises(InvalidArgumentError):
            program.sum_inputs(next(iter(columns)), squares=squares)
        options = dataclasses.replace(OPTIONS, flags=INPUT_SUMS)
        with CoreProgram(model, context, options) as program, raises(InvalidArgumentError):
            program.sum_inputs(other, squares=squares)
