"""Convolutions of int8 and conversions against integers that numpy and torch compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core import layouts
from penstock.core.native import CoreTensor
from penstock.core.weights import layout_bytes
from penstock.errors import InvalidArgumentError
from tests.support.errors import raises
from tests.support.general_ops import contexts, run
from tests.support.general_weights import packed, pad_rows, vector

F = torch.nn.functional
Array = Any
PLAIN: dict[str, Any] = {
    "strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "groups": 1, "act": "none", "alpha": 0.0, "beta": 0.0,
    "x_scale": 0.03, "residual_scale": 0.02, "y_scale": 0.05,
}  # fmt: skip
TYPES: Any = {"i8": (np.int8, -127), "u8": (np.uint8, 0)}


def integers(dtype: str, *shape: int, seed: int = 0) -> Array:
    kind, least = TYPES[dtype]
    return np.random.default_rng(seed + sum(shape)).integers(least, 128, shape).astype(kind)


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def int8_rows(matrix: Array) -> tuple[CoreTensor, Array, Array]:
    """Return a weight in t16_i8, and its integers and scales."""
    own = packed(layouts.T16_I8, matrix)
    rows, cols = matrix.shape
    memory = np.zeros(layout_bytes(layouts.T16_I8, rows, cols), np.uint8)
    contexts()[1].pack(layouts.T16_I8, rows, cols, 0, rows, layouts.F32, np.ascontiguousarray(matrix), memory)
    found = contexts()[1].unpack_quantized(layouts.T16_I8, rows, cols, 0, rows, memory)
    return own, found.q, found.scales


def sums(x: Array, weight: Array, groups: int, attrs: dict[str, Any]) -> Array:
    """Convolve in float64, which is exact for integers: x [N, H, W, C], weight [out, kh, kw, channels of a group]."""
    pads = attrs["pads"]
    image = torch.from_numpy(np.moveaxis(x.astype(np.float64), 3, 1).copy())
    kernel = torch.from_numpy(np.moveaxis(weight.astype(np.float64), 3, 1).copy())
    padded = F.pad(image, (pads[1], pads[3], pads[0], pads[2]))
    y = F.conv2d(padded, kernel, None, attrs["strides"], 0, attrs["dilations"], groups)
    return np.moveaxis(y.numpy(), 1, 3)


def rounded(values: Array, scale: float, dtype: str) -> Array:
    kind, least = TYPES[dtype]
    inverse = np.float32(1) / np.float32(scale)
    return np.rint(np.clip(values.astype(np.float32) * inverse, least, 127)).astype(kind)


# image (N, H, W, C), outputs, kernel, attributes
CONVS: Any = (
    ((1, 5, 7, 4), 8, (1, 1), {}),
    ((2, 9, 8, 8), 17, (3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 13, 12, 12), 33, (5, 5), {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
    ((1, 8, 9, 16), 70, (3, 3), {"pads": (0, 1, 2, 0), "strides": (2, 1)}),
    ((1, 20, 21, 4), 5, (3, 2), {"dilations": (3, 2), "pads": (3, 1, 2, 1)}),
    ((1, 6, 6, 16), 20, (3, 3), {"groups": 4, "pads": (1, 1, 1, 1)}),
    ((0, 5, 5, 4), 4, (3, 3), {}),
)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("shape", "out", "kernel", "attrs"), CONVS)
def test_sums_are_exact(
    shape: tuple[int, ...], out: int, kernel: tuple[int, int], attrs: dict[str, Any], dtype: str
) -> None:
    attrs = PLAIN | attrs
    groups = attrs["groups"]
    x, weight = integers(dtype, *shape), floats(out, kernel[0] * kernel[1] * shape[3] // groups)
    own, q, scales = int8_rows(weight if groups == 1 else pad_rows(weight, out // groups))
    q, scales = (a.reshape(groups, len(a) // groups, -1)[:, : out // groups] for a in (q, scales))
    exact = sums(x, q.reshape(out, *kernel, -1), groups, attrs)
    scale = scales.reshape(-1) * np.float32(attrs["x_scale"])
    expected = (exact.astype(np.float32).astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
    full = {"out_channels": out, "kernel": kernel, **attrs}
    (y,) = run("conv_int8", [x, own, None, None], [(expected.shape, np.float32)], **full, dtype="f32")
    assert y.tobytes() == expected.tobytes()
    small = float(np.abs(expected).max(initial=1)) / 100  # some are clipped
    for kind in TYPES:
        outputs = [(expected.shape, TYPES[kind][0])]
        (y,) = run("conv_int8", [x, own, None, None], outputs, **full | {"y_scale": small}, dtype=kind)
        assert y.tobytes() == rounded(expected, small, kind).tobytes()


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("channels", "half"), [(4, False), (8, False), (8, True)])
def test_sums_of_the_least_weights_are_exact(dtype: str, channels: int, half: bool) -> None:
    """Rounding never gives a weight of -128, but a file may have one.

    AVX2 takes 8 channels at once if the magnitudes of each four weights add up to at most 258, as where ``half`` of
    them are zeros.
    """
    q = np.random.default_rng(1).choice(np.array([-128, -127, 127, 0], np.int8), (16, 9 * channels))
    if half:
        q[:, 1::2] = 0
    rows, cols = q.shape
    tile = np.zeros(layout_bytes(layouts.T16_I8, rows, cols), np.uint8)
    tile[:64] = np.linspace(0.01, 0.1, rows, dtype=np.float32).view(np.uint8)
    tile[64 : 64 + q.size] = q.reshape(rows, -1, 4).transpose(1, 0, 2).reshape(-1).view(np.uint8)
    own = CoreTensor(tile.ctypes.data, 0, (rows, cols), cols, layouts.T16_I8)
    x = np.random.default_rng(2).choice(np.array([TYPES[dtype][1], 127, 1]), (1, 6, 6, channels))
    x = x.astype(TYPES[dtype][0])
    exact = sums(x, q.reshape(16, 3, 3, channels), 1, PLAIN).astype(np.float32)
    full = PLAIN | {"out_channels": 16, "kernel": (3, 3)}
    (y,) = run("conv_int8", [x, own, None, None], [(exact.shape, np.float32)], **full, dtype="f32")
    scale = tile[:64].view(np.float32) * np.float32(PLAIN["x_scale"])
    assert y.tobytes() == (exact.astype(np.float64) * scale).astype(np.float32).tobytes()


def parts(groups: int, dtype: str) -> tuple[list[Any], Array]:
    """Return the operands of a convolution of 24 channels, and its values before the residual."""
    x, bias = integers(dtype, 2, 7, 6, 24), floats(24, seed=2)
    attrs = PLAIN | {"pads": (1, 1, 1, 1)}
    if groups == 1:
        own, q, scales = int8_rows(floats(24, 9 * 24))
        exact = sums(x, q.reshape(24, 3, 3, 24), 1, attrs).astype(np.float32)
        scale = scales.reshape(-1) * np.float32(PLAIN["x_scale"])
    else:
        rows = floats(24, 9)
        own = packed(layouts.ROWS_F32, np.ascontiguousarray(rows.T))
        exact = sums(x, rows.reshape(24, 3, 3, 1), 24, attrs)
        scale = np.float32(PLAIN["x_scale"])
    return [x, own, vector(bias)], exact.astype(np.float64) * np.float64(scale) + bias


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize(
    ("act", "alpha", "beta", "function"),
    [
        ("relu", 0.0, 0.0, lambda x: np.maximum(x, 0)),
        ("clip", 0.0, 6.0, lambda x: np.clip(x, 0, 6)),
        ("hard_swish", 0.0, 0.0, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    ],
)
def test_bias_residual_and_activation_come_before_the_rounding(
    groups: int, dtype: str, act: str, alpha: float, beta: float, function: Any
) -> None:
    operands, values = parts(groups, dtype)
    attrs = PLAIN | {"out_channels": 24, "kernel": (3, 3), "pads": (1, 1, 1, 1), "groups": groups, "act": act,
                     "alpha": alpha, "beta": beta}  # fmt: skip
    shape = values.shape
    residuals = (None, floats(*shape, seed=3), integers("i8", *shape, seed=4), integers("u8", *shape, seed=5))
    for residual in residuals:
        total = values
        if residual is not None:
            total = values + residual * (1.0 if residual.dtype == np.float32 else np.float32(attrs["residual_scale"]))
        expected = function(total)
        (y,) = run("conv_int8", [*operands, residual], [(shape, np.float32)], **attrs, dtype="f32")
        np.testing.assert_allclose(y, expected, 2e-6, 2e-5)
        for kind in TYPES:
            (q,) = run("conv_int8", [*operands, residual], [(shape, TYPES[kind][0])], **attrs, dtype=kind)
            assert q.tobytes() == rounded(y, attrs["y_scale"], kind).tobytes()


# image (N, H, W, C), kernel, attributes
DEPTHWISE: Any = (
    ((2, 7, 6, 24), (3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 19, 5, 40), (3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}),  # two bands of rows
    ((1, 3, 259, 3), (2, 5), {"pads": (0, 3, 1, 2)}),  # strips of columns
    ((1, 23, 18, 16), (3, 3), {"dilations": (4, 3), "pads": (5, 2, 4, 6)}),
    ((1, 30, 20, 17), (2, 1), {"strides": (5, 3)}),  # rows that no window reads
    ((1, 1, 2, 16), (3, 3), {"pads": (4, 4, 5, 5)}),  # windows of pads only
)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("shape", "kernel", "attrs"), DEPTHWISE)
def test_depthwise_windows_add_exact_products(
    shape: tuple[int, ...], kernel: tuple[int, int], attrs: dict[str, Any], dtype: str
) -> None:
    attrs, channels = PLAIN | {"x_scale": 0.5, "groups": shape[3]} | attrs, shape[3]
    x = integers(dtype, *shape)
    rows = np.random.default_rng(7).integers(-64, 65, (channels, kernel[0] * kernel[1])).astype(np.float32) / 64
    own = packed(layouts.ROWS_F32, np.ascontiguousarray(rows.T))
    expected = (sums(x, rows.reshape(channels, *kernel, 1), channels, attrs) / 2).astype(np.float32)
    full = {"out_channels": channels, "kernel": kernel, **attrs}
    (y,) = run("conv_int8", [x, own, None, None], [(expected.shape, np.float32)], **full, dtype="f32")
    assert y.tobytes() == expected.tobytes()
    for kind in TYPES:
        (q,) = run("conv_int8", [x, own, None, None], [(expected.shape, TYPES[kind][0])], **full, dtype=kind)
        assert q.tobytes() == rounded(expected, attrs["y_scale"], kind).tobytes()


@pytest.mark.parametrize("kind", ["i8", "u8"])
@pytest.mark.parametrize(
    ("alpha", "beta"),
    [(0.0, 6.0), (0.3, 6.35), (-2.0, 1.0), (-100.0, 7.0), (9.0, 8.0), (-3.4028235e38, 3.4028235e38)],
)
def test_clips_are_those_of_values(alpha: float, beta: float, kind: str) -> None:
    """A clip whose maximum is at least that of the integers becomes their minimum."""
    operands, values = parts(1, "i8")
    attrs = PLAIN | {"out_channels": 24, "kernel": (3, 3), "pads": (1, 1, 1, 1)}
    (y,) = run("conv_int8", [*operands, None], [(values.shape, np.float32)], **attrs, dtype="f32")
    clipped = np.minimum(np.maximum(y, np.float32(alpha)), np.float32(beta))
    attrs |= {"act": "clip", "alpha": alpha, "beta": beta}
    for scale in (0.05, 1e-37):
        (q,) = run("conv_int8", [*operands, None], [(values.shape, TYPES[kind][0])], **attrs | {"y_scale": scale},
                   dtype=kind)  # fmt: skip
        with np.errstate(over="ignore"):
            assert q.tobytes() == rounded(clipped, scale, kind).tobytes()


def test_conversions_round_half_to_even_and_clip() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 500, -500, np.inf, -np.inf, np.nan, 0, 3], np.float32)
    expected = [0, 2, 2, 0, -2, 126, 127, 127, -127, 127, -127, 127, 0, 3]
    (y,) = run("requantize", [x], [(x.shape, np.int8)], x_scale=0.0, y_scale=1.0, dtype="i8")
    assert y.tolist() == expected
    (y,) = run("requantize", [x], [(x.shape, np.uint8)], x_scale=0.0, y_scale=1.0, dtype="u8")
    assert y.tolist() == [max(0, number) for number in expected]
    q = integers("i8", 3, 5001)
    (y,) = run("requantize", [q], [(q.shape, np.float32)], x_scale=0.3, y_scale=0.0, dtype="f32")
    assert y.tobytes() == (q.astype(np.float32) * np.float32(0.3)).tobytes()
    (again,) = run("requantize", [q], [(q.shape, np.int8)], x_scale=0.3, y_scale=0.7, dtype="i8")
    assert again.tobytes() == rounded(y, 0.7, "i8").tobytes()


def test_wrong_operands_are_refused_by_name() -> None:
    own, _, _ = int8_rows(floats(8, 36))
    attrs = PLAIN | {"out_channels": 8, "kernel": (3, 3), "dtype": "i8"}
    x = integers("i8", 1, 5, 5, 4)
    cases: Any = (
        ({"x_scale": 0.0}, x, "x_scale"), ({"y_scale": -1.0}, x, "y_scale"), ({"dtype": "i32"}, x, "dtype"),
        ({}, floats(1, 5, 5, 4), "x"), ({}, integers("i8", 1, 5, 5, 3), "weight"),
    )  # fmt: skip
    for change, image, name in cases:
        with raises(InvalidArgumentError, match=f"conv_int8: {name}"):
            run("conv_int8", [image, own, None, None], [((1, 3, 3, 8), np.int8)], **attrs | change)
    odd, _, _ = int8_rows(floats(8, 27))
    with raises(InvalidArgumentError, match="conv_int8: x: expected a multiple of 4"):
        run("conv_int8", [integers("i8", 1, 5, 5, 3), odd, None, None], [((1, 3, 3, 8), np.int8)], **attrs)
    with raises(InvalidArgumentError, match="requantize: dtype"):
        run("requantize", [floats(3)], [((3,), np.float32)], x_scale=1.0, y_scale=1.0, dtype="f32")
