"""The parts that the readers of PyTorch's ops share: types, scalars, axes, and views as calls of a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Draft, Tensor
from penstock.graph.general.shape_rules import normalise_axis
from penstock.graph.general.sizes import SizeExpression, SizeLike, bounds, product, smallest
from penstock.graph.ir import DType

__all__ = ["OPS", "Reader", "Writer", "common_type", "dtype_named", "inside", "reader"]

_DTYPES: Final = {
    "torch.float32": DType.F32, "torch.float64": DType.F32, "torch.float16": DType.F32, "torch.bfloat16": DType.F32,
    "torch.int64": DType.I64, "torch.int32": DType.I32, "torch.int8": DType.I8, "torch.uint8": DType.U8,
    "torch.bool": DType.BOOL,
}  # fmt: skip
"""Floating-point types are computed in float32."""
_RANKS: Final = {DType.BOOL: 0, DType.U8: 1, DType.I8: 1, DType.I32: 2, DType.I64: 3, DType.F32: 4}
_MAX_WHOLE: Final = 1 << 53


def common_type(dtypes: Iterable[DType]) -> DType:
    """Return the type that PyTorch gives tensors of these together."""
    return max(dtypes, key=_RANKS.__getitem__)


def dtype_named(dtype: Any) -> DType:
    """Return the type for one of PyTorch's.  Raises UnsupportedError for one that has no ops."""
    named = _DTYPES.get(str(dtype))
    if named is None:
        raise UnsupportedError(f"dtype: expected a real number, an integer or bool, got {dtype}", param="dtype")
    return named


