"""Numbers that a module makes of free sizes: ``x * n**-0.5``, ``math.floor(h * 0.5)``, ``math.ceil(w / 4)``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final

import sympy
from torch.utils._sympy.functions import CeilToInt, FloorDiv, FloorToInt, TruncToInt

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import SizeExpression, SizeLike, largest
from penstock.graph.general.torch.writer import Writer
from penstock.graph.ir import DType

__all__ = ["FreeNumber", "number_of", "rounded_size", "scaled_size", "whole_quotients"]

SizeOf = Callable[[Any], SizeLike]
_MAX_DENOMINATOR: Final = 1 << 12  # with which the products that PyTorch rounds are exact
_REPLACED: Final = threading.RLock()  # held while SymPy's classes have the functions of this module
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
    """Return a product or quotient of a size that is rounded to an integer, or None for another expression.

    Raises UnsupportedError for 0.7 times a free size, and for ``round``.
    """
    kind = type(expr).__name__
    if kind == "RoundToInt":
        raise UnsupportedError(f"sizes: expected int, math.floor or math.ceil, got round() in {expr}", param="sizes")
    if kind not in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return None
    exact = _quotient(expr.args[0])
    if exact is None:
        raise UnsupportedError(
            f"sizes: expected a factor of a free size such as 2, 0.5 or 1.25, got {expr.args[0]}", param="sizes"
        )
    size, divisor = size_of(exact[0]), exact[1]
    if kind != "TruncToInt":
        return (size + (divisor - 1 if kind == "CeilToInt" else 0)) // divisor
    above, below = (largest(part, 0) // divisor for part in (size, -size))
    return above - below  # int() rounds towards 0: the part above it down, the part below it up


def scaled_size(size: SizeLike, factor: float | Fraction, *, up: bool = False) -> SizeLike:
    """Return ``size * factor`` rounded down, or up.  Raises UnsupportedError for 0.7 times a free size."""
    exact = Fraction(factor)
    if exact.denominator > _MAX_DENOMINATOR:
        if isinstance(size, SizeExpression):
            raise UnsupportedError(f"sizes: expected a factor of a free size such as 2, 0.5 or 1.25, got {factor}")
        return -int(-size * float(factor) // 1) if up else int(size * float(factor) // 1)
    return (size * exact.numerator + (exact.denominator - 1 if up else 0)) // exact.denominator


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Let PyTorch take rounded quotients of sizes, ``math.ceil(h / 2)`` or ``int(w * 0.5)``, for those of integers.

    PyTorch proves nothing about rounded floating-point numbers: that ``2 * ceil(8 * h / 2)`` is ``8 * h`` is then a
    condition that each size computed from it has, and tracing does not end.
    """
    with _REPLACED:
        own = {kind: vars(kind)["eval"] for kind in _ROUNDED}
        try:
            for kind, rounded in _ROUNDED.items():
                kind.eval = classmethod(_evaluation(own[kind].__func__, rounded))
            yield
        finally:
            for kind, evaluation in own.items():
                kind.eval = evaluation


def _evaluation(own: Callable[..., Any], rounded: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Return what SymPy calls to simplify a rounded number: ``own`` first, then that of an exact quotient."""

    def evaluate(kind: Any, number: Any) -> Any:
        simplified = own(kind, number)
        if simplified is not None:
            return simplified
        exact = _quotient(number)
        return None if exact is None else rounded(*exact)

    return evaluate


def _down(numerator: Any, divisor: int) -> Any:
    return FloorDiv(numerator, sympy.Integer(divisor))


def _up(numerator: Any, divisor: int) -> Any:
    return FloorDiv(numerator + divisor - 1, sympy.Integer(divisor))


def _to_zero(numerator: Any, divisor: int) -> Any:
    return _down(numerator, divisor) if numerator.is_nonnegative else None


_ROUNDED: Final[dict[Any, Callable[[Any, int], Any]]] = {FloorToInt: _down, CeilToInt: _up, TruncToInt: _to_zero}


def _quotient(expr: Any) -> tuple[Any, int] | None:
    """Return an integer of PyTorch's expressions and a divisor whose quotient ``expr`` is; None for another one.

    None also for one that is rounded to another integer than the exact quotient: 61 / 7 * 7 is less than 61.
    """
    kind = type(expr).__name__
    if expr.is_number:
        exact = Fraction(float(expr)) if expr.is_finite else None
        if exact is None or exact.denominator > _MAX_DENOMINATOR:
            return None
        return sympy.Integer(exact.numerator), exact.denominator
    if kind == "ToFloat":
        return expr.args[0], 1
    if expr.is_integer:
        return expr, 1
    if kind in ("IntTrueDiv", "FloatTrueDiv"):
        return _divided(_quotient(expr.args[0]), expr.args[1])
    if not (expr.is_Mul or expr.is_Add):
        return None
    parts = [part for part in map(_quotient, expr.args) if part is not None]
    if len(parts) < len(expr.args) or not _is_exact(parts, expr.is_Mul):
        return None
    numerator, divisor = sympy.Integer(1 if expr.is_Mul else 0), 1
    for above, below in parts:
        numerator = numerator * above if expr.is_Mul else numerator * below + above * divisor
        divisor *= below
    return numerator, divisor


def _divided(part: tuple[Any, int] | None, number: Any) -> tuple[Any, int] | None:
    """Return a quotient divided by a number, of which PyTorch rounds no whole one."""
    if part is None or not number.is_number or not float(number).is_integer() or number == 0:
        return None
    divisor = part[1] * int(number)
    return (part[0], divisor) if divisor > 0 else (-part[0], -divisor)


def _is_exact(parts: Sequence[tuple[Any, int]], is_product: bool) -> bool:
    """Return True if a product or sum of quotients that is whole is made of exact ones, so that none is rounded."""
    rounded = [at for at, (_, below) in enumerate(parts) if below & (below - 1)]
    if not rounded or not is_product:
        return len(rounded) < 2
    others = [above for at, (above, _) in enumerate(parts) if at != rounded[0]]
    below = parts[rounded[0]][1]
    odd = below // (below & -below)
    return len(rounded) == 1 and all(above.is_Integer and math.gcd(int(above), odd) == 1 for above in others)
