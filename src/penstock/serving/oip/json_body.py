"""JSON bodies of the Open Inference Protocol, with its extension for binary tensors after the JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import RefusalError
from penstock.config import show
from penstock.serving.call import encoded
from penstock.serving.oip import bodies
from penstock.serving.oip.tensor_codec import (
    What,
    byte_array,
    check_head,
    check_new,
    frozen,
    raw_array,
    wrong,
)
from penstock.serving.request_decoding import converted, decode_body
from penstock.tensors import DTYPES, InferRequest, InferResponse, Tensor
from penstock.tensors.codec import bfloat16_to_float32, encode_array, float32_to_bfloat16

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["InferBody", "body_of", "read_body"]


@dataclass(frozen=True, slots=True)
class InferBody:
    """A request, and the outputs that the client wants as bytes: ``binary`` by name, ``is_binary`` for the others.

    ``repeated``: fields of the body that repeat the path, without empty strings.
    """

    request: InferRequest
    is_binary: bool
    binary: Mapping[str, bool]
    repeated: Mapping[str, str]

    def check_path(self, name: str, version: str) -> None:
        """Raise FieldError if the body names another model or version than the path."""
        for field, expected in (("model_name", name), ("model_version", version)):
            if self.repeated.get(field, expected) != expected:
                raise wrong(field, f"{field} must be {show(expected)} as in the path, not {show(self.repeated[field])}")


def read_body(data: bytes, json_bytes: int) -> InferBody:
    """Decode a body whose first ``json_bytes`` bytes are JSON.  Raises RefusalError.

    The remaining bytes belong to the inputs with ``binary_data_size``, in order.
    """
    if json_bytes > len(data):
        raise _not_read(f"body: expected {show(json_bytes)} bytes of JSON, got {len(data)} in all")
    body = decode_body(data[:json_bytes], bodies.InferenceRequest)
    parameters = body.parameters or {}
    is_binary: bool = converted(parameters.pop("binary_data_output", False), bool, "binary_data_output")
    raw, at = memoryview(data)[json_bytes:], 0
    inputs: dict[str, Tensor] = {}
    for index, tensor in enumerate(body.inputs):
        name = tensor.name
        check_new(name, inputs, index)
        num_bytes = None if tensor.parameters is None else tensor.parameters.binary_data_size
        if num_bytes is None:
            array = _array(tensor, What(name))
        else:
            if tensor.data is not None:
                raise wrong(name, f"the input {show(name)} must have data or binary_data_size, not both")
            if num_bytes > len(raw) - at:
                raise wrong(
                    name,
                    f"the input {show(name)} has binary_data_size {num_bytes}, but {len(raw) - at} bytes are left",
                )
            array = raw_array(name, tensor.datatype, tensor.shape, raw[at : at + num_bytes])
            at += num_bytes
        inputs[name] = Tensor(name, tensor.datatype, array)
    if at != len(raw):
        raise _not_read(f"body: expected {at} bytes after the JSON by binary_data_size, got {len(raw)}")
    binary: dict[str, bool] = {}
    for output in body.outputs or ():
        if output.name in binary:
            raise wrong(output.name, f"the output {show(output.name)} is requested twice")
        own = None if output.parameters is None else output.parameters.binary_data
        binary[output.name] = is_binary if own is None else own
    repeated = {name: value for name in ("model_name", "model_version") if (value := getattr(body, name))}
    return InferBody(InferRequest(body.id or "", inputs, tuple(binary), parameters), is_binary, binary, repeated)


def _not_read(message: str) -> RefusalError:
    """Return the error for a body whose parts do not have the stated lengths."""
    return RefusalError(400, message, code="invalid_json")


def _array(tensor: bodies.InferInput, what: What) -> NDArray[Any]:
    """Return the elements of an input whose data is JSON."""
    name, datatype, shape, data = tensor.name, tensor.datatype, tensor.shape, tensor.data
    count = check_head(name, datatype, shape)
    if data is None:
        raise wrong(name, f"{what} has neither data nor binary_data_size", "missing")
    if not isinstance(data, list):
        raise wrong(name, f"{what} must have a list as data, not {show(data)}")
    elements = _flat(data, shape, name, what)
    if len(elements) != count:
        raise wrong(name, f"{what} has {show(count)} elements by its shape, but {len(elements)} in data")
    kinds = set(map(type, elements))
    allowed = _KINDS.get(datatype, {int})
    if kinds - allowed:
        wrong_element = next(element for element in elements if type(element) not in allowed)
        raise wrong(
            name, f"{what} is {datatype}: data must be {_WORDS.get(datatype, 'integers')}, not {show(wrong_element)}"
        )
    if datatype == "BYTES":
        return byte_array([text.encode() for text in elements], shape)
    return frozen(_numbers(elements, datatype, name, what).reshape(tuple(shape)))


_FLOATS: Final = ("FP16", "BF16", "FP32", "FP64")
_KINDS: Final[dict[str, set[type]]] = {"BOOL": {bool}, "BYTES": {str}, **{name: {int, float} for name in _FLOATS}}
"""The JSON types of elements; integers for the other datatypes."""
_WORDS: Final = {"BOOL": "true or false", "BYTES": "strings", **dict.fromkeys(_FLOATS, "numbers")}


def _flat(data: list[Any], shape: Sequence[int], name: str, what: What) -> list[Any]:
    """Return the elements in row-major order from flat or nested lists."""
    level = data
    if not any(type(element) is list for element in level[:1]):
        return level
    for dim, size in enumerate(shape):
        if dim == 0:
            if len(level) != size:
                raise wrong(name, f"{what} has {size} rows by its shape, but {len(level)} in its data")
            continue
        if any(type(element) is not list or len(element) != size for element in level):
            raise wrong(name, f"{what}: expected lists of {size} elements at level {dim} of the data, by its shape")
        level = list(chain.from_iterable(level))
    return level


_FEW: Final = 1 << 10
_LARGEST: Final = {name: float(np.finfo(DTYPES[name]).max) for name in _FLOATS if name != "BF16"}


def _numbers(elements: list[Any], datatype: str, name: str, what: What) -> NDArray[Any]:
    kind = DTYPES[datatype]
    if kind.kind in "iu" and datatype != "BF16":
        bounds = np.iinfo(kind)
        if elements and (min(elements) < bounds.min or max(elements) > bounds.max):
            raise wrong(name, f"{what} is {datatype}: numbers must be from {bounds.min} to {bounds.max}")
        return np.array(elements, kind)
    if datatype == "BOOL":
        return np.array(elements, kind)
    if len(elements) <= _FEW and datatype != "BF16" and elements:
        largest = _LARGEST[datatype]
        if -largest <= min(elements) and max(elements) <= largest:
            return np.array(elements, kind)
    try:
        wide = np.array(elements, "<f8")
    except OverflowError:
        wide = np.array([math.inf])
    with np.errstate(over="ignore"):
        numbers = wide.astype("<f4" if datatype == "BF16" else kind)
    if datatype == "BF16":
        rounded = float32_to_bfloat16(numbers)
        numbers = bfloat16_to_float32(rounded)
    if not np.isfinite(numbers).all():
        raise wrong(name, f"{what} is {datatype}, but has numbers outside its range")
    return rounded if datatype == "BF16" else numbers


def body_of(body: InferBody, model: str, response: InferResponse) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON in bytes if binary tensors follow, else None.

    Raises a 400 error for an output that JSON cannot represent, which the client may request as bytes.
    """
    outputs, raws = [], []
    for output in response.outputs:
        description: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": [*output.array.shape]}
        if body.binary.get(output.name, body.is_binary):
            raws.append(encode_array(output.datatype, output.array))
            description["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            description["data"] = _listed(output)
        outputs.append(description)
    head: dict[str, Any] = {"model_name": model, "model_version": response.version, "outputs": outputs}
    if body.request.request_id:
        head["id"] = body.request.request_id
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    try:
        text = encoded(head).encode()
    except ValueError:
        raise _not_finite(response.outputs) from None
    return (b"".join((text, *raws)), len(text)) if raws else (text, None)


def _listed(tensor: Tensor) -> list[Any]:
    """Return the elements of a tensor as a list for JSON."""
    array = bfloat16_to_float32(tensor.array) if tensor.datatype == "BF16" else tensor.array
    values: list[Any] = array.ravel().tolist()
    if tensor.datatype == "BYTES":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            raise _not_json(tensor.name, "bytes that are not UTF-8") from None
    return values


def _not_finite(outputs: Sequence[Tensor]) -> RefusalError:
    """Return the error for an output with numbers that the JSON encoder refused."""
    for output in outputs:
        array = bfloat16_to_float32(output.array) if output.datatype == "BF16" else output.array
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return _not_json(output.name, "numbers that are not finite")
    raise ValueError("the response cannot be encoded as JSON")


def _not_json(name: str, what: str) -> RefusalError:
    message = f"the output {show(name)} contains {what}, which JSON cannot represent. Request it with binary_data true."
    return RefusalError(400, message, param=name, code="not_json")
