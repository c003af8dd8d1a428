"""A general network in plain Python: tensors with names in, tensors with names out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import is_integer
from penstock.core import native
from penstock.core.predict import NUMPY_DTYPES, NetworkProgram, NetworkValue
from penstock.errors import InvalidArgumentError
from penstock.lite.affinity import BoundContext
from penstock.lite.inputs import named_tensors
from penstock.lite.tensor import Tensor, array_of
from penstock.validation import refusal

__all__ = ["BoundNetwork", "FreeTensor"]


class FreeTensor(Tensor):
    """A tensor whose shape is not known yet: -1 stands for a size that data or ``Model.resize`` sets."""

    __slots__ = ("_free_shape",)

    def __init__(self, value: NetworkValue) -> None:
        shape = [max(size, 0) for size in value.shape]
        super().__init__(name=value.name, dtype=NUMPY_DTYPES[value.dtype], shape=shape)
        self._free_shape: tuple[int, ...] | None = value.shape

    @property
    def shape(self) -> list[int]:
        """The number of elements in each dimension; -1 is not known yet."""
        return list(self._array.shape) if self._free_shape is None else list(self._free_shape)

    def set_data_from_numpy(self, numpy_obj: npt.NDArray[Any]) -> None:
        """Copy an array into this tensor, which takes its shape the first time; else as ``Tensor`` does."""
        free = self._free_shape
        if free is not None and isinstance(numpy_obj, np.ndarray):
            fits = len(free) == numpy_obj.ndim
            if not fits or any(size not in (-1, n) for size, n in zip(free, numpy_obj.shape, strict=True)):
                raise InvalidArgumentError(
                    f"numpy_obj: shape: expected {list(free)}, got {list(numpy_obj.shape)}", param="numpy_obj"
                )
            filled = Tensor(name=self.name, dtype=self.dtype, shape=numpy_obj.shape)
            filled.set_data_from_numpy(numpy_obj)  # a refused array changes nothing
            self._array, self._free_shape = array_of(filled), None
            return
        super().set_data_from_numpy(numpy_obj)


class BoundNetwork:
    """The program of a general network, as ``Model`` sees it."""

    def __init__(self, model: native.Model, context: BoundContext) -> None:
        self._program = NetworkProgram(model, context.native)
        self._shapes: list[tuple[int, ...]] | None = None  # that resize has set
        self._output_shapes: list[tuple[int, ...]] | None = None
        if all(-1 not in value.shape for value in self._program.inputs):
            self._prepare([value.shape for value in self._program.inputs])

    def inputs(self) -> list[Tensor]:
        """Return new tensors for the inputs: zeros, or without data where sizes are not known."""
        if self._shapes is None:
            return [FreeTensor(value) for value in self._program.inputs]
        pairs = zip(self._program.inputs, self._shapes, strict=True)
        return [Tensor(name=value.name, dtype=NUMPY_DTYPES[value.dtype], shape=shape) for value, shape in pairs]

    def outputs(self) -> list[Tensor]:
        """Return new tensors for the outputs, likewise."""
        if self._output_shapes is None:
            return [FreeTensor(value) for value in self._program.outputs]
        pairs = zip(self._program.outputs, self._output_shapes, strict=True)
        return [Tensor(name=value.name, dtype=NUMPY_DTYPES[value.dtype], shape=shape) for value, shape in pairs]

    def resize(self, inputs: Sequence[Tensor], dims: Sequence[Sequence[int]]) -> None:
        """Plan the memory for inputs of the shapes ``dims``, in the order of ``inputs``."""
        names = [value.name for value in self._program.inputs]
        tensors = named_tensors(inputs, "inputs", names)
        if not isinstance(dims, (list, tuple)) or len(dims) != len(names):
            raise refusal("dims", f"{len(names)} shapes, one per input", dims)
        for shape in dims:
            if not isinstance(shape, (list, tuple)) or not all(is_integer(size, 0, 1 << 31) for size in shape):
                raise refusal("dims", "shapes of integers from 0", shape)
        by_tensor = {id(tensor): shape for tensor, shape in zip(inputs, dims, strict=True)}
        self._prepare([tuple(by_tensor[id(tensor)]) for tensor in tensors])

    def _prepare(self, shapes: list[tuple[int, ...]]) -> None:
        self._output_shapes = self._program.prepare(shapes)
        self._shapes = shapes

    def predict(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None) -> list[Tensor]:
        """Run the network; return new tensors, or ``outputs`` filled with the results."""
        tensors = named_tensors(inputs, "inputs", [value.name for value in self._program.inputs])
        for tensor in tensors:
            if -1 in tensor.shape:
                raise InvalidArgumentError(
                    f"{tensor.name}: expected data, got a tensor without; call set_data_from_numpy", param=tensor.name
                )
        arrays = [array_of(tensor) for tensor in tensors]
        results = self._program.predict(arrays, copy=outputs is None)
        pairs = list(zip(results, self._program.outputs, strict=True))
        if outputs is None:
            return [Tensor(array, name=value.name) for array, value in pairs]
        targets = named_tensors(outputs, "outputs", [value.name for value in self._program.outputs])
        for target, (array, value) in zip(targets, pairs, strict=True):
            _check_target(target, array, value.name)
        for target, (array, _) in zip(targets, pairs, strict=True):
            array_of(target)[...] = array
        return list(targets)

    def describe(self) -> dict[str, Any]:
        """Return the entries of ``get_model_info`` of the program."""
        return {
            "inputs": {value.name: list(value.sizes) for value in self._program.inputs},
            "outputs": {value.name: list(value.sizes) for value in self._program.outputs},
        }

    def close(self) -> None:
        """Free the memory."""
        self._program.close()


def _check_target(target: Tensor, array: npt.NDArray[Any], name: str) -> None:
    own = array_of(target)
    if own.dtype != array.dtype or own.shape != array.shape:
        raise InvalidArgumentError(
            f"{name}: expected {array.dtype} {list(array.shape)}, got {own.dtype} {list(own.shape)}", param=name
        )
    if not own.flags.writeable:
        raise InvalidArgumentError(f"{name}: expected writable memory, got read-only memory", param=name)
