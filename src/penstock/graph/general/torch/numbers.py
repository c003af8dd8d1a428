"""Numbers that a module makes of free sizes: ``x * n**-0.5``, ``math.floor(h * 0.5)``, ``math.ceil(w / 4)``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import SizeExpression, SizeLike, largest
from penstock.graph.general.torch.writer import Writer
from penstock.graph.ir import DType

__all__ = ["FreeNumber", "number_of", "rounded_size", "scaled_size"]

SizeOf = Callable[[Any], SizeLike]
_MAX_DENOMINATOR: Final = 1 << 12  # with which the products that PyTorch rounds are exact
_UNARY: Final = {
    "OpaqueUnaryFn_sqrt": "sqrt", "OpaqueUnaryFn_exp": "exp", "OpaqueUnaryFn_sin": "sin", "OpaqueUnaryFn_cos": "cos",
    "OpaqueUnaryFn_tanh": "tanh", "log": "log", "OpaqueUnaryFn_log": "log",
}  # fmt: skip
_BINARY: Final = {"FloatTrueDiv": "div", "IntTrueDiv": "div", "FloatPow": "pow", "Max": "max", "Min": "min"}


class FreeNumber:
    """A number of PyTorch that depends on free sizes.  It becomes a tensor where an op needs it."""

    def __init__(self, expr: Any) -> None:
        self.expr = expr


def number_of(w: Writer, expr: Any, size_of: SizeOf) -> float | Tensor:
    """Return PyTorch's expression of a floating-point number as a number, or as a tensor without dimensions."""
    if expr.is_number:
        return float(expr)
    kind = type(expr).__name__
    if kind == "ToFloat":
        return w.as_float(w.constant(size_of(expr.args[0])))
    if expr.is_integer:
        return w.as_float(w.constant(size_of(expr)))
    args = [number_of(w, arg, size_of) for arg in expr.args]
    op = "add" if expr.is_Add else "mul" if expr.is_Mul else "pow" if expr.is_Pow else _BINARY.get(kind)
    if op is None:
        if kind not in _UNARY:
            raise UnsupportedError(f"capture: {w.name}: a number is {expr}, for which there is no op")
        return w.unary(_UNARY[kind], w.constant(args[0]) if isinstance(args[0], float) else args[0])
    result = args[0]
    for arg in args[1:]:
        result = w.binary(op, result, arg, at_least=DType.F32)
    return result


def rounded_size(expr: Any, size_of: SizeOf) -> SizeLike | None:
    """Return a product or quotient of a size that is rounded to an integer, or None for another expression."""
    kind = type(expr).__name__
    if kind not in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return None
    found = _product(expr.args[0], size_of)
    if found is None:
        return None
    factor, size = found
    if kind != "TruncToInt":
        return scaled_size(size, factor, up=kind == "CeilToInt")
    size = -size if factor < 0 else size  # int() rounds towards 0: the part above it down, the part below it up
    above, below = (scaled_size(largest(part, 0), abs(factor)) for part in (size, -size))
    return above - below


def scaled_size(size: SizeLike, factor: float | Fraction, *, up: bool = False) -> SizeLike:
    """Return ``size * factor`` rounded down, or up.  Raises UnsupportedError for 0.7 times a free size."""
    exact = Fraction(factor)
    if exact.denominator > _MAX_DENOMINATOR:
        if isinstance(size, SizeExpression):
            raise UnsupportedError(f"sizes: expected a factor of a free size such as 2, 0.5 or 1.25, got {factor}")
        return -int(-size * float(factor) // 1) if up else int(size * float(factor) // 1)
    return (size * exact.numerator + (exact.denominator - 1 if up else 0)) // exact.denominator


def _product(expr: Any, size_of: SizeOf) -> tuple[Fraction, SizeLike] | None:
    """Return a factor and a size whose product ``expr`` is."""
    kind = type(expr).__name__
    if expr.is_number:
        return Fraction(float(expr)), 1
    if kind == "ToFloat":
        return Fraction(1), size_of(expr.args[0])
    if kind == "IntTrueDiv" and expr.args[1].is_Integer:
        return Fraction(1, int(expr.args[1])), size_of(expr.args[0])
    if not expr.is_Mul:
        return None
    factor, size = Fraction(1), 1
    for arg in expr.args:
        found = _product(arg, size_of)
        if found is None:
            return None
        factor, size = factor * found[0], size * found[1]  # type: ignore[assignment]
    return factor, size
