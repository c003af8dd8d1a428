"""Tensors of the Open Inference Protocol: from a message to checked values, and back.

Every size that a message names is compared with the bytes that it brings before anything is made of that size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.config import show
from penstock.serving import oip_pb2 as pb
from penstock.serving.shapes import MisfitError

__all__ = ["DATATYPES", "Tensor", "add_output", "parameters_of", "read_inputs"]

MAX_TENSORS: Final = 64
MAX_DIMS: Final = 16
MAX_ELEMENTS: Final = 1 << 20
MAX_BYTES_ELEMENTS: Final = 1 << 14
MAX_NAME_CHARS: Final = 256
_PIECE: Final = 1 << 14

_NUMBERS: Final[dict[str, tuple[str, str]]] = {
    "BOOL": ("?", "bool_contents"),
    "UINT8": ("u1", "uint_contents"),
    "UINT16": ("<u2", "uint_contents"),
    "UINT32": ("<u4", "uint_contents"),
    "UINT64": ("<u8", "uint64_contents"),
    "INT8": ("i1", "int_contents"),
    "INT16": ("<i2", "int_contents"),
    "INT32": ("<i4", "int_contents"),
    "INT64": ("<i8", "int64_contents"),
    "FP16": ("<f2", ""),
    "BF16": ("<u2", ""),
    "FP32": ("<f4", "fp32_contents"),
    "FP64": ("<f8", "fp64_contents"),
}
"""numpy's type of a datatype's raw bytes, and the field of typed contents; FP16 and BF16 have none."""
DATATYPES: Final = (*_NUMBERS, "BYTES")


@dataclass(frozen=True)
class Tensor:
    """A checked input: ``values`` are its elements in row-major order, as many as ``shape`` has; BYTES are bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Any]


def _wrong(name: str, message: str, kind: str = "value") -> MisfitError:
    return MisfitError(name[:MAX_NAME_CHARS], message, kind)


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Tensor]:
    """The inputs by name; MisfitError with the name of the one that is wrong."""
    raws = request.raw_input_contents
    if len(request.inputs) > MAX_TENSORS:
        raise _wrong("inputs", f"inputs must be at most {MAX_TENSORS} tensors, not {len(request.inputs)}")
    if raws and len(raws) != len(request.inputs):
        raise _wrong(
            "raw_input_contents",
            f"raw_input_contents must have one entry for each of {len(request.inputs)} inputs, not {len(raws)}",
        )
    found: dict[str, Tensor] = {}
    for index, message in enumerate(request.inputs):
        name = message.name
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise _wrong(
                f"inputs[{index}]",
                f"inputs[{index}] must have a name of 1 to {MAX_NAME_CHARS} characters: {show(name)}",
            )
        if name in found:
            raise _wrong(name, f"the input {show(name)} is there twice")
        if message.parameters:
            first = min(message.parameters)
            raise _wrong(name, f"the input {show(name)} has a parameter {show(first)}, which is not known", "unknown")
        found[name] = _read(message, raws[index] if raws else None)
    return found


def _read(message: Any, raw: bytes | None) -> Tensor:
    name, datatype = message.name, message.datatype
    what = f"the input {show(name)}"
    if datatype not in DATATYPES:
        raise _wrong(name, f"{what} must have one of the datatypes {', '.join(DATATYPES)}, not {show(datatype)}")
    if len(message.shape) > MAX_DIMS:  # millions of them fit into a message
        raise _wrong(name, f"{what} must have a shape of up to {MAX_DIMS} sizes, not {len(message.shape)}")
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise _wrong(name, f"{what} must have a shape of sizes from 0 on, not {show([*shape])}")
    count, most = math.prod(shape), MAX_BYTES_ELEMENTS if datatype == "BYTES" else MAX_ELEMENTS
    if count > most:
        raise _wrong(name, f"{what} has {show(count)} elements by its shape; {datatype} may have {most}")
    if raw is None:
        return Tensor(name, datatype, shape, _typed(message, what, count))
    if message.HasField("contents"):
        raise _wrong(name, f"{what} must have contents or raw_input_contents, not both")
    values = _byte_elements(raw, what, name, count) if datatype == "BYTES" else _raw(raw, what, message, count)
    return Tensor(name, datatype, shape, values)


def _typed(message: Any, what: str, count: int) -> list[Any]:
    name, datatype, contents = message.name, message.datatype, message.contents
    field = "bytes_contents" if datatype == "BYTES" else _NUMBERS[datatype][1]
    if not field:
        raise _wrong(name, f"{what} is {datatype}, which raw_input_contents alone can hold")
    others = [one.name for one, _ in contents.ListFields() if one.name != field]
    if others:
        raise _wrong(name, f"{what} is {datatype}: its elements belong into {field}, not into {others[0]}")
    values = getattr(contents, field)
    if len(values) != count:
        raise _wrong(name, f"{what} has {count} elements by its shape, but {len(values)} in {field}")
    bounds = np.iinfo(_NUMBERS[datatype][0]) if datatype in ("INT8", "INT16", "UINT8", "UINT16") else None
    found: list[Any] = []
    for piece in in_pieces(values):
        if bounds is not None and (min(piece) < bounds.min or max(piece) > bounds.max):
            raise _wrong(name, f"{what} is {datatype}, but holds numbers beyond {bounds.min} to {bounds.max}")
        found += piece
    return found


def _raw(raw: bytes, what: str, message: Any, count: int) -> list[Any]:
    datatype = message.datatype
    kind = np.dtype(_NUMBERS[datatype][0])
    if len(raw) != count * kind.itemsize:
        raise _wrong(
            message.name, f"{what} has {count * kind.itemsize} bytes by its shape and datatype, but {len(raw)} came"
        )
    if datatype == "BOOL" and raw.translate(None, b"\0\1"):
        raise _wrong(message.name, f"{what} is BOOL: its bytes must be 0 or 1")
    array = np.frombuffer(raw, kind)
    if datatype == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return [value for piece in in_pieces(array) for value in piece.tolist()]


def in_pieces(values: Any) -> Iterator[Any]:
    """Slices of many elements: a thread that makes a million objects in one call lets no other run meanwhile."""
    return (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))


def _byte_elements(raw: bytes, what: str, name: str, count: int) -> list[bytes]:
    """Each element is its length in four bytes, the lowest first, then so many bytes."""
    found, at = [], 0
    for index in range(count):
        end = at + 4
        if end <= len(raw):
            end += int.from_bytes(raw[at:end], "little")
        if at + 4 > len(raw) or end > len(raw):
            raise _wrong(name, f"{what} ends inside of element {index} of {count}")
        found.append(raw[at + 4 : end])
        at = end
    if at != len(raw):
        raise _wrong(name, f"{what} has {len(raw) - at} bytes behind its {count} elements")
    return found


def parameters_of(given: Mapping[str, Any], what: str = "parameters") -> dict[str, Any]:
    """The values of a message's parameters; MisfitError for one that has none."""
    found: dict[str, Any] = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise _wrong(name, f"{what}[{show(name)}] has no value")
        found[name] = getattr(parameter, choice)
    return found


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]
) -> None:
    """Append an output with its raw contents: texts for BYTES, else numbers in row-major order."""
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    if datatype == "BYTES":
        texts = [text.encode() for text in values]
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in texts))
    else:
        response.raw_output_contents.append(np.asarray(values, _NUMBERS[datatype][0]).tobytes())
