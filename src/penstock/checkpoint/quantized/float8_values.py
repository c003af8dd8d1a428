"""The values of 8-bit floats E4M3 (OCP 8-bit Floating Point Specification)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["float8_values"]


@cache
def float8_values() -> NDArray[np.float32]:
    """Return the value of each byte, [256]: a sign, four bits of exponent (bias 7) and three of fraction."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    values: NDArray[np.float32] = np.where(byte & 128, -magnitude, magnitude).astype(np.float32)
    return values
