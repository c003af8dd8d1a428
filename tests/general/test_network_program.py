"""Programs of general networks: results, free sizes, plans that are kept, threads, outputs that become inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.core.native import ALL_THREADS, POISON, Context, CoreProgram, Model, ProgramOptions
from penstock.core.predict import NetworkProgram, network_inputs, network_outputs, network_sizes
from penstock.core.spans import last_spans, set_profiling
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import DType, Symbol
from tests.support.errors import raises
from tests.support.general_graphs import Array, NetworkBuilder, mixed_inputs, mixed_network, mixed_result

SIZES = [(4, 2), (1, 1), (300, 8), (37, 3), (4, 2), (5, 1), (64, 2), (300, 8), (4, 2)]


@pytest.fixture(scope="module")
def builder() -> NetworkBuilder:
    return mixed_network()


@pytest.fixture(scope="module")
def path(builder: NetworkBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builder.write(tmp_path_factory.mktemp("general") / "mixed.psm")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.open(path, verify=True) as model:
        yield model


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    with Context(2) as context:
        yield context


def fresh(model: Model, context: Context, inputs: list[Array], flags: int = 0) -> list[Array]:
    with NetworkProgram(model, context, flags) as program:
        return program.predict(inputs)


def same(a: list[Array], b: list[Array]) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


def test_results_are_those_of_numpy(builder: NetworkBuilder, model: Model, context: Context) -> None:
    inputs = mixed_inputs(37, 3)
    for result, expected in zip(fresh(model, context, inputs), mixed_result(builder, inputs), strict=True):
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, atol=1e-4, rtol=1e-4)


def test_shapes_in_turn_equal_fresh_programs(model: Model, context: Context) -> None:
    """More shapes than plans are kept, in an arena that grows and memory that earlier runs left."""
    with NetworkProgram(model, context) as program:
        for seed, (rows, h) in enumerate(SIZES):
            inputs = mixed_inputs(rows, h, seed)
            assert same(program.predict(inputs), fresh(model, context, inputs, POISON)), (rows, h)


def test_threads_and_levels_change_no_bit(model: Model) -> None:
    inputs = mixed_inputs(123, 5)
    with Context(1) as one, Context(2) as two, Context(1, "generic") as generic:
        expected = fresh(model, one, inputs)
        assert same(fresh(model, two, inputs, ALL_THREADS | POISON), expected)
        assert same(fresh(model, generic, inputs), expected)


def test_outputs_are_inputs_of_the_next_run(model: Model, context: Context) -> None:
    """Views of the program's memory, whose places the next run writes, and a plan that needs a larger arena."""
    with NetworkProgram(model, context) as program, NetworkProgram(model, context) as other:
        image = mixed_inputs(8, 1)[1]
        views = program.predict([mixed_inputs(8, 1)[0], image], copy=False)
        copies = [view.copy() for view in views]
        assert same(program.predict([views[0], image]), other.predict([copies[0], image]))
        views = program.predict([views[0], image], copy=False)
        kept, larger = views[0].copy(), mixed_inputs(8, 8)[1]
        assert same(program.predict([views[0], larger]), other.predict([kept, larger]))


def test_inputs_need_no_alignment(model: Model, context: Context) -> None:
    x, image = mixed_inputs(4, 2)
    moved = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert moved.ctypes.data % 4
    assert same(fresh(model, context, [moved, image]), fresh(model, context, [x, image]))


def test_a_model_tells_its_inputs_and_outputs(path: Path, model: Model) -> None:
    assert [(v.name, v.dtype, v.shape) for v in network_inputs(model)] == [
        ("x", DType.F32, (-1, 32)), ("image", DType.F32, (-1, -1, -1)),
    ]  # fmt: skip
    assert [v.sizes for v in network_outputs(model)] == [("N", "32"), ("4*N", "2", "4"), ("N*h*h*32",), ("1", "2", "3"),
                                                         ("N", "32")]  # fmt: skip
    assert [(s.name, s.min, s.max, s.example) for s in network_sizes(model)] == [("N", 1, 300, 4), ("h", 1, 8, 2)]
    graph, _ = read_graph(path)
    stored = mixed_network().graph
    assert (graph.kind, graph.inputs, graph.outputs, graph.symbols) == (
        1,
        stored.inputs,
        stored.outputs,
        stored.symbols,
    )
    assert graph.values == stored.values
    assert graph.weights["table"].shape == (1, 2, 3)


