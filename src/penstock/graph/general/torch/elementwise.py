"""Readers of elementwise ops, and of distances."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.shape_rules import normalise_axis
from penstock.graph.general.torch.writer import OPS, Writer, dtype_named, reader
from penstock.graph.ir import DType

_UNARY: Final = {
    "sigmoid": "sigmoid", "tanh": "tanh", "silu": "silu", "mish": "mish", "hardswish": "hard_swish",
    "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin",
    "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh",
    "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf", "reciprocal": "reciprocal",
}  # fmt: skip
_UNARY_ANY: Final = {
    "neg": "neg", "abs": "abs", "sign": "sign", "square": "square",
}  # fmt: skip
_COMPARISONS: Final = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_BINARY: Final = {
    "mul": "mul", "maximum": "max", "minimum": "min", "fmod": "fmod", "remainder": "mod",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "max.other": "max", "min.other": "min",
}  # fmt: skip
_LOGICAL: Final = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}


def _declare_tables() -> None:
    def unary(kind: str, floats: bool) -> Any:
        return lambda w, x: w.unary(kind, w.as_float(x) if floats else x)

    def rounding(kind: str) -> Any:
        return lambda w, x: w.unary(kind, x) if x.dtype == DType.F32 else x  # integers are whole

    def binary(kind: str) -> Any:
        return lambda w, a, b: w.binary(_logical(kind, a, b), a, b)

    def logical(kind: str) -> Any:
        return lambda w, a, b: w.binary(kind, w.cast(a, DType.BOOL), w.cast(b, DType.BOOL))

    for table, floats in ((_UNARY, True), (_UNARY_ANY, False)):
        for name, kind in table.items():
            for library in ("aten", "prims"):  # whose ops PyTorch's decompositions call
                OPS[f"{library}.{name}.default"] = unary(kind, floats)
    for kind in ("floor", "ceil", "round", "trunc"):
        for library in ("aten", "prims"):
            OPS[f"{library}.{kind}.default"] = rounding(kind)
    for name, kind in {**_BINARY, **_COMPARISONS}.items():
        for overload in (".Tensor", ".Scalar", ".default") if "." not in name else ("",):
            OPS[f"aten.{name}{overload}"] = binary(kind)
    for name, kind in _LOGICAL.items():
        OPS[f"aten.{name}.default"] = logical(kind)


def _logical(kind: str, a: Any, b: Any) -> str:
    """Return the kind for bool operands, whose bits are and, or and xor."""
    is_bool = all(isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == DType.BOOL) for x in (a, b))
    return kind.removeprefix("bitwise_") if is_bool else kind


_declare_tables()


@reader("add.Tensor", "add.Scalar")
def _add(w: Writer, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return w.binary("add", a, b if alpha == 1 else w.binary("mul", b, alpha))


@reader("sub.Tensor", "sub.Scalar")
def _sub(w: Writer, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return w.binary("sub", a, b if alpha == 1 else w.binary("mul", b, alpha))


@reader("rsub.Tensor", "rsub.Scalar")
def _rsub(w: Writer, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sub(w, b, a, alpha)


@reader("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _div(w: Writer, a: Any, b: Any) -> Tensor:
    return w.binary("div", a, b, at_least=DType.F32)


@reader("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(w: Writer, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return _div(w, a, b)
    x, y = w.pair(a, b)
    if x.dtype == DType.F32:
        if rounding_mode == "trunc":
            return w.unary("trunc", w.binary("div", x, y))
        return _floored(w, x, y)
    if rounding_mode == "floor":
        return w.binary("div", w.binary("sub", x, w.binary("mod", x, y)), y)
    return w.binary("div", x, y)


def _floored(w: Writer, x: Tensor, y: Tensor) -> Tensor:
    """Return x // y as PyTorch: 1.0 // 0.1 is 9, because 0.1 is a little more than a tenth."""
    rest = w.binary("fmod", x, y)
    quotient = w.binary("div", w.binary("sub", x, rest), y)
    is_below = w.binary(
        "and", w.binary("ne", rest, 0.0), w.binary("xor", w.binary("lt", y, 0.0), w.binary("lt", rest, 0.0))
    )
    whole = w.unary("round", w.add("where", is_below, w.binary("sub", quotient, 1.0), quotient))
    if y.value is not None and np.all(y.value):
        return whole
    return w.add("where", w.binary("eq", y, 0.0), w.binary("div", x, y), whole)


