"""Requests and responses of the Open Inference Protocol as protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import FieldError
from penstock.config import show
from penstock.serving.oip.tensor_codec import (
    MAX_TENSORS,
    byte_array,
    check_head,
    check_id,
    check_new,
    frozen,
    in_pieces,
    raw_array,
    wrong,
)
from penstock.serving.proto import oip_pb2 as pb
from penstock.tensors import DTYPES, InferRequest, InferResponse, Tensor
from penstock.tensors.codec import encode_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["message_of", "read_message", "set_parameter"]

_FIELDS: Final = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The fields of typed contents by datatype; FP16 and BF16 have none."""
_SIZE: Final = "binary_data_size"
_NARROW: Final = frozenset({"INT8", "INT16", "UINT8", "UINT16"})
"""Datatypes that are narrower than their field."""


def read_message(message: pb.ModelInferRequest) -> InferRequest:
    """Decode a request, except for its model and version.

    Raw contents are not copied; ``parameters`` are not checked.  Raises FieldError with the name of the input, output
    or parameter at fault.
    """
    check_id(message.id)
    raws = message.raw_input_contents
    if len(message.inputs) > MAX_TENSORS:
        raise FieldError("inputs", f"inputs must be at most {MAX_TENSORS} tensors, not {len(message.inputs)}")
    if raws and len(raws) != len(message.inputs):
        raise FieldError(
            "raw_input_contents",
            f"raw_input_contents must have one entry for each of {len(message.inputs)} inputs, not {len(raws)}",
        )
    tensors: dict[str, Tensor] = {}
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        check_new(name, tensors, index)
        if tensor.parameters:
            _check_parameters(tensor, raws[index] if raws else None)
        tensors[name] = Tensor(name, tensor.datatype, _array(tensor, raws[index] if raws else None))
    return InferRequest(message.id, tensors, _outputs(message), _parameters(message.parameters))


def _check_parameters(message: Any, raw: bytes | None) -> None:
    """Check an input's parameters: only the size of its raw contents is accepted, which some clients send."""
    what = f"the input {show(message.name)}"
    for name, size in _parameters(message.parameters).items():
        if name != _SIZE or raw is None:
            raise wrong(message.name, f"{what} has an unknown parameter: {show(name)}", "unknown")
        if size != len(raw):
            raise wrong(message.name, f"{what} has {len(raw)} bytes, but its {_SIZE} is {show(size)}")


def _array(message: Any, raw: bytes | None) -> NDArray[Any]:
    name = message.name
    if raw is None:
        return _typed(message)
    if message.HasField("contents"):
        raise wrong(name, f"the input {show(name)} must have contents or raw_input_contents, not both")
    return raw_array(name, message.datatype, message.shape, raw)


def _typed(message: Any) -> NDArray[Any]:
    name, datatype, what = message.name, message.datatype, f"the input {show(message.name)}"
    count = check_head(name, datatype, message.shape)
    shape = tuple(message.shape)
    field = _FIELDS.get(datatype)
    if field is None:
        raise wrong(name, f"{what} is {datatype}, which must be sent in raw_input_contents")
    others = [
        field_descriptor.name for field_descriptor, _ in message.contents.ListFields() if field_descriptor.name != field
    ]
    if others:
        raise wrong(name, f"{what} is {datatype}: its elements must be in {field}, not in {others[0]}")
    values = getattr(message.contents, field)
    if len(values) != count:
        raise wrong(name, f"{what} has {show(count)} elements by its shape, but {len(values)} in {field}")
    if datatype == "BYTES":
        return byte_array(list(values), shape)
    array, at = np.empty(count, DTYPES[datatype]), 0
    bounds = np.iinfo(DTYPES[datatype]) if datatype in _NARROW else None
    for piece in in_pieces(values):
        if bounds is not None and (min(piece) < bounds.min or max(piece) > bounds.max):
            raise wrong(name, f"{what} is {datatype}: numbers must be from {bounds.min} to {bounds.max}")
        array[at : at + len(piece)] = piece
        at += len(piece)
    return frozen(array.reshape(shape))


def _outputs(message: pb.ModelInferRequest) -> tuple[str, ...]:
    """Return the names of the requested outputs, in order."""
    if len(message.outputs) > MAX_TENSORS:
        raise FieldError("outputs", f"outputs must be at most {MAX_TENSORS} names, not {len(message.outputs)}")
    names: list[str] = []
    for output in message.outputs:
        if output.name in names:
            raise wrong(output.name, f"the output {show(output.name)} is requested twice")
        if output.parameters:
            text = f"the output {show(output.name)} has an unknown parameter: {show(min(output.parameters))}"
            raise wrong(output.name, text, "unknown")
        names.append(output.name)
    return tuple(names)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a message's parameters.  Raises FieldError for a parameter without a value."""
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise wrong(name, f"parameters[{show(name)}] has no value")
        values[name] = getattr(parameter, choice)
    return values


def message_of(response: InferResponse, model: str, request_id: str) -> pb.ModelInferResponse:
    """Return a response with raw contents as a message."""
    response_message = pb.ModelInferResponse(model_name=model, model_version=response.version, id=request_id)
    for output in response.outputs:
        response_message.outputs.add(name=output.name, datatype=output.datatype, shape=output.array.shape)
        response_message.raw_output_contents.append(encode_array(output.datatype, output.array))
    for name, value in response.parameters.items():
        set_parameter(response_message, name, value)
    return response_message


def set_parameter(message: Any, name: str, value: bool | int | float | str) -> None:
    """Set a parameter of a message by the type of its value."""
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    setattr(message.parameters[name], kinds[type(value)], value)
