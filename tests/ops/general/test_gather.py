"""Gathers and scatters of general networks against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from tests.support.errors import raises
from tests.support.general_ops import check, run

RNG = np.random.default_rng(5)


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return (np.arange(np.prod(shape, dtype=int)) % 113).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.float16])
def test_gathers(dtype: Any) -> None:
    x = values(4, 30, 6, dtype=dtype)
    for axis, shape in ((0, (3,)), (1, (2, 50)), (-1, ()), (1, (0, 3))):
        size = x.shape[axis]
        for index_type in (np.int32, np.int64):
            indices = RNG.integers(-size, size, shape).astype(index_type)
            check("gather", [x, indices], np.take(x, indices, axis), axis=axis)
    for axis in (0, 1, 2):
        shape = [3, 20, 5]
        shape[axis] = 700
        indices = RNG.integers(-x.shape[axis], x.shape[axis], shape)
        region = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(shape))
        check("gather_elements", [x, indices], np.take_along_axis(x[region], indices, axis), axis=axis)
    rows = RNG.integers(-4, 4, (7, 2))
    check("gather_nd", [x, rows], x[rows[:, 0], rows[:, 1]], batch_dims=0)
    full = np.stack([RNG.integers(-n, n, (2, 9)) for n in x.shape], -1).astype(np.int32)
    check("gather_nd", [x, full], x[tuple(np.moveaxis(full, -1, 0))], batch_dims=0)
    batched = RNG.integers(0, 30, (4, 3, 1))
    check("gather_nd", [x, batched], np.take_along_axis(x, batched, 1), batch_dims=1)


REDUCTIONS = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.float16])
def test_scatters(dtype: Any) -> None:
    x = values(5, 6, 4, dtype=dtype)
    for reduction, function in REDUCTIONS.items():
        if dtype == np.float16 and reduction != "none":
            continue
        for axis in (0, 1, -1):
            shape = (3, 4, 2)
            indices = RNG.integers(-x.shape[axis], x.shape[axis], shape)
            updates = RNG.integers(0, 50, shape).astype(dtype)
            expected = x.copy()
            for at in np.ndindex(*shape):
                place = list(at)
                place[axis] = indices[at]
                old = expected[tuple(place)]
                expected[tuple(place)] = updates[at] if function is None else function(old, updates[at])
            check("scatter_elements", [x, indices, updates], expected, axis=axis, reduction=reduction)
        indices = RNG.integers(-5, 5, (4, 3, 2)).astype(np.int32)
        updates = RNG.integers(0, 50, (4, 3, 4)).astype(dtype)
        expected = x.copy()
        for at in np.ndindex(4, 3):
            place = tuple(indices[at])
            expected[place] = updates[at] if function is None else function(expected[place], updates[at])
        check("scatter_nd", [x, indices, updates], expected, reduction=reduction)


def test_indices_out_of_range_fail_the_run() -> None:
    x = values(3, 4)
    for bad in (3, -4, 2**40, -(2**62)):
        one = np.array([bad])
        pair = np.array([[0, bad * 2]])
        for op, inputs, shape, attrs in (
            ("gather", [x, one], (1, 4), {"axis": 0}),
            ("gather_elements", [x, one[None]], (1, 1), {"axis": 0}),
            ("gather_nd", [x, pair], (1,), {"batch_dims": 0}),
            ("scatter_elements", [x, one[None], x[:1, :1]], (3, 4), {"axis": 0, "reduction": "none"}),
            ("scatter_nd", [x, pair, x[0, :1]], (3, 4), {"reduction": "none"}),
        ):
            with raises(PenstockError, match="indices"):
                run(op, inputs, [(shape, np.float32)], **attrs)


def test_wrong_shapes_are_refused() -> None:
    x, indices = values(3, 4), np.zeros((2, 2), np.int64)
    for op, inputs, attrs in (
        ("gather", [x, indices.astype(np.float32)], {"axis": 0}),
        ("gather", [x, indices], {"axis": 2}),
        ("gather_elements", [x, np.zeros((4, 5), np.int64)], {"axis": 0}),
        ("gather_elements", [x, indices[0]], {"axis": 0}),
        ("gather_nd", [x, np.zeros((2, 3), np.int64)], {"batch_dims": 0}),
        ("gather_nd", [x, indices], {"batch_dims": 1}),
        ("scatter_elements", [x, indices, x], {"axis": 0, "reduction": "none"}),
        ("scatter_elements", [x, indices, x[:2, :2]], {"axis": 0, "reduction": "mean"}),
        ("scatter_nd", [x, indices, x], {"reduction": "none"}),
    ):
        with pytest.raises(PenstockError):
            run(op, inputs, [((2, 2), np.float32)], **attrs)
