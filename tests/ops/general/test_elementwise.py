"""unary, binary, where and cast of general networks against torch and numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core import native
from penstock.errors import InvalidArgumentError, PenstockError
from tests.support.general_ops import BF16, check, contexts, core_tensor, run

F = torch.nn.functional
NO_BOUND = 3.4028234663852886e38
ZERO = {"alpha": 0.0, "beta": 0.0}

UNARY: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "relu": (torch.relu, {}),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), {"alpha": 0.1}),
    "elu": (lambda x: F.elu(x, 1.5), {"alpha": 1.5}),
    "selu": (torch.selu, {"alpha": 1.6732632423543772, "beta": 1.0507009873554805}),
    "celu": (lambda x: F.celu(x, 0.7), {"alpha": 0.7}),
    "sigmoid": (torch.sigmoid, {}),
    "hard_sigmoid": (F.hardsigmoid, {"alpha": 1 / 6, "beta": 0.5}),
    "hard_swish": (F.hardswish, {}),
    "silu": (F.silu, {}),
    "mish": (F.mish, {}),
    "tanh": (torch.tanh, {}),
    "gelu": (F.gelu, {}),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), {}),
    "softplus": (F.softplus, {}),
    "softsign": (F.softsign, {}),
    "thresholded_relu": (lambda x: F.threshold(x, 0.8, 0.0), {"alpha": 0.8}),
    "clip": (lambda x: torch.clamp(x, -1.5, 2.0), {"alpha": -1.5, "beta": 2.0}),
} | {
    name: (getattr(torch, name), {})
    for name in (
        *("erf", "exp", "log", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "floor", "ceil", "round", "trunc", "sign"),
        *("square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "log1p"),
        "expm1",
    )
}


def numbers(*shape: int, seed: int = 0, scale: float = 3) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("kind", UNARY)
def test_unary_matches_torch(kind: str) -> None:
    function, attrs = UNARY[kind]
    special = np.float32([0, -0.0, 0.5, -0.5, 1.5, 2.5, 1, -1, 1e-6, -1e-6, 1e-30, 88, -88, 20, -20, 1e5, 3e7, np.nan])
    for x in (numbers(5003), numbers(7, 3, scale=0.3), special, numbers(0, 4), np.float32(0.25)):
        array = np.asarray(x)
        if kind == "thresholded_relu":
            array = np.asarray(np.nan_to_num(array))
        expected = function(torch.from_numpy(array.copy()).double()).float().numpy()
        check("unary", [array], expected, kind=kind, relative=2e-6, absolute=1e-6, **(ZERO | attrs))


def test_unary_tests_and_infinite_values() -> None:
    x = np.float32([1, np.nan, np.inf, -np.inf, 0])
    check("unary", [x], np.isnan(x), kind="is_nan", **ZERO)
    check("unary", [x], np.isinf(x), kind="is_inf", alpha=1.0, beta=1.0)
    check("unary", [x], np.isposinf(x), kind="is_inf", alpha=0.0, beta=1.0)
    check("unary", [x > 0], ~(x > 0), kind="not", **ZERO)
    check("unary", [x], np.maximum(x, 0), kind="clip", alpha=0.0, beta=NO_BOUND)
    check("unary", [x], np.exp(x), kind="exp", relative=1e-6, **ZERO)
    with np.errstate(all="ignore"):
        check("unary", [x], np.log(x), kind="log", **ZERO)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_integers(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-100 if dtype != np.uint8 else 0, 100, (3, 700)).astype(dtype)
    b = rng.integers(1, 7, (3, 1)).astype(dtype)
    for kind, function in {"neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square}.items():
        check("unary", [a], function(a), kind=kind, **ZERO)
    check("unary", [a], np.clip(a, 3, 9), kind="clip", alpha=3.0, beta=9.0)
    pairs = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mod": np.mod, "fmod": np.fmod, "min": np.minimum,
             "max": np.maximum, "pow": np.power, "bitwise_and": np.bitwise_and, "bitwise_xor": np.bitwise_xor,
             "eq": np.equal, "lt": np.less, "ge": np.greater_equal}  # fmt: skip
    for kind, function in pairs.items():
        check("binary", [a, b], function(a, b), kind=kind)
    check("binary", [a, b], np.trunc(a / b).astype(dtype), kind="div")
    zero = np.zeros_like(b)
    for kind in ("div", "mod", "fmod"):
        check("binary", [a, zero], np.zeros_like(a), kind=kind)
    lowest = np.array([np.iinfo(dtype).min], dtype)
    run("binary", [lowest, np.array([-1]).astype(dtype)], [((1,), dtype)], kind="div")


BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "min": torch.minimum,
    "max": torch.maximum, "pow": torch.pow, "mod": torch.remainder, "fmod": torch.fmod, "atan2": torch.atan2,
    "prelu": lambda a, b: torch.where(a < 0, a * b, a), "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


@pytest.mark.parametrize("kind", BINARY)
def test_binary_matches_torch(kind: str) -> None:
    a, b = numbers(2, 3, 300), numbers(2, 3, 300, seed=2)
    a[0, 0, :4] = [np.nan, np.inf, -0.0, 2]
    b[0, 0, :5] = [1, 2, 3, 4, np.nan]
    tolerance = {"relative": 2e-6, "absolute": 1e-6} if kind in ("pow", "atan2", "mod") else {}
    for left, right in ((a, b), (a, b[:1, :1, :1]), (a[:1, :1, 5:6].copy(), b), (a, b[:1, 1:2])):
        x, y = torch.from_numpy(left).double(), torch.from_numpy(right).double()
        expected = BINARY[kind](x, y).numpy()
        if kind in ("mod", "fmod"):
            expected = BINARY[kind](torch.from_numpy(left), torch.from_numpy(right)).numpy()
        expected = expected if expected.dtype == bool else expected.astype(np.float32)
        check("binary", [left, right], expected, kind=kind, **tolerance)


SHAPES = [
    ((4, 1, 5), (3, 1)), ((2, 50, 60, 24), (2, 1, 1, 24)), ((2, 8, 30, 30), (8, 1, 1)), ((7, 1300), (1300,)),
    ((2, 3, 4, 5, 6, 7), (4, 1, 6, 1)), ((1300, 7), (1300, 1)), ((1, 1), ()), ((), ()), ((3, 0, 2), (1, 1, 2)),
    ((2, 5, 2100), (5, 1)), ((3, 2000, 2), (3, 1, 2)), ((1, 5, 1, 600), (4, 1, 7, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_operands_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = numbers(*left), numbers(*right, seed=3)
    check("binary", [a, b], a - b, kind="sub")
    check("binary", [b, a], b - a, kind="sub")
    check("binary", [a, b], a < b, kind="lt")
    mask = numbers(*right, seed=4) > 0
    check("where", [mask, a, b], np.where(mask, a, b))
    wide, half = (a * 9).astype(np.int64), b.astype(np.int8)
    check("where", [mask, wide, half.astype(np.int64)], np.where(mask, wide, half.astype(np.int64)))
    check("where", [a > 0, half, half[..., :1]] if right else [a > 0, half, half],
          np.where(a > 0, half, half[..., :1] if right else half))  # fmt: skip


def test_logic_and_shifts() -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    check("binary", [a, b], a & b, kind="and")
    check("binary", [a, b], a | b, kind="or")
    check("binary", [a, b], a ^ b, kind="xor")
    x, y = np.uint8([1, 16, 255, 3]), np.uint8([1, 2, 7, 9])
    check("binary", [x, y], np.uint8([2, 64, 128, 0]), kind="shift_left")
    check("binary", [x, y], np.uint8([0, 4, 1, 0]), kind="shift_right")


def test_cast_between_all_types() -> None:
    x = numbers(2049, scale=90)
    names = {"f16": np.float16, "i8": np.int8, "i32": np.int32, "u8": np.uint8, "i64": np.int64, "bool": np.bool_}
    for name, dtype in names.items():
        source = x if name != "u8" else np.abs(x)
        low, high = (-np.inf, np.inf) if name not in ("i8", "u8") else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        check("cast", [source], np.clip(source, low, high).astype(dtype), dtype=name)
        back = source.clip(low, high).astype(dtype)
        check("cast", [back], back.astype(np.float32), dtype="f32")
        check("cast", [back], back.astype(np.int64), dtype="i64")
    huge = np.float32([1e30, -1e30, np.nan, np.inf])
    check("cast", [huge], np.int64([2**63 - 1, -(2**63), 0, 2**63 - 1]), dtype="i64")
    check("cast", [huge], np.int32([2**31 - 1, -(2**31), 0, 2**31 - 1]), dtype="i32")
    check("cast", [huge], np.uint8([255, 0, 0, 255]), dtype="u8")
    rounded = np.empty(x.shape, np.uint16)
    native.run_op(contexts()[1], "cast", [core_tensor(x), core_tensor(rounded, BF16)], {"dtype": "bf16"})
    assert (rounded == torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)).all()


def test_wrong_operands_are_refused() -> None:
    a, b = numbers(2, 3), numbers(4, 3)
    for op, inputs, attrs in (
        ("binary", [a, b], {"kind": "add"}),
        ("binary", [a, a.astype(np.int32)], {"kind": "add"}),
        ("binary", [a, a], {"kind": "xor"}),
        ("binary", [a, a], {"kind": "hypot"}),
        ("unary", [a], {"kind": "relu9", **ZERO}),
        ("unary", [a], {"kind": "not", **ZERO}),
        ("unary", [a.astype(np.int32)], {"kind": "exp", **ZERO}),
        ("where", [a, a, a], {}),
        ("cast", [a], {"dtype": "f64"}),
    ):
        with pytest.raises(PenstockError):
            run(op, inputs, [((2, 3), np.float32)], **attrs)
    with pytest.raises(InvalidArgumentError):
        run("binary", [a, a], [((3, 2), np.float32)], kind="add")
