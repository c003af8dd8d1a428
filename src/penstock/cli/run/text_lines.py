"""The lines of a text file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from penstock.errors import InvalidFileError

__all__ = ["text_lines"]


def text_lines(file: IO[bytes], name: str) -> Iterator[str]:
    """Return the lines of a file that are not empty; InvalidFileError names one that is not UTF-8."""
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidFileError(f"{name}: line {number}: expected text in UTF-8") from None
        if text:
            yield text
