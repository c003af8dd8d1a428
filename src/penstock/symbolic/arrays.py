"""The functions of ``torch`` that networks create parameters and constants with, for arrays of our own.

An array that is created under ``device("meta")`` has a shape but no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.symbolic.tensor import untraceable

__all__ = ["Array", "device", "dtype", "empty", "float32", "from_numpy", "ones", "zeros"]

dtype = str
float32: Final = "float32"
_on_meta: Final[ContextVar[bool]] = ContextVar("penstock_on_meta", default=False)


class Array:
    """A parameter or a constant: its shape, and its values unless it is on the meta device."""

    def __init__(self, shape: tuple[int, ...], values: NDArray[Any] | None, dtype: str = float32) -> None:
        self.shape, self.values = shape, values
        self.dtype = dtype if values is None else str(values.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_meta(self) -> bool:
        """True for an array without values."""
        return self.values is None

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def numpy(self) -> NDArray[Any]:
        """Return the values."""
        if self.values is None:
            raise ValueError("an array on the meta device has no values")
        return self.values

    def _refuse(self, *_: object) -> NoReturn:
        raise untraceable(f"an operation on {type(self).__name__} values")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __iter__ = _refuse
    __getitem__ = __setitem__ = __contains__ = _refuse


@contextmanager
def device(name: str) -> Iterator[None]:
    """Create the arrays of the block on ``name``: "cpu", or "meta" for arrays without values."""
    token = _on_meta.set(name == "meta")
    try:
        yield
    finally:
        _on_meta.reset(token)


def _filled(sizes: tuple[int, ...], value: float, kind: str) -> Array:
    return Array(sizes, None if _on_meta.get() else np.full(sizes, value, kind), kind)


def empty(*sizes: int, dtype: str = float32) -> Array:
    """Return an array whose values do not matter."""
    return _filled(sizes, 0.0, dtype)


def zeros(*sizes: int, dtype: str = float32) -> Array:
    """Return an array of zeros."""
    return _filled(sizes, 0.0, dtype)


def ones(*sizes: int, dtype: str = float32) -> Array:
    """Return an array of ones."""
    return _filled(sizes, 1.0, dtype)


def from_numpy(values: NDArray[Any]) -> Array:
    """Return an array with ``values``, on any device."""
    return Array(values.shape, values)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r:.60}")
    raise untraceable(f"torch.{name:.60}")
