"""Conversions between float32, float16 and bfloat16; the latter two as their bits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.weights import to_float32
from penstock.errors import InvalidArgumentError

__all__ = ["FLOATS", "convert_floats", "to_float32"]

FLOATS: Final = ("f32", "f16", "bf16")


def convert_floats(values: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """Return values of type ``source`` in type ``target``, rounded to nearest, ties to even.

    Raises InvalidArgumentError for a finite value that is too large for ``target``.
    """
    if source == target:
        return values
    exact = to_float32(values, source)
    if target == "f32":
        return exact
    if target == "f16":
        with np.errstate(over="ignore"):
            half = exact.astype(np.float16)
        _check(exact, np.isfinite(half), target)
        return half.view(np.uint16)
    bits = exact.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    is_nan = np.isnan(exact)
    if is_nan.any():
        result[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    _check(exact, (result & 0x7F80) != 0x7F80, target)
    return result


def _check(exact: NDArray[np.float32], is_finite: NDArray[Any], target: str) -> None:
    wrong = np.isfinite(exact) & ~is_finite
    if wrong.any():
        raise InvalidArgumentError(f"dtype: expected values within {target}, got {exact[wrong][0]:g}", param="dtype")
