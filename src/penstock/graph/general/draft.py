"""A general network while it is read, captured and rewritten.

Importers add calls with ``Draft.add``, which infers types and shapes and folds what is constant.  A tensor of integers
whose elements depend on named sizes only, such as the shape of an input, is constant too: its value is an array of
``SizeExpression``.  So the arithmetic on shapes that exporters write disappears.  Passes rewrite the list of calls, and
``lower`` turns it into the graph of a bundle.  The ops are those of ``penstock.ops.general_table``, with ``linear``,
``layer_norm`` and others of language models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InternalError, UnsupportedError
from penstock.graph.general.folding import fold
from penstock.graph.general.shape_rules import infer
from penstock.graph.general.sizes import SizeLike, SizeSymbol, as_text, symbols_of
from penstock.graph.general.source import DraftSource
from penstock.graph.ir import DType

__all__ = ["NUMPY_TYPES", "Attr", "Draft", "DraftCall", "Origin", "Shape", "Tensor", "dtype_of"]

Shape: TypeAlias = tuple[SizeLike, ...]
Attr: TypeAlias = Any  # int, float, str, bool, or a tuple of sizes

NUMPY_TYPES: Final[dict[DType, np.dtype[Any]]] = {
    DType.F32: np.dtype(np.float32), DType.F16: np.dtype(np.float16), DType.I8: np.dtype(np.int8),
    DType.I32: np.dtype(np.int32), DType.U8: np.dtype(np.uint8), DType.I64: np.dtype(np.int64),
    DType.BOOL: np.dtype(np.bool_),
}  # fmt: skip
_TYPES: Final = {numpy_type: dtype for dtype, numpy_type in NUMPY_TYPES.items()}


def dtype_of(array: NDArray[Any]) -> DType:
    """Return the type of an array; one of sizes is int64.  Raises UnsupportedError for a type that has no ops."""
    if array.dtype == object:
        return DType.I64
    if array.dtype not in _TYPES:
        names = ", ".join(str(numpy_type) for numpy_type in _TYPES)
        raise UnsupportedError(f"dtype: expected one of {names}, got {array.dtype}", param="dtype")
    return _TYPES[array.dtype]


@dataclass(eq=False)
class Tensor:
    """A tensor of a draft.  ``value``: of a constant; an array of sizes where it depends on named ones."""

    name: str
    dtype: DType
    shape: Shape
    value: NDArray[Any] | None = None

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __repr__(self) -> str:
        sizes = ", ".join(as_text(size) for size in self.shape)
        return f"{self.name}: {self.dtype.name.lower()} [{sizes}]" + (" constant" if self.value is not None else "")


@dataclass(frozen=True)
class Origin:
    """A value of the source and the tensor that is it: its key in the source, and the place that a message names."""

    key: str
    place: str
    tensor: Tensor


@dataclass(eq=False)
class DraftCall:
    """A call of an op: its arguments in the order of its schema, None for an absent one, and all its attributes.

    ``name`` is the place in the source that a message names: a module or a node.
    """

    op: str
    name: str
    inputs: list[Tensor | None]
    outputs: list[Tensor]
    attrs: dict[str, Attr]

    def argument(self, index: int) -> Tensor:
        """Return an argument that is there."""
        tensor = self.inputs[index]
        if tensor is None:
            raise InternalError(f"{self.name} ({self.op}): argument {index} is absent")
        return tensor

    @property
    def output(self) -> Tensor:
        """The only output."""
        (tensor,) = self.outputs
        return tensor


@dataclass
class Draft:
    """A general network.  ``inputs`` and ``outputs`` keep the names that users know.

    ``properties`` are texts for programs that read the bundle.  ``source`` is what it was made from,
    and ``origins`` are the values of the source that are tensors here.  ``selections``: for the name of each number
    of selected boxes, the most it can be and the tensor that holds it.  ``counts``: for the name of each output with
    room for the most, the axis of the boxes and the name of the output that is their number.
    """

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    calls: list[DraftCall] = field(default_factory=list)
    source: DraftSource | None = None
    origins: list[Origin] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)  # names in use, each with the last number given after it
    properties: dict[str, str] = field(default_factory=dict)
    selections: dict[SizeSymbol, tuple[SizeLike, Tensor]] = field(default_factory=dict)
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def copy(self) -> Draft:
        """Return a draft that passes may rewrite, with the same tensors."""
        calls = [DraftCall(c.op, c.name, list(c.inputs), list(c.outputs), dict(c.attrs)) for c in self.calls]
        copy = Draft(self.name, list(self.inputs), list(self.outputs), list(self.output_names), calls)
        copy._names, copy.properties, copy.counts = dict(self._names), dict(self.properties), dict(self.counts)
        return copy

    def origin(self, key: str, place: str, value: Any) -> None:
        """Remember that a tensor is a value of the source; a constant has nothing to compare."""
        if isinstance(value, Tensor) and value.value is None:
            self.origins.append(Origin(key, place, value))

    def input(self, name: str, dtype: DType, shape: Iterable[SizeLike]) -> Tensor:
        """Add an input."""
        tensor = Tensor(self.free_name(name), dtype, tuple(shape))
        self.inputs.append(tensor)
        return tensor

    def output(self, name: str, tensor: Tensor) -> None:
        """Declare an output, which may be an input or a constant, and the same tensor twice."""
        self.outputs.append(tensor)
        self.output_names.append(name)

    def source_outputs(self) -> list[str]:
        """Return the names of the outputs that the source has: all but the numbers of boxes."""
        counts = {name for _, name in self.counts.values()}
        return [name for name in self.output_names if name not in counts]

    def constant(self, value: Any, name: str = "constant") -> Tensor:
        """Return a constant of an array, of a Python number (f32 or i64), or of a sequence of sizes (i64)."""
        if isinstance(value, float):
            array: NDArray[Any] = np.array(value, np.float32)
        elif isinstance(value, np.ndarray):
            array = value
        else:
            array = np.array(value, dtype=object)
        if array.dtype == object and all(isinstance(item, (int, np.integer)) for item in array.flat):
            array = array.astype(np.int64)
        return Tensor(self.free_name(name), dtype_of(array), array.shape, array)

    def add(self, op: str, *inputs: Tensor | None, name: str = "", **attrs: Attr) -> Tensor:
        """Add a call of an op with one output, and return that.

        Attributes that are left out have the defaults of ``shape_rules``.  A call whose arguments are all constant is
        computed now.  Raises InvalidArgumentError or UnsupportedError with ``name`` for arguments that do not fit.
        """
        outputs = self.add_many(op, *inputs, name=name, **attrs)
        if len(outputs) != 1:
            raise InternalError(f"{name or op}: expected an op with one output, got {len(outputs)}")
        return outputs[0]

    def add_many(self, op: str, *inputs: Tensor | None, name: str = "", **attrs: Attr) -> tuple[Tensor, ...]:
        """Add a call as ``add`` does, and return all its outputs."""
        full, types = infer(op, inputs, attrs, name)
        values = fold(op, inputs, full, types)
        if values is not None:
            pairs = zip(types, values, strict=True)
            return tuple(Tensor(self.free_name(name or op), dtype, v.shape, v) for (dtype, _), v in pairs)
        outputs = [Tensor(self.free_name(name or op), dtype, shape) for dtype, shape in types]
        self.calls.append(DraftCall(op, name, [self._materialised(tensor) for tensor in inputs], outputs, full))
        return tuple(outputs)

    def free_name(self, name: str) -> str:
        """Return ``name``, or one made from it that no tensor has yet."""
        free, count = name, self._names.get(name, 0)
        while free in self._names:
            count += 1
            free = f"{name}.{count}"
        self._names[name] = count  # where to go on for the next of this name
        self._names.setdefault(free, 0)
        return free

    def symbols(self) -> list[SizeSymbol]:
        """Return the named sizes of the inputs, in their order.  Raises UnsupportedError for other names in use."""
        symbols: dict[SizeSymbol, None] = {}
        for tensor in self.inputs:
            for size in tensor.shape:
                symbols.update(dict.fromkeys(sorted(symbols_of(size), key=lambda s: s.name)))
        return list(symbols)

    def is_open(self, size: SizeLike) -> bool:
        """Return True if a size depends on a number of selected boxes."""
        return not symbols_of(size).isdisjoint(self.selections)

    def prune(self) -> None:
        """Remove calls whose outputs nobody reads."""
        used = {id(tensor) for tensor in self.outputs}
        kept = []
        for call in reversed(self.calls):
            if any(id(tensor) in used for tensor in call.outputs):
                kept.append(call)
                used.update(id(tensor) for tensor in call.inputs if tensor is not None)
        self.calls = kept[::-1]

    def readers(self) -> dict[int, list[DraftCall]]:
        """Return the calls that read each tensor, by ``id``.  Outputs of the network are not counted."""
        readers: dict[int, list[DraftCall]] = {}
        for call in self.calls:
            for tensor in call.inputs:
                if tensor is not None:
                    readers.setdefault(id(tensor), []).append(call)
        return readers

    def replace(self, old: Tensor, new: Tensor, calls: Sequence[DraftCall] | None = None) -> None:
        """Let the calls, and the outputs if ``calls`` is None, read ``new`` instead of ``old``."""
        for call in self.calls if calls is None else calls:
            call.inputs = [new if tensor is old else tensor for tensor in call.inputs]
        if calls is None:
            self.outputs = [new if tensor is old else tensor for tensor in self.outputs]

    def materialised_outputs(self) -> None:
        """Compute the outputs that are arrays of sizes."""
        self.outputs = [self._materialised(tensor) or tensor for tensor in self.outputs]

    def _materialised(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor that a run computes for a constant that depends on sizes."""
        if tensor is None or tensor.value is None or tensor.value.dtype != object:
            return tensor
        flat = tuple(tensor.value.flat)
        if len(flat) > 16:
            raise UnsupportedError(f"{tensor.name}: expected at most 16 numbers that depend on sizes, got {len(flat)}")
        made = Tensor(self.free_name("sizes"), DType.I64, (len(flat),))
        self.calls.append(DraftCall("sizes", tensor.name, [], [made], {"values": flat}))
        if tensor.rank != 1:
            shaped = Tensor(self.free_name("sizes"), DType.I64, tensor.shape)
            self.calls.append(DraftCall("reshape", tensor.name, [made], [shaped], {"sizes": tensor.shape}))
            made = shaped
        if tensor.dtype != DType.I64:
            typed = Tensor(self.free_name("sizes"), tensor.dtype, tensor.shape)
            self.calls.append(DraftCall("cast", tensor.name, [made], [typed], {"dtype": tensor.dtype.name.lower()}))
            made = typed
        return made
