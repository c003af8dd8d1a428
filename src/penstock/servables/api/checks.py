"""Checks of the values in a servable.py.  The error message starts with the name of the value."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidArgumentError

__all__ = ["check_integer", "check_number", "is_integer"]


def is_integer(value: object) -> bool:
    """Return True for an ``int`` that is not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return an integer from ``low`` to ``high``; raise InvalidArgumentError for any other value."""
    if not is_integer(value) or not low <= value <= high:
        raise InvalidArgumentError(f"{name}: expected an integer from {low} to {high}, got {value!r:.100}", param=name)
    return int(value)


def check_number(name: str, value: Any, high: float, *, may_be_zero: bool) -> float:
    """Return a number from 0 to ``high``, or above 0 unless ``may_be_zero``; raise InvalidArgumentError otherwise."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= high or not (value or may_be_zero):
        low = "from 0 to" if may_be_zero else "above 0 and up to"
        raise InvalidArgumentError(f"{name}: expected a number {low} {high:,.0f}, got {value!r:.100}", param=name)
    return float(value)
