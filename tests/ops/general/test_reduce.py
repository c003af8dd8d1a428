"""Reductions of general networks against torch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import PenstockError
from tests.support.general_ops import check, run


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("log", [False, True])
def test_softmax(log: bool) -> None:
    function = torch.log_softmax if log else torch.softmax
    for shape, axis in (((5, 33), 1), ((3, 1), -1), ((4, 7, 21), 1), ((6, 3, 2, 130), 0), ((3, 2000), -1), ((2, 0), 0)):
        x = numbers(*shape) * 5
        expected = function(torch.from_numpy(x).double(), axis).float().numpy()
        check("softmax", [x], expected, axis=axis, log=log, relative=2e-6, absolute=1e-6)
    x = numbers(3, 5)
    x[0], x[1, 2] = [0, -np.inf, 1, -np.inf, 2], np.nan
    expected = function(torch.from_numpy(x).double(), 1).float().numpy()
    check("softmax", [x], expected, axis=1, log=log, relative=2e-6, absolute=1e-6)
    check("softmax", [np.float32(3)], np.float32(0 if log else 1), axis=0, log=log)


KINDS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "l1": lambda x, axis, keepdims: np.abs(x).sum(axis, keepdims=keepdims),
    "l2": lambda x, axis, keepdims: np.sqrt(np.square(x).sum(axis, keepdims=keepdims)),
    "sum_square": lambda x, axis, keepdims: np.square(x).sum(axis, keepdims=keepdims),
    "log_sum": lambda x, axis, keepdims: np.log(x.sum(axis, keepdims=keepdims)),
    "log_sum_exp": lambda x, axis, keepdims: np.log(np.exp(x).sum(axis, keepdims=keepdims)),
}
CASES = [
    ((5, 33), (1,)), ((5, 33), (0,)), ((2, 7, 9, 70), (1, 2)), ((2, 3, 5, 7), (1, 3)), ((3, 4, 5), (0, 1, 2)),
    ((2, 70, 3), (-2,)), ((2, 1, 5, 1), (1, 3)), ((4, 5), ()), ((2, 3, 4, 5, 2, 3), (0, 2, 4)), ((), ()), ((9,), (0,)),
    ((0, 3), (1,)), ((3000, 3), (0,)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_reduce(kind: str) -> None:
    for shape, axes in CASES:
        x = np.asarray(np.abs(numbers(*shape)) + np.float32(0.1 if kind == "log_sum" else -0.5), np.float32)
        if kind == "prod":
            x = np.asarray(1 + x * 0.1, np.float32)
        for keep in (True, False):
            expected = KINDS[kind](x.astype(np.float64), axis=axes, keepdims=keep)
            check("reduce", [x], np.asarray(expected, np.float32), kind=kind, axes=axes, keep=keep,
                  relative=1e-5, absolute=2e-6)  # fmt: skip


def test_reduce_special_values() -> None:
    x = np.float32([[1, np.nan, 3], [np.inf, 1, -np.inf], [-np.inf, -np.inf, -np.inf]])
    for kind in ("max", "min"):
        for axis in (0, 1):
            expected = KINDS[kind](x, axis=axis, keepdims=False)
            check("reduce", [x], expected, kind=kind, axes=(axis,), keep=False)
    y = np.float32([[1, np.inf, 3], [0, 1, -np.inf], [-np.inf, -np.inf, -np.inf]])
    for axis in (0, 1):
        expected = torch.logsumexp(torch.from_numpy(y), axis).numpy()
        check("reduce", [y], expected, kind="log_sum_exp", axes=(axis,), keep=False, relative=1e-6)
    check("reduce", [np.zeros((2, 0), np.float32)], np.float32([0, 0]), kind="sum", axes=(1,), keep=False)
    check("reduce", [np.zeros((2, 0), np.float32)], np.float32([1, 1]), kind="prod", axes=(1,), keep=False)
    check("reduce", [np.zeros((0, 3), np.float32)], np.zeros(3, np.float32), kind="sum", axes=(0,), keep=False)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8, np.uint8])
def test_reduce_integers(dtype: Any) -> None:
    x = np.random.default_rng(1).integers(0, 9, (3, 1100, 4)).astype(dtype)
    for kind in ("sum", "max", "min", "prod", "l1", "sum_square"):
        for axes in ((1,), (2,), (0, 2)):
            with np.errstate(all="ignore"):
                expected = KINDS[kind](x.astype(np.int64), axis=axes, keepdims=True).astype(dtype)
            check("reduce", [x], expected, kind=kind, axes=axes, keep=True)
    bits = x > 4
    check("reduce", [bits], bits.any(1), kind="max", axes=(1,), keep=False)
    check("reduce", [bits], bits.all(2), kind="min", axes=(2,), keep=False)


def test_arg_reduce() -> None:
    x = np.round(numbers(3, 40, 5) * 2)
    for array in (x, x.astype(np.int32), x.astype(np.int8)):
        for axis in (0, 1, -1):
            for kind, function in (("max", np.argmax), ("min", np.argmin)):
                expected = function(array, axis=axis)
                check("arg_reduce", [array], expected, kind=kind, axis=axis, keep=False, last=False)
                size = array.shape[axis]
                last = size - 1 - function(np.flip(array, axis), axis=axis)
                check("arg_reduce", [array], np.expand_dims(last, axis), kind=kind, axis=axis, keep=True, last=True)
    special = np.float32([[1, np.nan, 2], [-0.0, 0.0, -1]])
    check("arg_reduce", [special], np.int64([1, 0]), kind="max", axis=1, keep=False, last=False)
    check("arg_reduce", [special], np.int64([1, 2]), kind="min", axis=1, keep=False, last=False)


def test_top_k() -> None:
    x = np.round(numbers(4, 3000) * 100)
    for array, axis, k in ((x, 1, 7), (x, 0, 4), (x[:, :50], 1, 50), (x.astype(np.int64), -1, 33), (x, 1, 0)):
        for largest in (True, False):
            order = np.argsort(-array if largest else array, axis=axis, kind="stable")
            indices = np.take(order, np.arange(k), axis=axis)
            values = np.take_along_axis(array, indices, axis)
            check("top_k", [array], values, indices, k=[k], axis=axis, largest=largest, sorted=True)
    values, indices = torch.tensor([1, float("nan"), 3, -1]).topk(2)
    check("top_k", [np.float32([1, np.nan, 3, -1])], values.numpy(), indices.numpy(), k=[2], axis=0, largest=True,
          sorted=True)  # fmt: skip


def test_cumsum() -> None:
    x = numbers(3, 50, 20)
    for axis in (0, 1, 2):
        expected = np.cumsum(x, axis, np.float64).astype(np.float32)
        check("cumsum", [x], expected, axis=axis, exclusive=False, reverse=False, absolute=1e-5)
        flipped = np.flip(np.cumsum(np.flip(x, axis), axis, np.float64), axis).astype(np.float32)
        check("cumsum", [x], flipped, axis=axis, exclusive=False, reverse=True, absolute=1e-5)
        check("cumsum", [x], expected - x, axis=axis, exclusive=True, reverse=False, absolute=1e-5)
    whole = np.arange(40, dtype=np.int64).reshape(2, 20)
    check("cumsum", [whole], np.cumsum(whole, 1), axis=1, exclusive=False, reverse=False)
    check("cumsum", [whole], np.cumsum(whole, 0) - whole, axis=0, exclusive=True, reverse=False)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("softmax", {"axis": 2, "log": False}),
        ("reduce", {"kind": "median", "axes": (0,), "keep": True}),
        ("reduce", {"kind": "sum", "axes": (2,), "keep": True}),
        ("arg_reduce", {"kind": "sum", "axis": 0, "keep": True, "last": False}),
        ("arg_reduce", {"kind": "max", "axis": -3, "keep": True, "last": False}),
        ("cumsum", {"axis": 5, "exclusive": False, "reverse": False}),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(PenstockError):
        run(op, [numbers(2, 3)], [((2, 3), np.float32)], **attrs)


def test_wrong_k_is_refused() -> None:
    for k in ((4,), (-1,), (1, 1), ()):
        with pytest.raises(PenstockError):
            run("top_k", [numbers(3)], [((4,), np.float32), ((4,), np.int64)], k=k, axis=0, largest=True, sorted=True)
