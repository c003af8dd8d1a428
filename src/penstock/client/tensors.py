"""Tensors of the Open Inference Protocol at a client: numpy's arrays and lists to what is sent, and answers back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import InvalidArgumentError, ServiceError
from penstock.tensors import DTYPES, Tensor
from penstock.tensors.codec import bfloat16_to_float32, bytes_array, decode_array, encode_array

__all__ = ["InferResult", "array_of", "array_of_list", "listed", "raw_of", "tensor_of"]

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if name not in ("BF16", "BYTES")}


class InferResult(dict[str, Any]):
    """The outputs of one inference as numpy arrays by name, with ``model``, ``version`` and ``parameters`` of it.

    An element of BYTES (texts, too) is a ``bytes`` object; BF16 comes as float32, which holds it exactly.
    """

    def __init__(
        self, outputs: Mapping[str, NDArray[Any]], model: str, version: str, parameters: Mapping[str, Any]
    ) -> None:
        super().__init__(outputs)
        self.model, self.version, self.parameters = model, version, parameters

    @property
    def errors(self) -> dict[int, ServiceError]:
        """By number the instances that failed, where the request has the parameter ``per_instance_errors``; their rows
        of the outputs are zeros, or empty.
        """
        found = json.loads(self.parameters.get("errors", "[]"))
        return {one["instance"]: ServiceError(one["message"], one["status"], code=one["code"]) for one in found}


def tensor_of(name: str, value: Any) -> Tensor:
    """A tensor of an array or of nested lists; InvalidArgumentError names it.

    In lists whole numbers are INT64, others FP32, and texts BYTES; an array has the datatype of its dtype, also the
    bfloat16 of ml_dtypes.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    else:
        try:
            array = np.asarray(value)
            if array.dtype.kind in "SUO":  # numpy takes zeros off the end of what it knows to be bytes
                array = np.array(value, dtype=object)
        except ValueError:
            raise InvalidArgumentError(f"input {name}: its lists differ in length") from None
        if array.dtype == np.float64:
            array = array.astype("<f4")
    if array.dtype.kind in "SUO":
        return Tensor(name, "BYTES", bytes_array([_bytes(name, one) for one in array.ravel().tolist()], array.shape))
    if array.dtype.name == "bfloat16":
        return Tensor(name, "BF16", array.view("<u2"))
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    datatype = _NAMES.get(array.dtype)
    if datatype is None:
        raise InvalidArgumentError(f"input {name}: {array.dtype} is no type of the protocol, which has {_has()}")
    return Tensor(name, datatype, array)


def _has() -> str:
    return ", ".join(str(dtype) for dtype in _NAMES) + ", bfloat16, bytes and str"


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise InvalidArgumentError(f"input {name}: expected numbers, texts or bytes, found {type(value).__name__}")


def raw_of(tensor: Tensor) -> bytes:
    """Return a tensor as bytes; see ``penstock.tensors.codec``."""
    return encode_array(tensor.datatype, tensor.array)


def listed(tensor: Tensor) -> list[Any]:
    """A tensor's elements as JSON has them; InvalidArgumentError for bytes that are no text."""
    if tensor.datatype == "BYTES":
        try:
            return [one.decode() for one in tensor.array.ravel().tolist()]
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"input {tensor.name}: JSON cannot hold these bytes: leave binary on") from None
    array = bfloat16_to_float32(tensor.array) if tensor.datatype == "BF16" else tensor.array
    found: list[Any] = array.ravel().tolist()
    return found


def array_of(datatype: str, shape: Sequence[int], raw: bytes) -> NDArray[Any]:
    """The array of an output that came as bytes; ConnectionError when they do not fit its shape."""
    if datatype not in DTYPES:
        raise ConnectionError(f"{len(raw)} bytes came for a tensor of {datatype}")
    try:
        array = decode_array(datatype, shape, math.prod(shape), raw)
    except ValueError as error:
        raise ConnectionError(f"a tensor of {datatype} {error}") from None
    return bfloat16_to_float32(array) if datatype == "BF16" else array


def array_of_list(datatype: str, shape: Sequence[int], data: Sequence[Any]) -> NDArray[Any]:
    """The array of an output that came as JSON; ConnectionError when it does not fit its shape."""
    if len(data) != math.prod(shape) or datatype not in DTYPES:
        raise ConnectionError(f"{len(data)} elements came for {datatype} of {list(shape)}")
    if datatype == "BYTES":
        return bytes_array([str(one).encode() for one in data], shape)
    dtype = np.dtype("<f4") if datatype == "BF16" else DTYPES[datatype]
    return np.array(data, dtype).reshape(tuple(shape))