class Writer:
    """Writes calls into a draft under the name of the node that is read."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.name = ""

    def add(self, op: str, *inputs: Tensor | None, **attrs: Any) -> Tensor:
        """Add a call of an op with one output under the name of the current node."""
        return self.draft.add(op, *inputs, name=self.name, **attrs)

    def add_many(self, op: str, *inputs: Tensor | None, **attrs: Any) -> tuple[Tensor, ...]:
        """Add a call of an op with several outputs."""
        return self.draft.add_many(op, *inputs, name=self.name, **attrs)

    def constant(self, value: Any, dtype: DType | None = None) -> Tensor:
        """Return a constant of a number or an array, of a type if one is given."""
        if isinstance(value, SizeExpression) or (isinstance(value, (int, np.integer)) and not isinstance(value, bool)):
            tensor = self.draft.constant(np.array(value, dtype=object), self.name)
        else:
            array = np.asarray(value)
            tensor = self.draft.constant(array.astype(np.float32) if array.dtype == np.float64 else array, self.name)
        return tensor if dtype is None else self.cast(tensor, dtype)

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Return x as another type."""
        if x.dtype == dtype:
            return x
        if x.value is not None and x.value.dtype != object and x.value.ndim == 0 and dtype == DType.F32:
            return self.draft.constant(np.array(float(x.value), np.float32), self.name)
        return self.add("cast", x, dtype=dtype.name.lower())

    def pair(self, a: Any, b: Any, *, at_least: DType = DType.BOOL) -> tuple[Tensor, Tensor]:
        """Return two operands, of which one may be a number, in the type that PyTorch computes with."""
        tensors = [value for value in (a, b) if isinstance(value, Tensor)]
        dtype = at_least
        for value in (a, b):
            own = value.dtype if isinstance(value, Tensor) else _number_type(value)
            weak = (
                not isinstance(value, Tensor) and tensors and _category(own) <= max(_category(t.dtype) for t in tensors)
            )
            if not weak and _RANKS[own] > _RANKS[dtype]:
                dtype = own
        return tuple(self.cast(v, dtype) if isinstance(v, Tensor) else self.constant(v, dtype) for v in (a, b))  # type: ignore[return-value]

    def binary(self, kind: str, a: Any, b: Any, *, at_least: DType = DType.BOOL) -> Tensor:
        """Add ``a <kind> b``."""
        return self.add("binary", *self.pair(a, b, at_least=at_least), kind=kind)

    def unary(self, kind: str, x: Tensor, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
        """Add a function of each element."""
        return self.add("unary", x, kind=kind, alpha=float(alpha), beta=float(beta))

    def as_float(self, x: Tensor) -> Tensor:
        """Return x as float32."""
        return self.cast(x, DType.F32)

    def reshape(self, x: Tensor, sizes: Sequence[SizeLike]) -> Tensor:
        """Return x with another shape; one size may be -1."""
        return x if tuple(sizes) == x.shape else self.add("reshape", x, sizes=tuple(sizes))

    def permute(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Return x with its axes in another order."""
        return self.add("permute", x, order=tuple(order))

    def swapped(self, x: Tensor, a: int, b: int) -> Tensor:
        """Return x with two axes exchanged."""
        order = list(range(x.rank))
        a, b = normalise_axis(a, x.rank), normalise_axis(b, x.rank)
        order[a], order[b] = order[b], order[a]
        return self.permute(x, order)

    def unsqueeze(self, x: Tensor, axis: int) -> Tensor:
        """Return x with an axis of size 1 at ``axis``."""
        axis = axis + x.rank + 1 if axis < 0 else axis
        return self.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return x without those of the axes whose size is 1."""
        gone = {normalise_axis(axis, x.rank) for axis in axes}
        if any(self.draft.is_open(x.shape[axis]) for axis in gone):
            raise UnsupportedError("squeeze of selected boxes, of which there may be one", code="selected_boxes")
        return self.reshape(x, [size for i, size in enumerate(x.shape) if i not in gone or size != 1])

    def sliced(self, x: Tensor, axis: int, begin: Any, end: Any, step: int = 1) -> Tensor:
        """Return a part of an axis; begins and ends may be negative, absent or too large, as Python's are."""
        axis = normalise_axis(axis, x.rank)
        size = x.shape[axis]
        begin = inside(0 if begin is None else begin, size)
        end = inside(size if end is None else end, size)
        begins, ends, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        begins[axis], ends[axis], steps[axis] = begin, end, step
        if (begin, end, step) == (0, size, 1):
            return x
        return self.add("slice", x, begins=tuple(begins), ends=tuple(ends), steps=tuple(steps))

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Return tensors behind one another; any number of them."""
        parts = list(tensors)
        while len(parts) > 8:
            parts = [self.concat(parts[at : at + 8], axis) for at in range(0, len(parts), 8)]
        return parts[0] if len(parts) == 1 else self.add("concat", *parts, axis=axis)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., K] times the transpose of [N, K], and a bias."""
        if weight.value is None or weight.rank != 2:
            out = self.add("matmul", x, weight, transpose_b=True) if x.rank > 1 else None
            if out is None:
                raise UnsupportedError(f"{self.name}: expected a matrix of two dimensions or more, got a vector")
            return out if bias is None else self.binary("add", out, bias)
        rows = self.reshape(x, (product(x.shape[:-1]), x.shape[-1]))
        fused = bias if bias is None or bias.value is not None else None
        out = self.add("linear", rows, weight, fused)
        out = self.reshape(out, (*x.shape[:-1], weight.shape[0]))
        return self.binary("add", out, bias) if bias is not None and fused is None else out

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return numpy's matmul; a constant matrix on the right is a linear layer."""
        if b.value is not None and b.rank == 2 and b.dtype == DType.F32:
            transposed = self.draft.constant(np.ascontiguousarray(b.value.T), b.name)
            return self.squeezed_rows(a, lambda rows: self.linear(rows, transposed, None))
        if a.rank == b.rank == 1:
            return self.reshape(self.add("matmul", self.unsqueeze(a, 0), self.unsqueeze(b, 1)), ())
        if a.rank == 1:
            out = self.matmul(self.unsqueeze(a, 0), b)
            return self.reshape(out, (*out.shape[:-2], out.shape[-1]))
        if b.rank == 1:
            out = self.matmul(a, self.unsqueeze(b, 1))
            return self.reshape(out, out.shape[:-1])
        return self.add("matmul", a, b)

    def squeezed_rows(self, a: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of matrices to one, or to a vector as a matrix of one row."""
        if a.rank > 1:
            return function(a)
        out = function(self.unsqueeze(a, 0))
        return self.reshape(out, out.shape[1:])

    def filled(self, sizes: Sequence[SizeLike], value: float, dtype: DType) -> Tensor:
        """Return a tensor of one number, which is converted to the type as PyTorch does."""
        if dtype != DType.F32 and math.isfinite(value):
            value = bool(value) if dtype == DType.BOOL else int(value)
        if not math.isfinite(value) or abs(value) > _MAX_WHOLE:  # attributes are finite, and whole up to 2^53
            number = self.constant(int(value) if dtype == DType.I64 else np.array(value, np.float32), dtype)
            return self.add("expand", number, sizes=tuple(sizes)) if sizes else number
        return self.add("fill", sizes=tuple(sizes), dtype=dtype.name.lower(), value=float(value))

    def iota(self, start: SizeLike, step: int, count: SizeLike) -> Tensor:
        """Return ``count`` int64 numbers from ``start`` on, ``step`` apart."""
        return self.add("iota", range=(start, step, count))


def inside(index: Any, size: SizeLike) -> SizeLike:
    """Return a begin or an end of a slice between 0 and the size."""
    if isinstance(index, int) and index < 0:
        index = size + index
        return index if isinstance(index, SizeExpression) else max(index, 0)
    if isinstance(index, SizeExpression) and bounds(index)[1] < 0:
        return size + index
    if isinstance(index, int) and index >= 1 << 60:
        return size
    return smallest(index, size)


def _number_type(value: Any) -> DType:
    return DType.BOOL if isinstance(value, bool) else DType.F32 if isinstance(value, float) else DType.I64


def _category(dtype: DType) -> int:
    return 2 if dtype == DType.F32 else 0 if dtype == DType.BOOL else 1


Reader: TypeAlias = Callable[..., Any]
_Reader = TypeVar("_Reader", bound=Reader)
OPS: Final[dict[str, Reader]] = {}
"""The readers of PyTorch's ops, by the name of the overload: "aten.conv2d.default"."""


def reader(*names: str) -> Callable[[_Reader], _Reader]:
    """Declare the reader of ops, "conv2d.default" of PyTorch's own: it takes the writer and the op's arguments."""

    def declare(function: _Reader) -> _Reader:
        OPS.update({name if name.count(".") == 2 else f"aten.{name}": function for name in names})
        return function

    return declare
