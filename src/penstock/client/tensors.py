"""Convert numpy arrays and lists to tensors of the Open Inference Protocol, and results back to arrays."""

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
    """The outputs of one inference as numpy arrays by name, with its ``model``, ``version`` and ``parameters``.

    BYTES outputs, which include strings, are object arrays of ``bytes``.  BF16 outputs are float32, which is exact.
    """

    def __init__(
        self, outputs: Mapping[str, NDArray[Any]], model: str, version: str, parameters: Mapping[str, Any]
    ) -> None:
        super().__init__(outputs)
        self.model, self.version, self.parameters = model, version, parameters

    @property
    def errors(self) -> dict[int, ServiceError]:
        """The failed instances by their index in the batch, if the request has the parameter ``per_instance_errors``.

        The outputs of a failed instance are zeros or empty bytes.
        """
        errors = json.loads(self.parameters.get("errors", "[]"))
        return {item["instance"]: ServiceError(item["message"], item["status"], code=item["code"]) for item in errors}


def tensor_of(name: str, value: Any) -> Tensor:
    """Return the tensor of an array or of nested lists.  Raises InvalidArgumentError.

    Lists of integers become INT64, of floats FP32, of strings BYTES.  An array keeps its dtype; ml_dtypes.bfloat16
    becomes BF16.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    else:
        try:
            array = np.asarray(value)
            if array.dtype.kind in "SUO":  # numpy strips trailing zero bytes of its own string types
                array = np.array(value, dtype=object)
        except ValueError:
            raise InvalidArgumentError(f"input {name}: expected nested lists of equal length", param=name) from None
        if array.dtype == np.float64:
            array = array.astype("<f4")
    if array.dtype.kind in "SUO":
        return Tensor(
            name, "BYTES", bytes_array([_bytes(name, element) for element in array.ravel().tolist()], array.shape)
        )
    if array.dtype.name == "bfloat16":
        return Tensor(name, "BF16", array.view("<u2"))
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    datatype = _NAMES.get(array.dtype)
    if datatype is None:
        supported = ", ".join(map(str, _NAMES))
        raise InvalidArgumentError(
            f"input {name}: expected one of the dtypes {supported}, bfloat16, bytes and str, got {array.dtype}",
            param=name,
        )
    return Tensor(name, datatype, array)


def _bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise InvalidArgumentError(
        f"input {name}: expected numbers, strings or bytes, got {type(value).__name__}", param=name
    )


def raw_of(tensor: Tensor) -> bytes:
    """Return a tensor as bytes; see ``penstock.tensors.codec``."""
    return encode_array(tensor.datatype, tensor.array)


def listed(tensor: Tensor) -> list[Any]:
    """Return the elements of a tensor for JSON.  Raises InvalidArgumentError for bytes that are not UTF-8."""
    if tensor.datatype == "BYTES":
        try:
            return [element.decode() for element in tensor.array.ravel().tolist()]
        except UnicodeDecodeError:
            reason = "JSON cannot hold these bytes. Use a client with binary=True."
            raise InvalidArgumentError(f"input {tensor.name}: {reason}", param=tensor.name) from None
    array = bfloat16_to_float32(tensor.array) if tensor.datatype == "BF16" else tensor.array
    elements: list[Any] = array.ravel().tolist()
    return elements


def array_of(datatype: str, shape: Sequence[int], raw: bytes) -> NDArray[Any]:
    """Return the array of an output sent as bytes.  Raises ConnectionError unless they match its shape."""
    if datatype not in DTYPES:
        raise ConnectionError(f"malformed output: {len(raw)} bytes of unknown datatype {datatype}")
    try:
        array = decode_array(datatype, shape, math.prod(shape), raw)
    except ValueError as error:
        raise ConnectionError(f"malformed output: a tensor of {datatype} {error}") from None
    return bfloat16_to_float32(array) if datatype == "BF16" else array


def array_of_list(datatype: str, shape: Sequence[int], data: Sequence[Any]) -> NDArray[Any]:
    """Return the array of an output sent as JSON.  Raises ConnectionError unless it matches its shape."""
    if len(data) != math.prod(shape) or datatype not in DTYPES:
        raise ConnectionError(f"malformed output: {len(data)} elements for {datatype} of shape {list(shape)}")
    if datatype == "BYTES":
        return bytes_array([str(element).encode() for element in data], shape)
    dtype = np.dtype("<f4") if datatype == "BF16" else DTYPES[datatype]
    return np.array(data, dtype).reshape(tuple(shape))