@reader("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(w: Writer, a: Any, b: Any) -> Tensor:
    return _div_mode(w, a, b, "floor")


@reader("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(w: Writer, a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and a.dtype == DType.F32 and isinstance(b, (int, float)):
        simple = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(b)
        if simple is not None:
            return w.unary(simple, a)
    return w.binary("pow", a, b)


@reader("atan2.default")
def _atan2(w: Writer, a: Tensor, b: Tensor) -> Tensor:
    return w.binary("atan2", a, b, at_least=DType.F32)


@reader("gelu.default")
def _gelu(w: Writer, x: Tensor, approximate: str = "none") -> Tensor:
    return w.unary("gelu" if approximate == "none" else "gelu_tanh", x)


@reader("hardtanh.default")
def _hardtanh(w: Writer, x: Tensor, min_val: Any = -1.0, max_val: Any = 1.0) -> Tensor:
    return _clamp(w, x, min_val, max_val)


@reader("clamp.default", "clamp.Tensor")
def _clamp(w: Writer, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    low, high = None if min == -math.inf else min, None if max == math.inf else max
    numbers = [value for value in (low, high) if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(numbers) == 2 and x.dtype == DType.F32:
        return w.unary("clip", x, *numbers)
    x = x if low is None else w.binary("max", x, low)
    return x if high is None else w.binary("min", x, high)


@reader("clamp_min.default")
def _clamp_min(w: Writer, x: Tensor, low: Any) -> Tensor:
    return _clamp(w, x, low)


@reader("clamp_max.default")
def _clamp_max(w: Writer, x: Tensor, high: Any) -> Tensor:
    return _clamp(w, x, None, high)


@reader("relu.default", "prims.relu.default")
def _relu(w: Writer, x: Tensor) -> Tensor:
    return w.unary("relu", x) if x.dtype == DType.F32 else w.binary("max", x, 0)


@reader("relu6.default")
def _relu6(w: Writer, x: Tensor) -> Tensor:
    return w.unary("clip", x, 0.0, 6.0)


@reader("leaky_relu.default")
def _leaky_relu(w: Writer, x: Tensor, slope: float = 0.01) -> Tensor:
    return w.unary("leaky_relu", x, slope)


@reader("elu.default")
def _elu(w: Writer, x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    if input_scale == 1.0:
        return w.unary("elu", x, alpha) if scale == 1.0 else w.unary("selu", x, alpha, scale)
    positive = w.unary("relu", x)
    negative = w.unary("expm1", w.binary("mul", w.binary("min", x, 0.0), float(input_scale)))
    total = w.binary("add", positive, w.binary("mul", negative, float(alpha)))
    return total if scale == 1.0 else w.binary("mul", total, float(scale))


@reader("selu.default")
def _selu(w: Writer, x: Tensor) -> Tensor:
    return w.unary("selu", x, 1.6732632423543772, 1.0507009873554805)


@reader("celu.default")
def _celu(w: Writer, x: Tensor, alpha: float = 1.0) -> Tensor:
    return w.unary("celu", x, alpha)


@reader("prelu.default", "_prelu_kernel.default")
def _prelu(w: Writer, x: Tensor, weight: Tensor) -> Tensor:
    if weight.rank == 1 and x.rank > 1:
        weight = w.reshape(weight, (weight.shape[0], *[1] * (x.rank - 2)))
    return w.binary("prelu", x, weight)


@reader("glu.default")
def _glu(w: Writer, x: Tensor, axis: int = -1) -> Tensor:
    size = x.shape[normalise_axis(axis, x.rank)]
    value, gate = w.sliced(x, axis, 0, size // 2), w.sliced(x, axis, size // 2, None)
    return w.binary("mul", value, w.unary("sigmoid", gate))


@reader("hardsigmoid.default")
def _hardsigmoid(w: Writer, x: Tensor) -> Tensor:
    return w.unary("hard_sigmoid", x, 1 / 6, 0.5)


@reader("softplus.default")
def _softplus(w: Writer, x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    if beta == 1.0 and threshold >= 15:
        return w.unary("softplus", x)
    scaled = w.binary("mul", x, float(beta))
    soft = w.binary("div", w.unary("softplus", scaled), float(beta))
    return w.add("where", w.binary("gt", scaled, float(threshold)), x, soft)


@reader("threshold.default")
def _threshold(w: Writer, x: Tensor, threshold: float, value: float) -> Tensor:
    return w.add("where", w.binary("le", x, threshold), w.constant(value, x.dtype), x)


@reader("log2.default")
def _log2(w: Writer, x: Tensor) -> Tensor:
    return w.binary("mul", w.unary("log", w.as_float(x)), 1 / math.log(2))


@reader("log10.default")
def _log10(w: Writer, x: Tensor) -> Tensor:
    return w.binary("mul", w.unary("log", w.as_float(x)), 1 / math.log(10))


@reader("logical_not.default")
def _logical_not(w: Writer, x: Tensor) -> Tensor:
    return w.unary("not", w.cast(x, DType.BOOL))


@reader("bitwise_not.default")
def _bitwise_not(w: Writer, x: Tensor) -> Tensor:
    if x.dtype == DType.BOOL:
        return w.unary("not", x)
    return w.binary("sub", -1, x)


@reader("isnan.default")
def _isnan(w: Writer, x: Tensor) -> Tensor:
    return w.unary("is_nan", w.as_float(x))


@reader("isinf.default")
def _isinf(w: Writer, x: Tensor) -> Tensor:
    return w.unary("is_inf", w.as_float(x), 1.0, 1.0)


@reader("where.self", "where.ScalarOther", "where.ScalarSelf", "prims.where.default")
def _where(w: Writer, condition: Tensor, a: Any, b: Any) -> Tensor:
    return w.add("where", w.cast(condition, DType.BOOL), *w.pair(a, b))


@reader("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(w: Writer, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    filled = w.cast(value, x.dtype) if isinstance(value, Tensor) else w.constant(value, x.dtype)
    return w.add("where", mask, filled, x)


@reader("_cdist_forward.default", "cdist.default")
def _cdist(w: Writer, a: Tensor, b: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    """Return the distances of the rows of two matrices, [..., P, M] and [..., R, M], without PyTorch's shortcut."""
    kinds = {1.0: "l1", 2.0: "l2", math.inf: "max"}
    if p not in kinds:
        raise UnsupportedError(f"{w.name}: cdist: expected p 1, 2 or inf, got {p}")
    apart = w.binary("sub", w.unsqueeze(a, -2), w.unsqueeze(b, -3))
    return w.add("reduce", w.unary("abs", apart), kind=kinds[p], axes=(apart.rank - 1,), keep=False)


@reader("type_as.default")
def _type_as(w: Writer, x: Tensor, other: Tensor) -> Tensor:
    return w.cast(x, other.dtype)


@reader("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "to.other",
        "prims.convert_element_type.default")  # fmt: skip
def _to(w: Writer, x: Tensor, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
    dtype = next((a for a in args if str(a).startswith("torch.") and str(a) not in ("torch.strided",)), dtype)
    return x if dtype is None else w.cast(x, dtype_named(dtype))


@reader("clone.default", "contiguous.default", "detach.default", "alias.default",
        "lift_fresh_copy.default")  # fmt: skip
def _identity(w: Writer, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x


@reader("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(w: Writer, x: Tensor, p: float = 0.5, train: bool = False) -> Tensor:
    if train and p:
        raise UnsupportedError(f"{w.name}: dropout: expected training=False, got one that draws random numbers")
    return x
