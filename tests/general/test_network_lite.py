"""General networks in ``penstock.lite``: names, types, free sizes, resize, tensors that are filled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.lite import Context, DataType, Model, ModelParallelRunner, ModelType, Tensor
from penstock.runtime.native import NativeProgram
from tests.support.errors import raises
from tests.support.general_graphs import mixed_inputs, mixed_network, mixed_result

BUILDER = mixed_network()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDER.write(tmp_path_factory.mktemp("general") / "mixed.psm")


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model() as model:
        model.build_from_file(path, ModelType.PENSTOCK, Context())
        yield model


def arrays_of(tensors: list[Tensor]) -> list[np.ndarray]:
    return [tensor.get_data_to_numpy() for tensor in tensors]


def test_predict_takes_any_sizes(model: Model) -> None:
    for rows, h in ((5, 1), (9, 3)):
        inputs = mixed_inputs(rows, h)
        outputs = model.predict([Tensor(array) for array in inputs])
        assert [tensor.name for tensor in outputs] == BUILDER.graph.outputs
        for array, expected in zip(arrays_of(outputs), mixed_result(BUILDER, inputs), strict=True):
            np.testing.assert_allclose(array, expected, atol=1e-4, rtol=1e-4)


def test_tensors_have_names_types_and_free_sizes(model: Model) -> None:
    tensors = model.get_inputs()
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [
        ("x", DataType.FLOAT32, [-1, 32]), ("image", DataType.FLOAT32, [-1, -1, -1]),
    ]  # fmt: skip
    with raises(InvalidArgumentError, param="x"):
        model.predict(tensors)
    with raises(InvalidArgumentError, param="numpy_obj"):
        tensors[0].set_data_from_numpy(np.zeros((4, 31), np.float32))
    for tensor, array in zip(tensors, mixed_inputs(4, 2), strict=True):
        tensor.set_data_from_numpy(array)
    first = arrays_of(model.predict(tensors))
    by_name = arrays_of(model.predict(tensors[::-1]))
    assert all((a == b).all() for a, b in zip(first, by_name, strict=True))
    assert model.get_outputs()[0].shape == [-1, 32]


def test_resize_tells_the_outputs(model: Model) -> None:
    model.resize(model.get_inputs(), [[6, 32], [4, 6, 32]])
    assert [t.shape for t in model.get_inputs()] == [[6, 32], [4, 6, 32]]
    assert [t.shape for t in model.get_outputs()] == [[6, 32], [24, 2, 4], [768], [1, 2, 3], [6, 32]]
    inputs = [Tensor(array) for array in mixed_inputs(6, 2)]
    expected = arrays_of(model.predict(inputs))
    outputs = model.get_outputs()
    assert all(a is b for a, b in zip(model.predict(inputs, outputs), outputs, strict=True))
    assert all((a == b).all() for a, b in zip(arrays_of(outputs), expected, strict=True))
    with raises(InvalidArgumentError):
        model.resize(model.get_inputs(), [[6, 32], [4, 7, 32]])
    with raises(InvalidArgumentError, param="dims"):
        model.resize(model.get_inputs(), [[6, 32]])
    outputs[0] = Tensor(name="total", dtype=np.float32, shape=(5, 32))
    with raises(InvalidArgumentError, param="total"):
        model.predict(inputs, outputs)


def test_the_model_info_has_the_sizes(model: Model) -> None:
    assert model.get_model_info("inputs") == {"x": ["N", "32"], "image": ["2*h", "N", "16*h"]}
    with raises(UnsupportedError, param="update_weights"):
        model.update_weights([])


def test_what_needs_tokens_refuses_a_network(path: Path) -> None:
    with raises(UnsupportedError, param="model_path"):
        ModelParallelRunner().build_from_file(path, ModelType.PENSTOCK)
    with raises(UnsupportedError, param="model"):
        NativeProgram.open(path)


def test_inspect_shows_inputs_and_outputs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    for part in ("a general network", "x ", "[2*h, N, 16*h]", "1 to 300", "2 linear", "flat"):
        assert part in text
