"""Sizes as expressions over named sizes: integers, names, + - * // %, max and min.

An expression is kept as a polynomial whose terms are products of names and of quotients, so that equal expressions
compare equal and most divisions disappear.  An expression without a name is a plain ``int``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final, TypeAlias

from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "MAX_SIZE",
    "SizeExpression",
    "SizeLike",
    "SizeSymbol",
    "as_text",
    "bounds",
    "evaluate",
    "is_equal",
    "largest",
    "parts_of_minimum",
    "product",
    "smallest",
    "substitute",
    "symbol",
    "symbols_of",
]  # fmt: skip

MAX_SIZE = (1 << 31) - 1
"""The largest size of a dimension."""


@dataclass(frozen=True)
class SizeSymbol:
    """A named size that each run determines, from ``min`` to ``max``."""

    name: str
    min: int = 1
    max: int = MAX_SIZE


@dataclass(frozen=True)
class _Operation:
    """A quotient, remainder, maximum or minimum that no rule simplifies; ``kind`` is "//", "%", "max" or "min"."""

    kind: str
    left: SizeLike
    right: SizeLike


_Atom: TypeAlias = SizeSymbol | _Operation
_Monomial: TypeAlias = tuple[_Atom, ...]


class SizeExpression:
    """An expression with at least one name.  Immutable; made by ``symbol`` and by arithmetic."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: dict[_Monomial, int]) -> None:
        self.terms = terms
        self._hash = hash(frozenset(terms.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeExpression) and self.terms == other.terms

    def __add__(self, other: SizeLike) -> SizeLike:
        terms = dict(self.terms)
        for monomial, factor in _terms(other).items():
            terms[monomial] = terms.get(monomial, 0) + factor
        return _make(terms)

    def __neg__(self) -> SizeLike:
        return self * -1

    def __sub__(self, other: SizeLike) -> SizeLike:
        return self + other * -1

    def __rsub__(self, other: int) -> SizeLike:
        return self * -1 + other

    def __mul__(self, other: SizeLike) -> SizeLike:
        terms: dict[_Monomial, int] = {}
        for a, x in self.terms.items():
            for b, y in _terms(other).items():
                monomial = tuple(sorted((*a, *b), key=_order))
                terms[monomial] = terms.get(monomial, 0) + x * y
        return _make(terms)

    def __floordiv__(self, other: SizeLike) -> SizeLike:
        return _divide(self, other)

    def __rfloordiv__(self, other: int) -> SizeLike:
        return _divide(other, self)

    def __mod__(self, other: SizeLike) -> SizeLike:
        return _remainder(self, other)

    def __rmod__(self, other: int) -> SizeLike:
        return _remainder(other, self)

    def __lt__(self, other: SizeLike) -> bool:
        return _sign(self - other, "<") < 0

    def __gt__(self, other: SizeLike) -> bool:
        return _sign(self - other, ">") > 0

    def __le__(self, other: SizeLike) -> bool:
        return not _sign(self - other, "<=") > 0

    def __ge__(self, other: SizeLike) -> bool:
        return not _sign(self - other, ">=") < 0

    def __repr__(self) -> str:
        return as_text(self)

    __radd__ = __add__
    __rmul__ = __mul__


SizeLike: TypeAlias = int | SizeExpression


def symbol(name: str, least: int = 1, most: int = MAX_SIZE) -> SizeExpression:
    """Return the size ``name``, which is from ``least`` to ``most``."""
    return SizeExpression({(SizeSymbol(name, least, most),): 1})


def product(sizes: Iterable[SizeLike]) -> SizeLike:
    """Return the product of sizes; 1 for none."""
    result: SizeLike = 1
    for size in sizes:
        result = result * size
    return result


def largest(a: SizeLike, b: SizeLike) -> SizeLike:
    """Return the larger of two sizes."""
    return _choose("max", a, b)


def smallest(a: SizeLike, b: SizeLike) -> SizeLike:
    """Return the smaller of two sizes."""
    return _choose("min", a, b)


def coefficient(size: SizeLike) -> tuple[SizeLike, int]:
    """Return a size and the number that it is multiplied by in ``size``; 1 for a number and for a sum."""
    if not isinstance(size, SizeExpression) or len(size.terms) > 1:
        return size, 1
    ((monomial, factor),) = size.terms.items()
    return SizeExpression({monomial: 1}), factor


def parts_of_minimum(size: SizeLike) -> list[SizeLike]:
    """Return the sizes of which ``size`` is the smallest; only itself if it is no minimum."""
    match list(_terms(size).items()):
        case [((_Operation(kind="min", left=left, right=right),), 1)]:
            return [*parts_of_minimum(left), *parts_of_minimum(right)]
    return [size]


def is_equal(a: SizeLike, b: SizeLike) -> bool | None:
    """Return whether two sizes are equal; None if that depends on the named sizes."""
    if a == b:
        return True
    low, high = bounds(a - b)
    return False if low > 0 or high < 0 else None


def bounds(size: SizeLike) -> tuple[int, int]:
    """Return the least and the largest value that the ranges of the names allow, or wider."""
    low = high = 0
    for monomial, factor in _terms(size).items():
        term_low = term_high = 1
        for atom in monomial:
            a, b = _atom_bounds(atom)
            ends = (term_low * a, term_low * b, term_high * a, term_high * b)
            term_low, term_high = min(ends), max(ends)
        low += min(factor * term_low, factor * term_high)
        high += max(factor * term_low, factor * term_high)
    return low, high


def symbols_of(size: SizeLike) -> set[SizeSymbol]:
    """Return the names in an expression."""
    symbols: set[SizeSymbol] = set()
    for monomial in _terms(size):
        for atom in monomial:
            if isinstance(atom, SizeSymbol):
                symbols.add(atom)
            else:
                symbols |= symbols_of(atom.left) | symbols_of(atom.right)
    return symbols


def substitute(size: SizeLike, values: Mapping[SizeSymbol, SizeLike]) -> SizeLike:
    """Return the expression with sizes in the place of names."""
    total: SizeLike = 0
    for monomial, factor in _terms(size).items():
        total = total + product(_substituted(atom, values) for atom in monomial) * factor
    return total


def _substituted(atom: _Atom, values: Mapping[SizeSymbol, SizeLike]) -> SizeLike:
    if isinstance(atom, SizeSymbol):
        return values.get(atom, SizeExpression({(atom,): 1}))
    left, right = substitute(atom.left, values), substitute(atom.right, values)
    if atom.kind in ("max", "min"):
        return _choose(atom.kind, left, right)
    return _divide(left, right) if atom.kind == "//" else _remainder(left, right)


def as_text(size: SizeLike) -> str:
    """Return the expression as files write it: "12*B*S+3", "(H+1)//2"."""
    if isinstance(size, int):
        return str(size)
    terms = sorted(size.terms.items(), key=lambda item: (-len(item[0]), [_order(atom) for atom in item[0]]))
    text = ""
    for monomial, factor in terms:
        atoms = [_atom_text(atom) for atom in monomial]
        if not monomial:
            piece = str(abs(factor))
        elif abs(factor) == 1:
            piece = "*".join(atoms)
        else:
            piece = "*".join((str(abs(factor)), *atoms))
        text += ("-" if factor < 0 else "+" if text else "") + piece
    return text


def evaluate(text: str, names: Mapping[str, int]) -> int:
    """Return the number that an expression of a file has for these sizes.

    Raises InvalidArgumentError for a name that is not among them, and for a text that is no expression.
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"sizes: expected an expression over {', '.join(names)}, got {text!r}") from error


def _evaluate(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, names)
    if isinstance(node, ast.BinOp):
        function = _OPERATORS[type(node.op)]
        return int(function(_evaluate(node.left, names), _evaluate(node.right, names)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        function = {"max": max, "min": min}[node.func.id]
        return int(function(*(_evaluate(argument, names) for argument in node.args)))
    raise TypeError(f"no expression: {ast.dump(node)}")


_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _terms(size: SizeLike) -> dict[_Monomial, int]:
    return size.terms if isinstance(size, SizeExpression) else {(): int(size)} if size else {}


def _make(terms: dict[_Monomial, int]) -> SizeLike:
    terms = {monomial: factor for monomial, factor in terms.items() if factor}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return SizeExpression(terms)


def _order(atom: _Atom) -> str:
    return atom.name if isinstance(atom, SizeSymbol) else _atom_text(atom)


def _atom_text(atom: _Atom) -> str:
    if isinstance(atom, SizeSymbol):
        return atom.name
    if atom.kind in ("max", "min"):
        return f"{atom.kind}({as_text(atom.left)},{as_text(atom.right)})"
    left, right = (text if text.isalnum() else f"({text})" for text in (as_text(atom.left), as_text(atom.right)))
    return f"({left}{atom.kind}{right})"


def _atom_bounds(atom: _Atom) -> tuple[int, int]:
    if isinstance(atom, SizeSymbol):
        return atom.min, atom.max
    (a, b), (c, d) = bounds(atom.left), bounds(atom.right)
    if atom.kind == "max":
        return max(a, c), max(b, d)
    if atom.kind == "min":
        return min(a, c), min(b, d)
    if atom.kind == "%":
        return 0, max(d - 1, 0)
    c, d = max(c, 1), max(d, 1)
    ends = (a // c, a // d, b // c, b // d)
    return min(ends), max(ends)


def _without(monomial: _Monomial, divisor: _Monomial) -> _Monomial | None:
    """Return the monomial divided by another, or None if that leaves a quotient."""
    rest = list(monomial)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divide(left: SizeLike, right: SizeLike) -> SizeLike:
    if isinstance(right, int):
        if right < 1:
            raise UnsupportedError(f"sizes: expected a divisor of 1 or more, got {right}")
        if isinstance(left, int):
            return left // right
    elif len(right.terms) > 1:
        return 1 if left == right else 0 if left == 0 else SizeExpression({(_Operation("//", left, right),): 1})
    ((divisor, factor),) = _terms(right).items()
    whole: dict[_Monomial, int] = {}
    rest: dict[_Monomial, int] = {}
    for monomial, number in _terms(left).items():
        quotient = _without(monomial, divisor)
        if quotient is not None and number % factor == 0:
            whole[quotient] = number // factor
        else:
            rest[monomial] = number
    left = _make(rest)
    low, high = bounds(left)
    if low >= 0 and high < bounds(right)[0]:
        return _make(whole)
    if isinstance(left, int) and isinstance(right, int):
        return _make(whole) + left // right
    nested = _nested_quotient(left, right)
    if nested is not None:
        return _make(whole) + nested
    common = gcd(factor, *rest.values()) if not divisor else 1
    if common > 1:  # (4*a+2)//6 == (2*a+1)//3
        left, right = _make({m: n // common for m, n in rest.items()}), factor // common
        if right == 1:
            return _make(whole) + left
    return _make(whole) + SizeExpression({(_Operation("//", left, right),): 1})


def _nested_quotient(left: SizeLike, right: SizeLike) -> SizeLike | None:
    """Return (x // a + n) // b as (x + n * a) // (a * b), or None for what has another form."""
    if not isinstance(left, SizeExpression) or not isinstance(right, int):
        return None
    quotients = [monomial for monomial in left.terms if monomial]
    if len(quotients) != 1 or len(quotients[0]) != 1 or left.terms[quotients[0]] != 1:
        return None
    (atom,) = quotients[0]
    if not isinstance(atom, _Operation) or atom.kind != "//" or not isinstance(atom.right, int):
        return None
    return _divide(left.terms.get((), 0) * atom.right + atom.left, atom.right * right)


def _remainder(left: SizeLike, right: SizeLike) -> SizeLike:
    if isinstance(left, int) and isinstance(right, int):
        return left % right
    quotient = _divide(left, right)
    if not any(isinstance(a, _Operation) and a.kind == "//" for m in _terms(quotient) for a in m):
        return left - quotient * right
    low, high = bounds(left)
    if low >= 0 and high < bounds(right)[0]:
        return left
    return SizeExpression({(_Operation("%", left, right),): 1})


def _choose(kind: str, a: SizeLike, b: SizeLike) -> SizeLike:
    low, high = bounds(a - b)
    if low >= 0:
        return a if kind == "max" else b
    if high <= 0:
        return b if kind == "max" else a
    return SizeExpression({(_Operation(kind, a, b),): 1})


def _sign(difference: SizeLike, comparison: str) -> int:
    """Return the sign of a difference that is compared with 0."""
    low, high = bounds(difference)
    if low == high == 0:
        return 0
    if low > 0 or (low == 0 and comparison in (">=", "<")):
        return 1
    if high < 0 or (high == 0 and comparison in ("<=", ">")):
        return -1
    raise UnsupportedError(
        f"sizes: whether {as_text(difference)} {comparison} 0 depends on a free size; fix it, or give it a range"
    )
