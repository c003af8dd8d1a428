"""Typed access to the metadata of a GGUF file; errors name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from penstock.checkpoint.gguf.reader import Texts, Value
from penstock.config import show
from penstock.errors import InvalidFileError

__all__ = ["Metadata"]


class Metadata:
    """The metadata of ``file``.  Each method returns its default, or raises InvalidFileError, for a missing key."""

    def __init__(self, values: Mapping[str, Value], file: str) -> None:
        self.values = values
        self.file = file

    def error(self, key: str, expected: str) -> InvalidFileError:
        """Return the error of a key."""
        actual = self.values.get(key)
        text = f"an array of {len(actual)}" if isinstance(actual, (list, Texts, np.ndarray)) else show(actual)
        return InvalidFileError(f"{self.file}: {key}: expected {expected}, got {text}", param=key)

    def integer(self, key: str, default: int | None = None, *, min: int = 0, max: int = (1 << 31) - 1) -> int:
        """Return an integer between ``min`` and ``max``."""
        value = self.values.get(key, default)
        if type(value) is not int or not min <= value <= max:
            raise self.error(key, f"an integer from {min} to {max}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer from 0, or None."""
        return self.integer(key) if key in self.values else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, "a finite number")
        # The shortest decimal of the stored 32 bits: 1e-6 instead of 9.999999974752427e-07.
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of strings."""
        value = self.values.get(key)
        if isinstance(value, Texts):
            return value.split()
        if not isinstance(value, list):
            raise self.error(key, "an array of strings")
        return value

    def integers(self, key: str, count: int) -> list[int] | None:
        """Return an array of ``count`` integers, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != count:
            raise self.error(key, f"an array of {count} integers")
        numbers: list[int] = value.tolist()
        return numbers

    def numbers(self, key: str, count: int) -> list[float] | None:
        """Return an array of ``count`` finite numbers, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        is_floats = isinstance(value, np.ndarray) and value.dtype.kind == "f" and len(value) == count
        if not isinstance(value, np.ndarray) or not is_floats or not np.isfinite(value).all():
            raise self.error(key, f"an array of {count} finite numbers")
        numbers: list[float] = value.tolist()
        return numbers
