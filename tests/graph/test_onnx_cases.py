"""The node cases of ONNX's backend test: those of ``onnx_cases.txt`` pass, and no other is wrong or crashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import penstock
from tests.support.onnx_backend import Backend, Result, cases

PASSING = frozenset((Path(__file__).parent / "onnx_cases.txt").read_text().split())
"""The cases of plain types, without the expanded ones, that pass."""
SAMPLE = (
    "conv",
    "maxpool",
    "gemm",
    "slice",
    "pad",
    "reshape",
    "squeeze",
    "split",
    "gather",
    "gridsample",
    "lstm",
    "reducesum",
    "rnn",
    "where",
)
FREE_PASSING = 730
"""The number of plain cases that pass with every size of their inputs open."""


@pytest.fixture(name="backend")
def _backend(tmp_path: Path) -> Iterator[Backend]:
    backend = Backend(tmp_path)
    yield backend
    backend.close()


def failures(results: list[Result]) -> list[str]:
    return [f"{r.name}: {r.outcome}: {r.note}" for r in results if r.outcome in ("wrong", "crashed")]


def test_a_sample_of_the_node_cases(backend: Backend) -> None:
    sample = [case for case in cases(SAMPLE) if "_expanded" not in case.name]
    fixed = [backend.run(case) for case in sample]
    assert not failures(fixed)
    assert not [r.name for r in fixed if r.name in PASSING and r.outcome != "passed"]
    assert len(PASSING & {r.name for r in fixed}) > 84
    assert not failures([backend.run(case, free=True) for case in sample])


@pytest.mark.parametrize(("mode", "axes"), [("linear", 2), ("cubic", 2), ("nearest", 3)])
def test_images_of_any_size_are_sampled(mode: str, axes: int, tmp_path: Path) -> None:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], mode=mode, padding_mode="reflection")
    shapes = {"x": ["N", "C", *"DHW"[-axes:]], "grid": ["N", *"PQR"[-axes:], axes], "y": ["N", "C", *"PQR"[-axes:]]}
    x, grid, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph([node], "sampled", [x, grid], [y])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    assert penstock.read_network(path).check().passed


@pytest.mark.long
def test_all_node_cases_with_fixed_and_with_free_sizes(backend: Backend) -> None:
    every = cases()
    fixed = [backend.run(case) for case in every]
    assert not failures(fixed)
    passed = {r.name for r in fixed if r.outcome == "passed"}
    assert not PASSING - passed
    free = [backend.run(case, free=True) for case in every]
    assert not failures(free)
    assert sum(r.plain and r.outcome == "passed" and "_expanded" not in r.name for r in free) >= FREE_PASSING
