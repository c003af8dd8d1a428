"""Ops of general networks that move elements: permute, slice, expand, concat, pad and others, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import PenstockError
from tests.support.general_ops import check, run

DTYPES = [np.float32, np.int64, np.uint8, np.float16]


def values(*shape: int, dtype: Any = np.float32) -> Any:
    return (np.arange(np.prod(shape, dtype=int)) % 251).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_permute(dtype: Any) -> None:
    for shape, order in (
        ((2, 3, 37, 41), (0, 2, 3, 1)),
        ((2, 37, 41, 3), (0, 3, 1, 2)),
        ((1, 67, 130), (0, 2, 1)),
        ((3, 5, 4, 16), (0, 2, 1, 3)),
        ((5, 4, 3, 2, 6, 3), (5, 3, 1, 0, 2, 4)),
        ((130, 67), (-1, -2)),
        ((4, 5), (0, 1)),
        ((7,), (0,)),
        ((), ()),
        ((0, 3, 2), (2, 1, 0)),
        ((20, 2000, 2), (1, 0, 2)),
    ):
        x = values(*shape, dtype=dtype)
        check("permute", [x], x.transpose(order), order=order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slice(dtype: Any) -> None:
    x = values(7, 70, 30, dtype=dtype)
    for begins, ends, steps in (
        ((0, 0, 0), (7, 70, 30), (1, 1, 1)),
        ((2, 0, 0), (5, 70, 30), (1, 1, 1)),
        ((0, 3, 1), (7, 60, 30), (2, 1, 3)),
        ((6, 69, 29), (-1, -1, -1), (-1, -2, -1)),
        ((1, 5, 29), (4, 5, -1), (1, 1, -29)),
        ((0, 0, 7), (7, 70, 8), (1, 1, 1)),
    ):
        index = tuple(slice(b, None if s < 0 and e < 0 else e, s) for b, e, s in zip(begins, ends, steps, strict=True))
        check("slice", [x], x[index], begins=begins, ends=ends, steps=steps)
    check("slice", [np.asarray(x[0, 0, 0])], np.asarray(x[0, 0, 0]), begins=(), ends=(), steps=())


@pytest.mark.parametrize("dtype", DTYPES)
def test_expand_and_reshape(dtype: Any) -> None:
    for shape, sizes in (
        ((3, 1), (2, 3, 4)),
        ((1, 1, 5), (2000, 3, 5)),
        ((), (3, 2)),
        ((4,), (4,)),
        ((2, 1, 3, 1), (2, 1500, 3, 4)),
        ((3, 1), (3, 0)),
        ((5, 3), (1, 1)),
    ):
        x = values(*shape, dtype=dtype)
        target = np.broadcast_shapes(shape, sizes)
        check("expand", [x], np.broadcast_to(x, target), sizes=sizes)
    x = values(30, 500, dtype=dtype)
    check("reshape", [x], x.reshape(3, 10, 250, 2), sizes=(3, 10, 250, 2))
    check("reshape", [x[:1, :1]], x[:1, :1].reshape(()), sizes=())


@pytest.mark.parametrize("dtype", DTYPES)
def test_concat_and_trilu(dtype: Any) -> None:
    for axis, sizes in ((1, (3, 0, 500)), (0, (2, 1)), (-1, (1, 1, 1, 1, 1, 1, 1, 1)), (2, (3000, 5))):
        parts = []
        for size in sizes:
            shape = [4, 3, 5]
            shape[axis] = size
            parts.append(values(*shape, dtype=dtype))
        inputs = parts + [None] * (8 - len(parts))
        check("concat", inputs, np.concatenate(parts, axis), axis=axis)
    x = values(2, 5, 7, dtype=dtype) + dtype(1)
    for k in (-9, -2, 0, 1, 3, 12):
        check("trilu", [x], np.triu(x, k), diagonal=[k], upper=True)
        check("trilu", [x], np.tril(x, k), diagonal=[k], upper=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pad(dtype: Any) -> None:
    x = values(2, 5, 6, 3, dtype=dtype)
    for pads in ((0, 1, 2, 0, 0, 2, 1, 0), (1, 0, 0, 2, 0, 0, 3, 1), (0,) * 8, (0, 4, 5, 2, 0, 4, 5, 2)):
        pairs = list(zip(pads[:4], pads[4:], strict=True))
        check("pad", [x], np.pad(x, pairs, constant_values=dtype(3)), pads=pads, mode="constant", value=3.0)
        for mode in ("edge", "reflect", "wrap"):
            check("pad", [x], np.pad(x, pairs, mode=mode), pads=pads, mode=mode, value=0.0)
    check("pad", [x], x[:, 1:, :-2], pads=(0, -1, 0, 0, 0, 0, -2, 0), mode="constant", value=0.0)
    check("pad", [np.asarray(dtype(4))], np.asarray(dtype(4)), pads=(), mode="constant", value=0.0)


def test_fill_iota_and_sizes() -> None:
    for name, dtype in (("f32", np.float32), ("i64", np.int64), ("bool", np.bool_), ("f16", np.float16)):
        check("fill", [], np.full((3, 2000), 1, dtype), sizes=(3, 2000), dtype=name, value=1.0)
    check("fill", [], np.float32(2.5), sizes=(), dtype="f32", value=2.5)
    check("iota", [], np.arange(5000) * -3 + 7, range=(7, -3, 5000))
    check("iota", [], np.arange(0), range=(7, -3, 0))
    check("sizes", [], np.array([3, -1, 9]), values="3,-1,4+5")
    check("sizes", [], np.zeros(0, np.int64), values=())


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("permute", {"order": (0, 0)}),
        ("permute", {"order": (0,)}),
        ("permute", {"order": (0, 2)}),
        ("reshape", {"sizes": (5,)}),
        ("reshape", {"sizes": (-1, 3)}),
        ("reshape", {"sizes": (1,) * 7}),
        ("slice", {"begins": (0, 0), "ends": (3, 3), "steps": (1, 1)}),
        ("slice", {"begins": (-1, 0), "ends": (2, 3), "steps": (1, 1)}),
        ("slice", {"begins": (0, 0), "ends": (2, 3), "steps": (1, 0)}),
        ("slice", {"begins": (0, 2), "ends": (2, -2), "steps": (1, -1)}),
        ("slice", {"begins": (0, 0), "ends": (2, 4611686018427387904), "steps": (1, 1)}),
        ("expand", {"sizes": (2, 4)}),
        ("expand", {"sizes": (4294967296, 4294967296, 2, 3)}),
        ("trilu", {"diagonal": (1, 2), "upper": True}),
        ("pad", {"pads": (0, 0, 1), "mode": "edge", "value": 0.0}),
        ("pad", {"pads": (0, -2, 0, -2), "mode": "edge", "value": 0.0}),
        ("pad", {"pads": (0, 0, 0, 0), "mode": "circle", "value": 0.0}),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(PenstockError):
        run(op, [values(2, 3)], [((2, 3), np.float32)], **attrs)


def test_wrong_inputs_of_concat_are_refused() -> None:
    for other, axis in ((values(2, 4), 0), (values(2, 3, dtype=np.int64), 0), (values(2, 3), 2), (values(2), 0)):
        with pytest.raises(PenstockError):
            run("concat", [values(2, 3), other, *[None] * 6], [((4, 3), np.float32)], axis=axis)
