"""A node that is being read: its attributes, its inputs as tensors of the draft, and what its reader may do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.graph.general.draft import NUMPY_TYPES, Attr, Draft, Tensor
from penstock.graph.general.sizes import SizeExpression, SizeLike
from penstock.graph.ir import DType
from penstock.graph.onnx.model import OnnxGraph, OnnxNode

__all__ = ["ELEMENT_TYPES", "FLOATS_AS_F32", "MAX_RANK", "Site", "Value", "as_constant", "dtype_name", "rational"]

ELEMENT_TYPES: Final = {
    1: DType.F32, 2: DType.U8, 3: DType.I8, 6: DType.I32, 7: DType.I64, 9: DType.BOOL, 10: DType.F16, 16: DType.BF16,
}  # fmt: skip
"""The element types of ONNX that the table has."""
FLOATS_AS_F32: Final = (1, 10, 11, 16)
"""Float types, all of which are computed in f32: float, float16, double and bfloat16."""
MAX_RANK: Final = 6
"""The largest number of dimensions of a tensor."""
_MAX_FOLDED: Final = 1 << 28

Value = Tensor | NDArray[Any] | Callable[[], NDArray[Any]]
"""A value of the file: an array becomes a tensor of the draft when a node reads it."""


def dtype_name(dtype: DType) -> str:
    """Return the name that attributes of ops have for a type: "f32"."""
    return dtype.name.lower()


def as_constant(draft: Draft, array: NDArray[Any], name: str) -> Tensor:
    """Return an array of the file as a constant, floats as f32."""
    if array.dtype == object:
        return draft.constant(array, name)
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array = array.astype(np.float32, copy=False)
    if array.dtype not in NUMPY_TYPES.values():
        raise UnsupportedError(f"{name}: a constant of type {array.dtype} is not supported")
    return draft.constant(array, name)


class Site:
    """A node of the file and its inputs."""

    def __init__(self, node: OnnxNode, version: int, draft: Draft, values: Sequence[Value | None]) -> None:
        self.node = node
        self.version = version
        self.draft = draft
        self.folded = 0
        self._values = list(values)
        self.run_graph: Callable[[OnnxGraph], list[Tensor]] | None = None
        self.size_names: Mapping[str, str] = {}  # of symbols: the names by which a caller fixes them

    # The inputs.

    def count(self) -> int:
        """Return the number of inputs, absent ones included."""
        return len(self._values)

    def has(self, at: int) -> bool:
        """Return True if the input is there."""
        return at < len(self._values) and self._values[at] is not None

    def x(self, at: int = 0) -> Tensor:
        """Return an input that must be there."""
        tensor = self.optional(at)
        if tensor is None:
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected an input {at}, got none")
        return tensor

    def optional(self, at: int) -> Tensor | None:
        """Return an input, or None if it is absent."""
        if not self.has(at):
            return None
        value = self._values[at]
        if not isinstance(value, Tensor):
            value = self._values[at] = as_constant(self.draft, self.raw(at), self.node.inputs[at])
        return value

    def every(self) -> list[Tensor]:
        """Return the inputs, all of which must be there."""
        return [self.x(at) for at in range(self.count())]

    def raw(self, at: int) -> NDArray[Any]:
        """Return the array of a constant input in the type of the file.  Refuses other inputs."""
        value = self._values[at] if self.has(at) else None
        if value is None:
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected an input {at}, got none")
        array = value.value if isinstance(value, Tensor) else value() if callable(value) else value
        if array is None:
            raise self.refused(
                f"input {self.node.inputs[at]} must be constant; it depends on the inputs of the network"
            )
        return array

    def is_raw(self, at: int) -> bool:
        """Return True if an input is a constant of the file or was computed from such."""
        value = self._values[at] if self.has(at) else None
        return value is not None and (not isinstance(value, Tensor) or value.value is not None)

    def sizes(self, at: int) -> tuple[SizeLike, ...]:
        """Return an input of integers that may depend on sizes."""
        array = self.raw(at)
        if array.dtype != object and array.dtype.kind not in "iub":
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected integers as input {at}")
        return tuple(item if isinstance(item, SizeExpression) else int(item) for item in array.reshape(-1))

    def whole(self, at: int) -> tuple[int, ...]:
        """Return an input of integers that depend on nothing."""
        return tuple(self.fixed(size, self.node.inputs[at]) for size in self.sizes(at))

    def numbers(self, at: int) -> NDArray[Any]:
        """Return an input of floats that depend on nothing."""
        array = self.raw(at)
        if array.dtype == object:
            raise self.refused(f"input {self.node.inputs[at]} depends on a free size; fix the sizes of the inputs")
        return array.astype(np.float64)

    def fixed(self, size: SizeLike, what: str) -> int:
        """Return a size that must be a number."""
        if isinstance(size, SizeExpression):
            raise self.refused(f"{what} is {size}, which must be a number; fix that size")
        return int(size)

    # The attributes.

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        value = self.node.attrs.get(name)
        return default if value is None else value

    def int_attr(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        return int(self._typed(name, default, int))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an attribute that is 0 or 1."""
        return bool(self._typed(name, int(default), int))

    def float_attr(self, name: str, default: float = 0.0) -> float:
        """Return a float attribute."""
        return float(self._typed(name, default, (int, float)))

    def str_attr(self, name: str, default: str = "") -> str:
        """Return a string attribute."""
        return str(self._typed(name, default, str))

    def ints(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or None if the attribute is absent."""
        values = self.attr(name)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(item, int) for item in values):
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected integers as {name}")
        return tuple(values)

    def _typed(self, name: str, default: Any, kind: Any) -> Any:
        value = self.attr(name, default)
        if not isinstance(value, kind):
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected another type as {name}")
        return value

    # What a reader may do.

    def add(self, op: str, *inputs: Tensor | None, **attrs: Attr) -> Any:
        """Add a call under the node's name; return its output, or a tuple of them."""
        made = self.draft.add_many(op, *inputs, name=self.node.name, **attrs)
        for tensor in made:
            if tensor.rank > MAX_RANK:
                raise self.refused(f"tensors of {tensor.rank} dimensions are not supported; up to {MAX_RANK} are")
            if tensor.value is not None:
                self.folded += tensor.value.size
        if self.folded > _MAX_FOLDED:
            raise InvalidFileError(f"node {self.node.name}: expected at most {_MAX_FOLDED} computed constants")
        return made[0] if len(made) == 1 else made

    def unary(self, kind: str, x: Tensor, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
        """Add an elementwise op."""
        made: Tensor = self.add("unary", x, kind=kind, alpha=alpha, beta=beta)
        return made

    def binary(self, kind: str, a: Tensor, b: Tensor | float) -> Tensor:
        """Add an elementwise op of two inputs; a number takes the type of the other."""
        other = b if isinstance(b, Tensor) else self.like(a, b)
        made: Tensor = self.add("binary", a, other, kind=kind)
        return made

    def like(self, x: Tensor, number: float) -> Tensor:
        """Return a number as a constant of the type of ``x``."""
        return self.draft.constant(np.asarray(number).astype(NUMPY_TYPES.get(x.dtype, np.float32)))

    def constant(self, value: Any) -> Tensor:
        """Return a constant."""
        return self.draft.constant(value, self.node.name)

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Convert to a type, if ``x`` does not have it."""
        if x.dtype == dtype:
            return x
        made: Tensor = self.add("cast", x, dtype=dtype_name(dtype))
        return made

    def reshape(self, x: Tensor, sizes: Sequence[SizeLike]) -> Tensor:
        """Give ``x`` another shape, if it does not have it."""
        if tuple(sizes) == x.shape:
            return x
        made: Tensor = self.add("reshape", x, sizes=tuple(sizes))
        return made

    def permute(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Exchange axes."""
        if list(order) == list(range(x.rank)):
            return x
        made: Tensor = self.add("permute", x, order=tuple(order))
        return made

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Put parts behind each other; any number of them."""
        parts = list(parts)
        while len(parts) > 1:
            parts = [
                self.add("concat", *group, axis=axis) if len(group) > 1 else group[0]
                for group in (parts[i : i + 8] for i in range(0, len(parts), 8))
            ]
        return parts[0]

    def cut(self, x: Tensor, axis: int, begin: SizeLike, end: SizeLike) -> Tensor:
        """Return the part of an axis from ``begin`` to ``end``, both inside it."""
        if begin == 0 and end == x.shape[axis]:
            return x
        begins: list[SizeLike] = [0] * x.rank
        ends = list(x.shape)
        begins[axis], ends[axis] = begin, end
        made: Tensor = self.add("slice", x, begins=tuple(begins), ends=tuple(ends), steps=(1,) * x.rank)
        return made

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis that may count from the end as one from 0."""
        if not -rank <= axis < max(rank, 1):
            raise InvalidFileError(
                f"node {self.node.name} ({self.node.op}): expected an axis of {-rank} to {rank - 1}, got {axis}"
            )
        return axis + rank if axis < 0 else axis

    def refused(self, reason: str) -> UnsupportedError:
        """Return the error for what this reader does not support."""
        return UnsupportedError(reason)

    def require(self, holds: bool, reason: str) -> None:
        """Refuse the node unless ``holds``."""
        if not holds:
            raise self.refused(reason)

    def expect(self, holds: bool, what: str) -> None:
        """Refuse the file unless ``holds``."""
        if not holds:
            raise InvalidFileError(f"node {self.node.name} ({self.node.op}): expected {what}")

    def is_plain(self, *tensors: Tensor | None) -> bool:
        """Return True if the tensors are constants without named sizes."""
        return all(t is None or (t.value is not None and t.value.dtype != object) for t in tensors)

    def wanted(self, at: int) -> bool:
        """Return True if the node has an output ``at`` that has a name."""
        return at < len(self.node.outputs) and bool(self.node.outputs[at])


def rational(value: float) -> tuple[int, int] | None:
    """Return small whole numbers whose quotient is a float of 32 bits, or None."""
    for divisor in range(1, 1025):
        number = value * divisor
        if math.isclose(number, round(number), rel_tol=2e-7, abs_tol=0) and np.float32(
            round(number) / divisor
        ) == np.float32(value):
            return round(number), divisor
    return None