def test_prepare_tells_the_shapes_of_outputs(model: Model, context: Context) -> None:
    with NetworkProgram(model, context) as program:
        assert program.prepare([(7, 32), (6, 7, 48)]) == [(7, 32), (28, 2, 4), (7 * 9 * 32,), (1, 2, 3), (7, 32)]
        inputs = mixed_inputs(7, 3)
        assert same(program.predict(dict(zip(("x", "image"), inputs, strict=True))), fresh(model, context, inputs))


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 31), (4, 4, 32)], [(4, 32), (4, 5, 32)], [(4, 32), (3, 4, 32)], [(4, 32), (4, 4, 31)],
        [(0, 32), (4, 0, 32)], [(301, 32), (4, 301, 32)], [(4, 32, 1), (4, 4, 32)], [(4, 32), (18, 4, 144)],
        [(1 << 40, 32), (4, 4, 32)],
    ],
)  # fmt: skip
def test_other_shapes_are_refused(model: Model, context: Context, shapes: list[tuple[int, ...]]) -> None:
    with NetworkProgram(model, context) as program:
        with raises(InvalidArgumentError):
            program.prepare(shapes)
        assert program.prepare([(4, 32), (4, 4, 32)])[0] == (4, 32)


def test_other_types_and_numbers_are_refused(model: Model, context: Context) -> None:
    x, image = mixed_inputs(4, 2)
    with NetworkProgram(model, context) as program:
        with raises(InvalidArgumentError, param="x"):
            program.predict([x.astype(np.float64), image])
        with raises(InvalidArgumentError, param="inputs"):
            program.predict([x])
        with raises(InvalidArgumentError, param="inputs"):
            program.predict({"x": x, "picture": image})


def test_each_kind_refuses_the_other(model: Model, context: Context) -> None:
    with Model.open("demo/demo.psm") as demo, raises(UnsupportedError, param="model"):
        NetworkProgram(demo, context)
    with raises(InvalidArgumentError, match="options"):
        CoreProgram(model, context, ProgramOptions(1, 1, 1, 1))


def test_elementwise_ops_write_over_what_dies(tmp_path: Path, context: Context) -> None:
    """Operands that live on, die, come twice, are broadcast, or have another view."""
    b = NetworkBuilder(Symbol("N", 1, 5000))
    x, y = b.input("x", "N,4"), b.input("y", "4")
    relu = b.node("unary", [x], "relu", kind="relu", alpha=0.0, beta=0.0)
    total = b.node("binary", [relu, y], "total", kind="add")  # relu lives on
    square = b.node("binary", [total, total], "square", kind="mul")
    flat = b.node("reshape", [square], "view", sizes="4*N")
    negative = b.node("unary", [flat], "negative", kind="neg", alpha=0.0, beta=0.0)
    back = b.node("reshape", [negative], "back", sizes="N,4")
    more = b.node("binary", [y, back], "more", kind="sub")
    b.output(b.node("binary", [more, relu], "out", kind="add"), "N,4")
    b.output(relu, "N,4")
    with Model.open(b.write(tmp_path / "a.psm")) as model:
        for rows in (3, 5000):
            rng = np.random.default_rng(rows)
            inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 4), (4,))]
            out, kept = fresh(model, context, inputs, POISON | ALL_THREADS)
            positive = np.maximum(inputs[0], 0)
            np.testing.assert_array_equal(kept, positive)
            np.testing.assert_allclose(out, inputs[1] + (positive + inputs[1]) ** 2 + positive, rtol=1e-5, atol=1e-5)


def test_values_that_fail_name_the_node(tmp_path: Path, context: Context) -> None:
    b = NetworkBuilder()
    x, indices = b.input("x", "4,2"), b.input("indices", "3", DType.I64)
    b.output(b.node("gather", [x, indices], "rows", axis=0), "3,2")
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    with Model.open(b.write(tmp_path / "a.psm")) as model, NetworkProgram(model, context) as program:
        for _ in range(2):
            with raises(InvalidArgumentError, match=r"nodes\[0\] \(gather rows\)"):
                program.predict([table, np.array([0, 4, 1])])
            assert program.predict([table, np.array([0, 3, -1])])[0].tolist() == [[0, 1], [6, 7], [6, 7]]


def test_profiles_name_the_nodes_of_each_plan(model: Model, context: Context) -> None:
    with NetworkProgram(model, context) as program:
        set_profiling(program, True)
        for rows in (200, 7, 200):
            program.predict(mixed_inputs(rows, 2))
            spans = last_spans(program)
            assert set(spans["node"].tolist()) == {-1, 0, 1, 2, 3, 4, 5}  # reshapes do nothing
            assert (spans["end_ns"] >= spans["begin_ns"]).all()


def test_a_network_of_sums_has_scalars_and_none(tmp_path: Path, context: Context) -> None:
    """A scalar as a constant; rows that are empty."""
    b = NetworkBuilder(Symbol("N", 0, 4, example=1))
    x = b.input("x", "N,3")
    b.output(b.node("add", [x, x], "sum"), "N,3")
    b.output(b.constant("scalar", np.array(7, np.int32)), "")
    with Model.open(b.write(tmp_path / "a.psm")) as model:
        total, scalar = fresh(model, context, [np.ones((0, 3), np.float32)])
    assert total.shape == (0, 3)
    assert scalar.shape == ()
    assert scalar == 7
