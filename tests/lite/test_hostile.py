"""What is wrong with a tensor is refused by name, and the model goes on."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock import lite
from penstock.errors import InvalidArgumentError, UnsupportedError
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, build, tensors

T = lite.Tensor
I32 = np.int32
Inputs = list[lite.Tensor]


@pytest.fixture(scope="module")
def model() -> lite.Model:
    return build(seq_len=4)


def replaced(index: int, array: np.ndarray) -> Callable[[], Inputs]:
    def make() -> Inputs:
        inputs = tensors([[1, 2, 3, 4]])
        inputs[index] = T(array)
        return inputs

    return make


@pytest.mark.parametrize(
    ("make", "param", "words"),
    [
        (
            replaced(0, np.zeros((1, 5), I32)),
            "token_ids",
            r"shape: .*\[1, 4\], got \[1, 5\]; .*resize",
        ),
        (replaced(0, np.zeros((2, 4), I32)), "token_ids", r"shape: .*\[1, 4\], got \[2, 4\]"),
        (replaced(0, np.zeros(4, I32)), "token_ids", r"shape: .*\[1, 4\], got \[4\]"),
        (replaced(0, np.zeros((0, 4), I32)), "token_ids", r"shape: .*\[1, 4\], got \[0, 4\]"),
        (replaced(0, np.zeros((1, 4), np.int64)), "token_ids", "dtype: .*int32, got int64"),
        (replaced(0, np.full((1, 4), np.nan, np.float32)), "token_ids", "dtype: .*int32, got float32"),
        (replaced(0, np.array([[1, 2, 4096, 3]], I32)), "token_ids", r"0 to 4095, got 4096 at \[0, 2\]"),
        (replaced(0, np.array([[1, -1, 2, 3]], I32)), "token_ids", r"0 to 4095, got -1 at \[0, 1\]"),
        (replaced(0, np.full((1, 4), -(2**31), I32)), "token_ids", "0 to 4095, got -2147483648"),
        (replaced(1, np.array([5], I32)), "num_tokens", r"0 to 4, got 5 at \[0\]"),
        (replaced(1, np.array([-1], I32)), "num_tokens", r"0 to 4, got -1 at \[0\]"),
        (replaced(1, np.array([1, 1], I32)), "num_tokens", r"shape: .*\[1\], got \[2\]"),
        (replaced(2, np.array([2], I32)), "reset", r"0 to 1, got 2 at \[0\]"),
        (replaced(2, np.array([True])), "reset", "dtype: .*int32, got bool"),
        (lambda: tensors([[1, 2, 3, 4]])[:2], "inputs", r"3 \(token_ids, num_tokens, reset\), got 2"),
        (lambda: [1, 2, 3], "inputs", "Tensor, got int"),
        (lambda: [np.zeros((1, 4), I32)] * 3, "inputs", r"got ndarray; use Tensor\(array\)"),
        (lambda: np.zeros((3, 4)), "inputs", "list of Tensors, got ndarray"),
    ],
)
def test_inputs(model: lite.Model, make: Callable[[], Inputs], param: str, words: str) -> None:
    good = tensors([[1, 2, 3, 4]])
    before = model.predict(good)[0].get_data_to_numpy()
    with raises(InvalidArgumentError, param=param, match=words):
        model.predict(make())
    assert np.array_equal(model.predict(good)[0].get_data_to_numpy(), before)


def read_only() -> lite.Tensor:
    array = np.zeros((1, 4096), np.float32)
    array.flags.writeable = False
    return T(array)


@pytest.mark.parametrize(
    ("outputs", "param", "words"),
    [
        ([T(np.zeros((1, 4095), np.float32))], "logits", r"shape: .*\[1, 4096\], got \[1, 4095\]"),
        ([T(np.zeros((1, 4096), np.float64))], "logits", "dtype: .*float32, got float64"),
        ([], "outputs", r"1 \(logits\), got 0"),
        ([read_only()], "logits", "writable memory"),
    ],
)
def test_outputs(model: lite.Model, outputs: Inputs, param: str, words: str) -> None:
    with raises(InvalidArgumentError, param=param, match=words):
        model.predict(tensors([[1, 2, 3, 4]]), outputs)


@pytest.mark.parametrize(
    ("dims", "param", "words"),
    [
        ([[1, 4], [1]], "dims", "3 shapes"),
        ([[1, 4, 1], [1], [1]], "dims", r"token_ids: .*\[B from 1 to 65536, T from 1 to 16777216\], got"),
        ([[0, 4], [0], [0]], "dims", "token_ids"),
        ([[1, 10**12], [1], [1]], "dims", r"token_ids: .*\[B from 1 to 65536, T from 1 to 16777216\], got"),
        ([[1, 4], [10**12], [1]], "dims", r"num_tokens: .*\[B from 1 to 65536\], got"),
        ([[-1, 4], [1], [1]], "dims", "token_ids"),
        ([[2, 4], [1], [2]], "dims", r"num_tokens: .*\[2\] .*token_ids, got \[1\]"),
        ([[1, 1025], [1], [1]], "seq_len", "context's 1024, got 1025"),
        ([[1 << 20, 1], [1 << 20], [1 << 20]], "dims", r"token_ids: .*\[B from 1 to 65536,"),
    ],
)
def test_shapes(model: lite.Model, dims: list[list[int]], param: str, words: str) -> None:
    with raises(InvalidArgumentError, param=param, match=words):
        model.resize(model.get_inputs(), dims)
    assert model.get_inputs()[0].shape == [1, 4]


def test_arrays_that_make_no_tensor() -> None:
    for array, words in (
        (np.zeros((4, 4), I32)[:, ::2], r"tensor: .*C-contiguous array, got strides \[16, 8\]"),
        (np.zeros((4, 4), I32).T, "numpy.ascontiguousarray"),
        (np.array(["a"]), "tensor: dtype: .*numbers"),
        (np.array([None]), "tensor: dtype: .*numbers"),
        (np.zeros(2, ">i4"), "tensor: dtype: .*numbers or booleans, got >i4"),
        (np.zeros((1,) * 9), "tensor: .*8 dimensions, got 9"),
        ([1, 2], "tensor: .*numpy array, got list"),
    ):
        with raises(InvalidArgumentError, param="tensor", match=words):
            T(array)  # type: ignore[arg-type]
    with raises(InvalidArgumentError, param="shape", match="got -1"):
        T(shape=[-1])
    with raises(InvalidArgumentError, param="shape", match=r"8 dimensions and 2\^40"):
        T(shape=[1 << 21, 1 << 21])
    with raises(InvalidArgumentError, param="shape", match="got 3"):
        T(shape=3)  # type: ignore[arg-type]
    with raises(InvalidArgumentError, param="add_model"):
        lite.ModelGroup().add_model(3)  # type: ignore[arg-type]
    with raises(InvalidArgumentError, param="dtype", match="DataType"):
        T(dtype="complex64", shape=[1])


def test_numbers_are_taken_when_they_are_exactly_the_same() -> None:
    tensor = T(name="token_ids", dtype=I32, shape=[3])
    tensor.set_data_from_numpy(np.array([1.0, -0.0, 2.0**31 - 128], np.float32))
    assert tensor.get_data_to_numpy().tolist() == [1, 0, 2**31 - 128]
    for wrong in ([1, 0.5, 2], [1, np.nan, 2], [1, np.inf, 2], [1, 2.0**31, 2], [1, -(2.0**40), 2]):
        with raises(InvalidArgumentError, param="numpy_obj", match=r"int32 for token_ids, got float64 .* 1$"):
            tensor.set_data_from_numpy(np.array(wrong))
    with raises(InvalidArgumentError, param="numpy_obj", match=r"got int64 .* 0$"):
        tensor.set_data_from_numpy(np.array([2**32, 0, 0]))
    with raises(InvalidArgumentError, param="numpy_obj", match="C-contiguous"):
        tensor.set_data_from_numpy(np.zeros(6, I32)[::2])
    with raises(InvalidArgumentError, param="numpy_obj", match=r"shape: .*\[3\], got \[4\]"):
        tensor.set_data_from_numpy(np.zeros(4, I32))
    assert tensor.get_data_to_numpy().tolist() == [1, 0, 2**31 - 128]
    assert (tensor.element_num, tensor.data_size, tensor.dtype) == (3, 12, lite.DataType.INT32)


def test_dlpack_shares_memory_both_ways() -> None:
    source = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    tensor = T.from_dlpack(source, name="token_ids")
    source[1, 2] = 9
    assert tensor.get_data_to_numpy().tolist() == [[0, 1, 2], [3, 4, 9]]
    back = torch.from_dlpack(T(np.arange(3, dtype=np.float32)))
    assert back.tolist() == [0, 1, 2]
    array = np.zeros(2, np.float32)
    shared = torch.from_dlpack(T(array))
    array[1] = 5
    assert shared.tolist() == [0, 5]
    assert np.array_equal(np.from_dlpack(tensor), source.numpy())
    with raises(InvalidArgumentError, param="tensor", match="C-contiguous"):
        T.from_dlpack(source.T)
    with raises(InvalidArgumentError, param="data"):
        T.from_dlpack(torch.zeros(2, dtype=torch.bfloat16))
    with raises(InvalidArgumentError, param="data", match="__dlpack__"):
        T.from_dlpack([1])

    class Elsewhere:
        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with raises(UnsupportedError, param="data", match="DLPack device type 2"):
        T.from_dlpack(Elsewhere())


def test_a_model_that_is_closed() -> None:
    model = build()
    inputs = model.get_inputs()
    model.close()
    model.close()
    for call in (model.get_inputs, model.get_outputs, model.get_model_info, lambda: model.predict(inputs)):
        with raises(InvalidArgumentError, param="model", match="closed"):
            call()
    model.build_from_file(BUNDLE, lite.ModelType.PENSTOCK)
    assert model.predict(inputs)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused_during_a_prediction(model: lite.Model) -> None:
    runner = lite.ModelParallelRunner()
    runner.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, None, {"seq_len": 4})
    with model._lock:  # as a thread holds it that predicts while this one forks
        child = os.fork()
        if child == 0:
            status = 1
            try:
                told = []
                for one in (model, runner):
                    try:
                        one.predict(tensors([[1, 2, 3, 4]]))
                    except InvalidArgumentError as error:
                        told.append("used in its forked child" in str(error))
                model.close()
                runner.close()
                status = 0 if told == [True, True] else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert model.predict(tensors([[1, 2, 3, 4]]))
    runner.close()
