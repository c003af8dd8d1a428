"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["mostly_long"]


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of which ``quick`` run each time, and the others with the long tests."""
    marks = {False: pytest.mark.long, True: ()}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in quick]) for case in cases]
