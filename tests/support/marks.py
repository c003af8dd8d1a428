"""Marks of tests: what runs each time, what with the long tests, and what only when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["in_turn", "may_have_long_tests", "mostly_exhaustive", "mostly_long"]

_SIGN: Final = re.compile(r"mark\.long|support\.marks|support\.families|invariants\.steps|placement")
"""A file with long tests marks them, or takes cases of a module that does."""


@cache
def may_have_long_tests(path: Path) -> bool:
    """Return False for a file of tests that has no long ones, without importing it."""
    return _SIGN.search(path.read_text()) is not None


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of which ``quick`` run each time, and the others with the long tests."""
    return [_param(case, () if case in quick else pytest.mark.long) for case in cases]


def mostly_exhaustive(cases: Iterable[Any], quick: Sequence[Any], long: Sequence[Any]) -> list[Any]:
    """Return parameters of which ``quick`` run each time, ``long`` with the long tests, and the others on request."""
    marks = dict.fromkeys(quick, ()) | dict.fromkeys(long, pytest.mark.long)
    return [_param(case, marks.get(case, pytest.mark.exhaustive)) for case in cases]


def in_turn(rows: Iterable[Any], columns: Sequence[Any], times: int = 1) -> list[Any]:
    """Return each row with each column as parameters of a test.

    A row meets ``times`` of the columns, which follow in turn, when the marks of the row say.  Its pairs with the other
    columns are exhaustive: all rows with all columns take long and find little more.
    """
    pairs = []
    for index, row in enumerate(rows):
        values, marks = (row.values, row.marks) if hasattr(row, "marks") else ((row,), ())
        chosen = {(index * times + turn) % len(columns) for turn in range(times)}
        pairs += [
            pytest.param(*values, column, marks=marks if at in chosen else pytest.mark.exhaustive)
            for at, column in enumerate(columns)
        ]
    return pairs


def _param(case: Any, marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
