"""Programs of general networks: named arrays in, named arrays out, through the native core."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.config import is_integer
from penstock.core import layouts
from penstock.core.context import Context, Handle, address_of
from penstock.core.layouts import GENERAL_NETWORK
from penstock.core.library import (
    ArrayStruct,
    ProgramOptionsStruct,
    SizeInfoStruct,
    ValueInfoStruct,
    check,
    library,
    sized,
)
from penstock.core.native import Model
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.validation import refusal, wrong_type

__all__ = ["GENERAL_NETWORK", "NUMPY_DTYPES", "NetworkProgram", "NetworkSize", "NetworkValue", "network_inputs",
           "network_outputs", "network_sizes"]  # fmt: skip

_MAX_DIM: Final = (1 << 63) - 1
Array = npt.NDArray[Any]
Inputs = Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]

NUMPY_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    layouts.F32: np.dtype(np.float32),
    layouts.F16: np.dtype(np.float16),
    layouts.BF16: np.dtype(np.uint16),
    layouts.I8: np.dtype(np.int8),
    layouts.I32: np.dtype(np.int32),
    layouts.U8: np.dtype(np.uint8),
    layouts.I64: np.dtype(np.int64),
    layouts.BOOL: np.dtype(np.bool_),
}
"""The numpy dtype of each ``ps_dtype``; numpy has no bf16, so its arrays hold the bits."""


@dataclass(frozen=True)
class NetworkValue:
    """An input or an output.  ``dtype`` is a ``ps_dtype``; ``sizes`` are the expressions of its dims."""

    name: str
    dtype: int
    sizes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims; -1 for one that depends on a size of the network."""
        return tuple(int(size) if size.isdecimal() else -1 for size in self.sizes)


@dataclass(frozen=True)
class NetworkSize:
    """A size that the dims of the inputs tell: from ``min`` to ``max``, and a multiple of ``multiple``."""

    name: str
    min: int
    max: int
    multiple: int
    example: int


def _split(text: str) -> tuple[str, ...]:
    """Return the expressions of a list; commas inside parentheses belong to an expression."""
    parts, depth = [""] if text else [], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(parts)


def _values(model: Model, function: str, count: int) -> list[NetworkValue]:
    values = []
    for index in range(count):
        out = sized(ValueInfoStruct)
        check(getattr(library(), function)(model.handle, index, ctypes.byref(out)))
        values.append(NetworkValue(out.name.decode(), out.dtype, _split(out.sizes.decode())))
    return values


def network_inputs(model: Model) -> list[NetworkValue]:
    """Return the inputs of a general network; of another model none."""
    return _values(model, "ps_model_input", model.info.num_inputs)


def network_outputs(model: Model) -> list[NetworkValue]:
    """Return the outputs of a general network; of another model none."""
    return _values(model, "ps_model_output", model.info.num_outputs)


def network_sizes(model: Model) -> list[NetworkSize]:
    """Return the sizes of a general network; of another model none."""
    sizes = []
    for index in range(model.info.num_sizes):
        out = sized(SizeInfoStruct)
        check(library().ps_model_size(model.handle, index, ctypes.byref(out)))
        sizes.append(NetworkSize(out.name.decode(), out.min, out.max, out.multiple, out.example))
    return sizes


class NetworkProgram(Handle):
    """A general network with its memory, which is planned for the shapes of each run."""

    _destroy = "ps_program_destroy"

    def __init__(self, model: Model, context: Context, flags: int = 0) -> None:
        """Make a program.  ``flags`` are those of ``ProgramOptions``, for tests and measurements."""
        if model.info.kind != GENERAL_NETWORK:
            raise UnsupportedError("model: expected a general network, got a language model", param="model")
        options, out = sized(ProgramOptionsStruct), ctypes.c_void_p()
        at = model.handle, context.handle, ctypes.byref(options), flags, ctypes.byref(out)
        check(library().ps_program_create_flagged(*at))
        super().__init__(address_of(out))
        self._model, self._context = model, context
        self.inputs, self.outputs = network_inputs(model), network_outputs(model)

    def predict(self, arrays: Inputs, *, copy: bool = True) -> list[Array]:
        """Run the network, and return its outputs.

        Inputs are in the order of ``inputs``, or by name.  With ``copy`` False the outputs are views, which the next
        ``predict`` or ``prepare`` makes invalid: reading them afterwards may crash the process.
        """
        pairs = zip(self.inputs, self._in_order(arrays), strict=True)
        inputs = [self._as_input(value, array) for value, array in pairs]
        self._call("ps_program_predict", [(array.ctypes.data, array.shape) for array in inputs])
        outputs = [self._output(index) for index in range(len(self.outputs))]
        return [output.copy() for output in outputs] if copy else outputs

    def prepare(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Plan the memory for inputs of these shapes, and return the shapes of the outputs."""
        if len(shapes) != len(self.inputs):
            raise InvalidArgumentError(f"shapes: expected {len(self.inputs)}, got {len(shapes)}", param="shapes")
        self._call("ps_program_prepare", [(None, tuple(shape)) for shape in shapes])
        return [tuple(self._struct(index).dims[: self._struct(index).ndim]) for index in range(len(self.outputs))]

    def _call(self, function: str, arrays: Sequence[tuple[int | None, tuple[int, ...]]]) -> None:
        _ = self._model.handle, self._context.handle
        structs = (ArrayStruct * len(arrays))()
        for struct, value, (address, shape) in zip(structs, self.inputs, arrays, strict=True):
            if len(shape) > 6:
                raise InvalidArgumentError(f"{value.name}: expected up to 6 dims, got {len(shape)}", param=value.name)
            if not all(is_integer(size, 0, _MAX_DIM) for size in shape):
                raise refusal(value.name, "sizes of 0 to 2^63 - 1", list(shape))
            struct.data, struct.dtype, struct.ndim = address, value.dtype, len(shape)
            struct.dims[: len(shape)] = shape
        check(getattr(library(), function)(self.handle, structs, len(arrays)))

    def _in_order(self, arrays: Inputs) -> Sequence[npt.ArrayLike]:
        names = [value.name for value in self.inputs]
        if isinstance(arrays, Mapping):
            if set(arrays) != set(names):
                raise InvalidArgumentError(f"inputs: expected {names}, got {sorted(arrays)}", param="inputs")
            return [arrays[name] for name in names]
        if not hasattr(arrays, "__len__") or not hasattr(arrays, "__iter__"):
            raise wrong_type("inputs", "arrays in order, or by name", arrays)
        if len(arrays) != len(names):
            raise InvalidArgumentError(f"inputs: expected {len(names)} arrays, got {len(arrays)}", param="inputs")
        return arrays

    def _as_input(self, value: NetworkValue, array: npt.ArrayLike) -> Array:
        dense = np.asarray(array, order="C")
        expected = NUMPY_DTYPES[value.dtype]
        if dense.dtype != expected:
            raise InvalidArgumentError(f"{value.name}: expected {expected}, got {dense.dtype}", param=value.name)
        return dense

    def _struct(self, index: int) -> ArrayStruct:
        out = ArrayStruct()
        check(library().ps_program_output(self.handle, index, ctypes.byref(out)))
        return out

    def _output(self, index: int) -> Array:
        out = self._struct(index)
        shape, dtype = tuple(out.dims[: out.ndim]), NUMPY_DTYPES[out.dtype]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._view(out.data, size), dtype).reshape(shape)
