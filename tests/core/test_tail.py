"""Graphs that end in argmax or topk: the ids of their logits, sampled greedily and in no other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.native import ALL_THREADS, POISON, Biases, Context, CoreProgram, Model, Penalties, plan
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.ir import Graph
from penstock.graph.passes.append_tail import append_tail
from tests.support.core_steps import OPTIONS, PROMPT, batch, i32, sampling
from tests.support.errors import raises
from tests.support.tiny_graph import VOCAB, tiny_graph, value, write_bundle

K = 7


@pytest.fixture(scope="module")
def tail_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(scheme, tail) -> a bundle of the weights that ``bundle_of`` has, too."""
    folder = tmp_path_factory.mktemp("tails")

    def get(scheme: str, tail: str) -> Path:
        path = folder / f"{scheme}-{tail.replace(':', '-')}.psm"
        if not path.exists():
            graph = tiny_graph(scheme)
            append_tail(graph, tail)
            write_bundle(path, graph)
        return path

    return get


def step() -> Any:
    return batch([(0, PROMPT, (1, 2))], hidden=True)


@pytest.mark.parametrize("scheme", ["f32", "w4a8"])
@pytest.mark.parametrize("flags", [0, POISON])
def test_ids_are_those_of_the_logits(
    scheme: str, flags: int, bundle_of: Callable[..., Path], tail_of: Callable[[str, str], Path], context: Context
) -> None:
    options = dataclasses.replace(OPTIONS, flags=flags | ALL_THREADS)
    with Model.open(bundle_of(scheme)) as model, CoreProgram(model, context, options) as program:
        program.run(step())
        logits = program.logits().copy()
        greedy = program.sample(sampling(len(PROMPT))).ids
    order = np.argsort(-logits, axis=1, kind="stable")[:, :K]
    for tail, k in (("argmax", 1), (f"topk:{K}", K)):
        with Model.open(tail_of(scheme, tail)) as model, CoreProgram(model, context, options) as program:
            assert (model.info.tail, model.info.tail_k) == (tail.split(":")[0], k)
            sampled = program.step(step(), sampling(len(PROMPT), slot=np.full(len(PROMPT), 2, np.int32)))
            ids, values = program.tail()
            assert sampled.ids.tolist() == greedy.tolist() == ids[:, 0].tolist()
            assert ids.tolist() == order[:, :k].tolist()
            if k == 1:
                assert values is None
            else:
                assert values is not None
                assert values.tobytes() == np.take_along_axis(logits, order, 1).tobytes()
            hidden = program.hidden().copy()
            program.run(batch([(40, [-3], (1, 2))], output_rows=i32(), hidden=True))  # slot 2's token
            assert program.hidden().shape == (1, hidden.shape[1])
            assert program.tail()[0].shape == (0, k)


def test_memory_is_that_of_ids(bundle_of: Callable[..., Path], tail_of: Callable[[str, str], Path]) -> None:
    with Context(1) as context, Model.open(bundle_of()) as whole, Model.open(tail_of("f32", "argmax")) as model:
        assert plan(whole, context, OPTIONS).logits_bytes == OPTIONS.max_rows * VOCAB * 4
        assert plan(model, context, OPTIONS).logits_bytes == OPTIONS.max_rows * 4


ROWS = len(PROMPT)
FLOATS = np.full(ROWS, 0.5, np.float32)
ONES, ZEROS, NONE = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32), np.zeros(ROWS + 1, np.int32)


def penalties(repetition: Any = ONES, presence: Any = ZEROS, frequency: Any = ZEROS) -> Penalties:
    return Penalties(repetition, presence, frequency, NONE, np.zeros(ROWS, np.int32), i32())


@pytest.mark.parametrize(
    ("changes", "field", "name"),
    [
        ({"temperature": FLOATS}, "temperature", "temperature"),
        ({"penalties": penalties(repetition=FLOATS)}, "repetition_penalty", "repetition_penalty"),
        ({"penalties": penalties(presence=FLOATS)}, "presence_penalty", "presence_penalty"),
        ({"penalties": penalties(frequency=FLOATS)}, "frequency_penalty", "frequency_penalty"),
        ({"mask": np.full((ROWS, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)}, "mask", "mask"),
        ({"biases": Biases(np.arange(ROWS + 1, dtype=np.int32), np.zeros(ROWS, np.int32), ZEROS)}, "bias", "bias"),
        ({"target": np.zeros(ROWS, np.int32)}, "target", "target"),
        ({"num_logprobs": np.zeros(ROWS, np.int32)}, "num_logprobs", "num_logprobs"),
    ],
)
def test_other_sampling_is_refused_by_name(
    changes: dict[str, Any], field: str, name: str, tail_of: Callable[[str, str], Path], context: Context
) -> None:
    with Model.open(tail_of("f32", "argmax")) as model, CoreProgram(model, context, OPTIONS) as program:
        with raises(UnsupportedError, param=field, match=rf"^{name}: the graph ends in argmax or topk"):
            program.step(step(), sampling(ROWS, **changes))
        off = {
            "penalties": penalties(),
            "num_logprobs": np.full(ROWS, -1, np.int32),
            "target": np.full(ROWS, -1, np.int32),
        }
        assert (program.step(step(), sampling(ROWS, **off)).ids >= 0).all()


def test_each_end_refuses_the_other_s_result(
    model: Model, tail_of: Callable[[str, str], Path], context: Context
) -> None:
    with CoreProgram(model, context, OPTIONS) as program, raises(UnsupportedError, param="tail"):
        program.tail()
    with Model.open(tail_of("f32", "topk:2")) as other, CoreProgram(other, context, OPTIONS) as program:
        with raises(InvalidArgumentError, param="program"):
            program.tail()
        program.run(step())
        with raises(UnsupportedError, param="logits"):
            program.logits()


def of_hidden_rows(graph: Graph) -> None:
    graph.nodes[-1].inputs[0] = value("last")


def of_values(graph: Graph) -> None:
    graph.output = "tail:logits"


@pytest.mark.parametrize(("tail", "patch"), [("argmax", of_hidden_rows), ("topk:3", of_values)])
def test_ids_of_something_else_are_refused(tail: str, patch: Callable[[Graph], None], tmp_path: Path) -> None:
    """Ids of 32 columns are no tokens, and the values beside topk's ids are no ids."""
    graph = tiny_graph()
    append_tail(graph, tail)
    with raises(InvalidFileError, param="metadata.output"):
        Model.open(write_bundle(tmp_path / "odd.psm", graph, patch=patch))


@pytest.mark.parametrize("tail", ["", "max", "topk", "topk:0", "topk:x", "argmax:2", "topk:102"])
def test_malformed_tails_are_refused(tail: str) -> None:
    with raises(InvalidArgumentError, param="tail"):
        append_tail(tiny_graph(), tail)
