"""Pools, resizing and group norm of general networks against torch and ONNX's reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import InvalidArgumentError
from tests.support.errors import raises
from tests.support.general_ops import check, run
from tests.support.general_weights import vector

F = torch.nn.functional
PLAIN: dict[str, Any] = {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "ceil": False}
POOLS: Any = (
    ((1, 6, 7, 5), (2, 2), {"strides": (2, 2)}),
    ((2, 9, 8, 20), (3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 9, 10, 3), (3, 2), {"strides": (2, 3), "ceil": True}),
    ((1, 7, 7, 300), (7, 7), {}),
    ((0, 4, 4, 2), (2, 2), {}),
    ((1, 10, 10, 17), (3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "ceil": True}),
)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def nchw(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, 3, 1)))


def nhwc(x: Any) -> Any:
    return np.ascontiguousarray(np.moveaxis(x.numpy(), 1, 3))


@pytest.mark.parametrize(("shape", "kernel", "attrs"), POOLS)
def test_pools_match_torch(shape: tuple[int, ...], kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    attrs = PLAIN | attrs
    x = numbers(*shape)
    places = (attrs["strides"], attrs["pads"][:2])
    expected = F.max_pool2d(nchw(x), kernel, *places, 1, attrs["ceil"])
    check("max_pool", [x], nhwc(expected), kernel=kernel, **attrs)
    for counts in (False, True):
        expected = F.avg_pool2d(nchw(x), kernel, *places, attrs["ceil"], counts)
        check("avg_pool", [x], nhwc(expected), kernel=kernel, count_pads=counts, relative=1e-6, absolute=1e-6, **attrs)


@pytest.mark.parametrize(("dtype", "expected"), [("int8", -127), ("uint8", 0)])
def test_a_window_in_the_pads_is_within_int8(dtype: str, expected: int) -> None:
    """It has no number, and convolutions of int8 take -127 to 127.  A window of -128 stays."""
    x = np.full((1, 1, 1, 5), 3, dtype)
    places = {"kernel": (2, 2), "dilations": (3, 3), "pads": (1, 1, 2, 2)}
    check("max_pool", [x], np.full((1, 1, 1, 5), expected, dtype), **PLAIN | places)
    least = np.full((1, 2, 2, 5), np.iinfo(dtype).min, dtype)
    check("max_pool", [least], least[:, :1, :1], **PLAIN | {"kernel": (2, 2)})


def test_max_pool_takes_dilations_bytes_and_nan() -> None:
    x = numbers(1, 9, 9, 4)
    expected = F.max_pool2d(nchw(x), 3, 1, 0, 2)
    check("max_pool", [x], nhwc(expected), kernel=(3, 3), **PLAIN | {"dilations": (2, 2)})
    for dtype in (np.uint8, np.int8):
        small = np.random.default_rng(0).integers(-128, 128, (1, 5, 6, 3)).astype(dtype)
        expected = nhwc(F.max_pool2d(nchw(small).float(), 2)).astype(dtype)
        check("max_pool", [small], expected, kernel=(2, 2), **PLAIN | {"strides": (2, 2)})
    x[0, 1, 1, 2] = np.nan
    expected = nhwc(F.max_pool2d(nchw(x), 3, 3))
    check("max_pool", [x], expected, kernel=(3, 3), **PLAIN | {"strides": (3, 3)})


def test_wrong_pools_are_refused_by_name() -> None:
    x = numbers(1, 3, 3, 2)
    for change, name in (({"kernel": (4, 4)}, "x"), ({"kernel": (2,)}, "kernel"), ({"strides": (0, 0)}, "strides")):
        with raises(InvalidArgumentError, match=f"max_pool: {name}"):
            run("max_pool", [x], [((1, 2, 2, 2), np.float32)], **PLAIN | {"kernel": (2, 2)} | change)


RESIZE: dict[str, Any] = {"scale_h": 0.0, "scale_w": 0.0, "mode": "nearest", "coordinates": "half_pixel",
          "rounding": "round_prefer_floor", "cubic_a": -0.75, "exclude_outside": False}  # fmt: skip


def test_resize_matches_the_reference_of_onnx() -> None:
    onnx = pytest.importorskip("onnx.reference.ops.op_resize")
    x = numbers(1, 5, 6, 3)
    for mode, coordinates, (height, width), outside in product(
        ("nearest", "linear", "cubic"),
        ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric"),
        ((10, 3), (7, 13), (1, 6)),
        (False, True),
    ):
        coefficients = {
            "nearest": lambda r, s: onnx._nearest_coeffs(r, "floor"), "linear": onnx._linear_coeffs,
            "cubic": lambda r, s: onnx._cubic_coeffs(r, s, -0.5),
        }[mode]  # fmt: skip
        expected = onnx._interpolate_nd(
            x, coefficients, output_size=[1, height, width, 3], exclude_outside=outside and mode == "cubic",
            coordinate_transformation_mode=coordinates,
        )  # fmt: skip
        attrs = {"mode": mode, "coordinates": coordinates, "rounding": "floor", "cubic_a": -0.5,
                 "exclude_outside": outside and mode == "cubic"}  # fmt: skip
        check("resize", [x], expected.astype(np.float32), sizes=(height, width), absolute=3e-6, relative=3e-6,
              **RESIZE | attrs)  # fmt: skip


def test_resize_matches_torch_and_takes_scales() -> None:
    x = numbers(2, 6, 5, 20)
    expected = F.interpolate(nchw(x), scale_factor=2, mode="nearest")
    attrs = RESIZE | {"coordinates": "asymmetric", "rounding": "floor"}
    check("resize", [x], nhwc(expected), sizes=(12, 10), **attrs)
    expected = F.interpolate(nchw(x), size=(9, 11), mode="bilinear")
    check("resize", [x], nhwc(expected), sizes=(9, 11), absolute=2e-6, **RESIZE | {"mode": "linear"})
    expected = F.interpolate(nchw(x), scale_factor=1.7, mode="bicubic", recompute_scale_factor=False)
    check("resize", [x], nhwc(expected), sizes=(10, 8), absolute=5e-6,
          **RESIZE | {"mode": "cubic", "scale_h": 1.7, "scale_w": 1.7})  # fmt: skip
    flags = np.arange(12, dtype=np.int64).reshape(1, 3, 2, 2)
    check("resize", [flags], flags.repeat(2, 1).repeat(2, 2), sizes=(6, 4), **RESIZE)
    for rounding in ("round_prefer_ceil", "ceil", "floor", "round_prefer_floor"):
        row = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
        places = (np.arange(6) + 0.5) * 4 / 6 - 0.5
        best = {"round_prefer_ceil": np.floor(places + 0.5), "ceil": np.ceil(places), "floor": np.floor(places),
                "round_prefer_floor": np.ceil(places - 0.5)}[rounding]  # fmt: skip
        expected_row = best.clip(0, 3).astype(np.float32).reshape(1, 6, 1, 1)
        check("resize", [row], expected_row, sizes=(6, 1), **RESIZE | {"rounding": rounding})


def test_resize_survives_scales_of_any_size() -> None:
    x = numbers(1, 4, 4, 2)
    for scale in (1e-300, 1e-9, 1e9):
        run("resize", [x], [((1, 3, 3, 2), np.float32)], sizes=(3, 3),
            **RESIZE | {"mode": "cubic", "scale_h": scale, "scale_w": scale})  # fmt: skip
    for change, name in (({"scale_h": -1.0}, "scale_h"), ({"sizes": (3,)}, "sizes")):
        with raises(InvalidArgumentError, param=name):
            run("resize", [x], [((1, 3, 3, 2), np.float32)], **{"sizes": (3, 3)} | RESIZE | change)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 5, 6, 12), 3), ((1, 20, 20, 40), 40), ((3, 200, 6), 1), ((1, 30, 30, 34), 17), ((0, 3, 4), 2)],
)
def test_group_norm_matches_torch(shape: tuple[int, ...], groups: int) -> None:
    x = numbers(*shape) * 2 + 3
    channels = shape[-1]
    weight, bias = numbers(channels, seed=1), numbers(channels, seed=2)
    theirs = torch.from_numpy(np.moveaxis(x, -1, 1).copy()).double()
    expected = F.group_norm(
        theirs, groups, torch.from_numpy(weight).double(), torch.from_numpy(bias).double(), 1e-5
    ).numpy()  # fmt: skip
    check("group_norm", [x, vector(weight), vector(bias)], np.moveaxis(expected, 1, -1).astype(np.float32),
          absolute=5e-6, relative=5e-6, groups=groups, eps=1e-5)  # fmt: skip
