"""The sizes of libraries that the guide about devices states, which the tests compare with builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "devices.md"
TOLERANCE = 0.05


def stated_size(row: str, column: int = 0) -> object:
    """The bytes in the row of the table that begins with ``row``, for comparison with a size; ``column`` 1 is that of
    penstock-lite."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| {row} |")]
    (line,) = lines
    numbers = re.findall(r"\d{1,3}(?:,\d{3})+", line)
    return pytest.approx(int(numbers[column].replace(",", "")), rel=TOLERANCE)
