"""A Tensor: an array with a name, which converts from and to numpy and, over DLPack, other libraries."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.config import is_integer
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.validation import refusal, wrong_type

__all__ = ["DataType", "Tensor"]

_MAX_DIMS = 8
_MAX_BYTES = 1 << 40
_CPU = 1  # kDLCPU of dlpack.h


class DataType:
    """The element types of a Tensor, which are numpy's."""

    FLOAT32: ClassVar = np.dtype(np.float32)
    FLOAT16: ClassVar = np.dtype(np.float16)
    FLOAT64: ClassVar = np.dtype(np.float64)
    INT8: ClassVar = np.dtype(np.int8)
    INT16: ClassVar = np.dtype(np.int16)
    INT32: ClassVar = np.dtype(np.int32)
    INT64: ClassVar = np.dtype(np.int64)
    UINT8: ClassVar = np.dtype(np.uint8)
    UINT16: ClassVar = np.dtype(np.uint16)
    UINT32: ClassVar = np.dtype(np.uint32)
    UINT64: ClassVar = np.dtype(np.uint64)
    BOOL: ClassVar = np.dtype(np.bool_)


_TYPES = frozenset(value for name, value in vars(DataType).items() if name.isupper())


class Tensor:
    """A C-contiguous array with a name.

    ``Tensor(array)`` shares the array's memory; ``Tensor(name=, dtype=, shape=)`` creates zeros.  Raises
    InvalidArgumentError for an array that is not C-contiguous; use numpy.ascontiguousarray.
    """

    __slots__ = ("_array", "_name")
    _array: npt.NDArray[Any]

    def __init__(
        self,
        tensor: npt.NDArray[Any] | Tensor | None = None,
        *,
        name: str = "",
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise wrong_type("name", "a string", name)
        if tensor is None:
            tensor = np.zeros(_checked_shape(shape), _checked_dtype(dtype))
        elif dtype is not None or shape is not None:
            raise InvalidArgumentError(
                f"{'dtype' if dtype is not None else 'shape'}: expected none with an array, which has its own",
                param="dtype" if dtype is not None else "shape",
            )
        if isinstance(tensor, Tensor):
            name, tensor = name or tensor.name, tensor._array
        self._array = _checked_array(tensor).view()  # a view, whose shape no other code can change
        self._name = name

    @property
    def name(self) -> str:
        """The name of an input or output; it can be set."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        if not isinstance(name, str):
            raise wrong_type("name", "a string", name)
        self._name = name

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type, one of DataType."""
        return self._array.dtype

    @property
    def shape(self) -> list[int]:
        """The number of elements in each dimension."""
        return list(self._array.shape)

    @property
    def element_num(self) -> int:
        """The number of elements."""
        return int(self._array.size)

    @property
    def data_size(self) -> int:
        """The size of all elements in bytes."""
        return int(self._array.nbytes)

    def set_data_from_numpy(self, numpy_obj: npt.NDArray[Any]) -> None:
        """Copy an array of the same shape into this tensor.

        An array of another type is accepted if this tensor's type can represent each number exactly: 1.0 is the int32
        1, but 0.5, NaN and 2**40 are refused.  Raises InvalidArgumentError for another shape, for a number that cannot
        be represented, and for an array that is not C-contiguous.
        """
        if not self._array.flags.writeable:
            raise InvalidArgumentError(
                f"{self._called()}: expected writable memory, got read-only memory", param=self._name or None
            )
        array = _checked_array(numpy_obj, "numpy_obj")
        if array.shape != self._array.shape:
            raise InvalidArgumentError(
                f"numpy_obj: shape: expected {self.shape}, got {list(array.shape)}", param="numpy_obj"
            )
        self._array[...] = self._exact(array)

    def _exact(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype == self.dtype:
            return array
        with np.errstate(invalid="ignore", over="ignore"):
            converted = array.astype(self.dtype)
            wrong = np.flatnonzero((converted.astype(array.dtype) != array).reshape(-1))
        if wrong.size:
            raise InvalidArgumentError(
                f"numpy_obj: expected values of {self.dtype.name} for {self._called()}, got {array.dtype.name} "
                f"{array.reshape(-1)[wrong[0]]} at element {wrong[0]}",
                param="numpy_obj",
            )
        return converted

    def get_data_to_numpy(self) -> npt.NDArray[Any]:
        """Return a copy of the data as an array.  ``numpy.from_dlpack(tensor)`` returns one that shares the memory."""
        return self._array.copy()

    @classmethod
    def from_dlpack(cls, data: Any, name: str = "") -> Tensor:
        """Return a tensor that shares the memory of another library's array (PyTorch, JAX, numpy ...).

        Raises UnsupportedError for memory of another device than the CPU, and InvalidArgumentError for an object
        without DLPack, for a type that numpy lacks (such as bfloat16), and for an array that is not C-contiguous.
        """
        if not hasattr(data, "__dlpack__") or not hasattr(data, "__dlpack_device__"):
            raise wrong_type("data", "an array with __dlpack__", data)
        device = data.__dlpack_device__()
        if int(device[0]) != _CPU:
            raise UnsupportedError(f"data: expected CPU memory, got DLPack device type {int(device[0])}", param="data")
        try:
            array = np.from_dlpack(data)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"data: DLPack conversion failed: {error}", param="data") from error
        return cls(array, name=name)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)

    def __repr__(self) -> str:
        return f"Tensor(name={self._name!r}, dtype={self.dtype.name}, shape={self.shape})"

    def _called(self) -> str:
        return self._name or "the tensor"


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the array of a tensor, not a copy."""
    return tensor._array


def _checked_array(array: object, name: str = "tensor") -> npt.NDArray[Any]:
    if not isinstance(array, np.ndarray):
        raise wrong_type(name, "a numpy array", array)
    if array.dtype not in _TYPES or not array.dtype.isnative:
        raise InvalidArgumentError(f"{name}: dtype: expected numbers or booleans, got {array.dtype}", param=name)
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(
            f"{name}: expected a C-contiguous array, got strides {list(array.strides)} of shape {list(array.shape)}; "
            "use numpy.ascontiguousarray",
            param=name,
        )
    if array.ndim > _MAX_DIMS:
        raise InvalidArgumentError(f"{name}: expected up to {_MAX_DIMS} dimensions, got {array.ndim}", param=name)
    return array


def _checked_dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    try:
        data_type = np.dtype(np.float32 if dtype is None else dtype)
    except TypeError:
        raise refusal("dtype", "one of DataType", dtype) from None
    if data_type not in _TYPES:
        raise InvalidArgumentError(f"dtype: expected one of DataType, got {data_type}", param="dtype")
    return data_type


def _checked_shape(shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is not None and not isinstance(shape, (list, tuple)):
        raise refusal("shape", "a list of sizes", shape)
    sizes = () if shape is None else tuple(shape)
    for size in sizes:
        if not is_integer(size, 0, sys.maxsize):
            raise refusal("shape", "integers from 0", size)
    if len(sizes) > _MAX_DIMS or math.prod(sizes) > _MAX_BYTES:
        raise InvalidArgumentError(
            f"shape: expected up to {_MAX_DIMS} dimensions and 2^40 elements, got {list(sizes)}", param="shape"
        )
    return tuple(int(size) for size in sizes)
