"""Sizes as expressions: equal ones compare equal, divisions disappear, and their texts evaluate to the same."""

from __future__ import annotations

import random

import pytest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.sizes import (
    SizeLike,
    as_text,
    bounds,
    evaluate,
    is_equal,
    largest,
    product,
    smallest,
    symbol,
)

B, S = symbol("B", 1, 64), symbol("S", 2, 512)
H = 32 * symbol("h", 1, 32)


def test_equal_expressions_compare_equal() -> None:
    assert (S + 1) * 2 - 2 == 2 * S
    assert S - S == 0
    assert (12 * B * S) // (4 * S) == 3 * B
    assert symbol("h", 1, 32) == H // 2 // 16
    assert symbol("h", 1, 32) == (H - 1) // 32 + 1
    assert (B * S) % S == 0
    assert product((B, 3, S)) == 3 * S * B


def test_what_depends_on_names_is_known_to() -> None:
    assert is_equal(S, 1) is False  # S is at least 2
    assert is_equal(B, 1) is None
    assert largest(S, 1) == S
    assert smallest(B, 100) == B
    assert bounds(2 * S - 1) == (3, 1023)
    assert S > 1
    with pytest.raises(UnsupportedError):
        assert B > 1  # only a run knows


def test_texts_evaluate_to_what_python_computes() -> None:
    rng = random.Random(1)
    names = {"B": 3, "S": 17, "h": 5}

    def expression(depth: int) -> tuple[SizeLike, int]:
        if depth == 0:
            return rng.choice([(B, 3), (S, 17), (H, 160), (2, 2), (7, 7)])
        (a, x), (b, y) = expression(depth - 1), expression(depth - 1)
        kind = rng.choice(("+", "-", "*", "//", "%", "max", "min"))
        if kind in ("//", "%") and (bounds(b)[0] < 1 or y < 1):
            kind = "+"
        results: dict[str, tuple[SizeLike, int]] = {"+": (a + b, x + y), "-": (a - b, x - y), "*": (a * b, x * y)}
        if kind in ("//", "%"):
            return (a // b, x // y) if kind == "//" else (a % b, x % y)
        return results.get(kind) or ((largest(a, b), max(x, y)) if kind == "max" else (smallest(a, b), min(x, y)))

    for _ in range(400):
        size, expected = expression(3)
        assert evaluate(as_text(size), names) == expected, as_text(size)


@pytest.mark.parametrize("text", ["", "Z", "B+", "B.x", "f(1,2)", "2**9", "'B'"])
def test_refuses_what_is_no_expression(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        evaluate(text, {"B": 1})
