"""Elementwise ops: arithmetic, comparisons, activations and casts."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.graph.general.draft import Tensor
from penstock.graph.ir import DType
from penstock.graph.onnx.context import ELEMENT_TYPES, FLOATS_AS_F32, Site
from penstock.graph.onnx.load import element_name
from penstock.graph.onnx.registry import READERS, reads

__all__: list[str] = []

_LARGEST: Final = float(np.finfo(np.float32).max)
_PLAIN: Final = {
    "Sigmoid": "sigmoid", "Tanh": "tanh", "Softplus": "softplus", "Softsign": "softsign", "Erf": "erf", "Exp": "exp",
    "Log": "log", "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Neg": "neg", "Abs": "abs", "Floor": "floor",
    "Ceil": "ceil", "Round": "round", "Sign": "sign", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin",
    "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh",
    "Atanh": "atanh", "HardSwish": "hard_swish", "Mish": "mish", "Not": "not",
}  # fmt: skip
_BINARY: Final = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge",
    "Less": "lt", "LessOrEqual": "le", "And": "and", "Or": "or", "Xor": "xor", "PRelu": "prelu",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}  # fmt: skip
# ONNX's op: the kind, and its parameters with their defaults, alpha first
_WITH_PARAMETERS: Final = {
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Elu": ("elu", {"alpha": 1.0}),
    "Selu": ("selu", {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
    "Celu": ("celu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "ThresholdedRelu": ("thresholded_relu", {"alpha": 1.0}),
}


@reads(*_PLAIN)
def _plain(site: Site) -> Tensor:
    return site.unary(_PLAIN[site.node.op], site.x())


@reads(*_BINARY)
def _binary(site: Site) -> Tensor:
    return site.binary(_BINARY[site.node.op], site.x(0), site.x(1))


@reads(*_WITH_PARAMETERS)
def _with_parameters(site: Site) -> Tensor:
    kind, defaults = _WITH_PARAMETERS[site.node.op]
    return site.unary(kind, site.x(), *(site.float_attr(name, default) for name, default in defaults.items()))


@reads("Relu")
def _relu(site: Site) -> Tensor:
    x = site.x()
    return site.unary("relu", x) if x.dtype == DType.F32 else site.binary("max", x, 0)


@reads("Gelu")
def _gelu(site: Site) -> Tensor:
    return site.unary("gelu_tanh" if site.str_attr("approximate", "none") == "tanh" else "gelu", site.x())


@reads("Swish")
def _swish(site: Site) -> Tensor:
    x, alpha = site.x(), site.float_attr("alpha", 1.0)
    if alpha == 1.0:
        return site.unary("silu", x)
    return site.binary("mul", x, site.unary("sigmoid", site.binary("mul", x, alpha)))


@reads("Clip")
def _clip(site: Site) -> Tensor:
    x = site.x()
    if site.version < 11:
        return site.unary("clip", x, site.float_attr("min", -_LARGEST), site.float_attr("max", _LARGEST))
    low, high = site.optional(1), site.optional(2)
    if x.dtype == DType.F32 and site.is_plain(low, high):
        bounds = [
            float(site.numbers(at).reshape(-1)[0]) if site.has(at) else sign * np.inf for at, sign in ((1, -1), (2, 1))
        ]
        if not np.isnan(bounds).any():
            return site.unary("clip", x, *(float(np.clip(bound, -_LARGEST, _LARGEST)) for bound in bounds))
    if low is not None:
        x = site.binary("max", x, low)
    return x if high is None else site.binary("min", x, high)


@reads("Pow")
def _pow(site: Site) -> Tensor:
    x, exponent = site.x(0), site.x(1)
    if x.dtype == DType.F32 and exponent.value is not None and exponent.value.size == 1 and exponent.rank <= x.rank:
        number = float(site.numbers(1).reshape(-1)[0])
        if number in (0.5, 1.0, 2.0, -1.0):
            kind = {0.5: "sqrt", 1.0: "", 2.0: "square", -1.0: "reciprocal"}[number]
            return site.unary(kind, x) if kind else x
    if x.dtype != DType.F32 and exponent.dtype == DType.F32:
        return site.cast(site.binary("pow", site.cast(x, DType.F32), exponent), x.dtype)
    return site.binary("pow", x, site.cast(exponent, x.dtype))


@reads("Mod")
def _mod(site: Site) -> Tensor:
    return site.binary("fmod" if site.flag("fmod") else "mod", site.x(0), site.x(1))


@reads("Max", "Min", "Sum", "Mean")
def _variadic(site: Site) -> Tensor:
    kind = {"Max": "max", "Min": "min"}.get(site.node.op, "add")
    inputs = site.every()
    site.expect(bool(inputs), "an input or more")
    total = inputs[0]
    for other in inputs[1:]:
        total = site.binary(kind, total, other)
    return site.binary("div", total, float(len(inputs))) if site.node.op == "Mean" and len(inputs) > 1 else total


@reads("BitShift")
def _bit_shift(site: Site) -> Tensor:
    return site.binary("shift_left" if site.str_attr("direction") == "LEFT" else "shift_right", site.x(0), site.x(1))


@reads("BitwiseNot")
def _bitwise_not(site: Site) -> Tensor:
    x = site.x()
    return site.binary("bitwise_xor", x, 255 if x.dtype == DType.U8 else -1)


@reads("IsNaN")
def _is_nan(site: Site) -> Tensor:
    return site.unary("is_nan", site.x())


@reads("IsInf")
def _is_inf(site: Site) -> Tensor:
    negative, positive = site.flag("detect_negative", True), site.flag("detect_positive", True)
    return site.unary("is_inf", site.x(), float(negative), float(positive))


@reads("Where")
def _where(site: Site) -> Tensor:
    made: Tensor = site.add("where", *site.every())
    return made


@reads("Cast")
def _cast(site: Site) -> Tensor:
    element = site.int_attr("to")
    if element in FLOATS_AS_F32:
        return site.cast(site.x(), DType.F32)
    site.require(element in ELEMENT_TYPES, f"a cast to {element_name(element)} is not supported")
    x, wanted = site.x(), ELEMENT_TYPES[element]
    return _to_integer(site, x, wanted)


def _to_integer(site: Site, x: Tensor, wanted: DType) -> Tensor:
    if (
        x.value is not None
        and x.value.dtype != object
        and x.dtype == DType.F32
        and wanted not in (DType.F32, DType.BOOL)
    ):
        values = np.trunc(x.value)
        if np.isfinite(values).all() and (np.abs(values) < 2**31).all():
            return site.cast(site.constant(values.astype(np.int64)), wanted)
    return site.cast(x, wanted)


@reads("CastLike")
def _cast_like(site: Site) -> Tensor:
    return _to_integer(site, site.x(0), site.x(1).dtype)


READERS["Identity"] = lambda site: site.x()


@reads("Dropout")
def _dropout(site: Site) -> tuple[Tensor | None, ...]:
    x = site.x(0)
    if site.version >= 12 and site.has(2):
        training = bool(site.raw(2).reshape(-1)[0])
        ratio = float(site.numbers(1).reshape(-1)[0]) if site.has(1) else 0.5
        site.require(not training or ratio == 0.0, "training mode drops random elements")
    mask = site.add("fill", sizes=x.shape, dtype="bool", value=1.0) if site.wanted(1) else None
    return x, mask
