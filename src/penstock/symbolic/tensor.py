"""Tensors and sizes of a network that is traced.  They have no values: each operation is told to the trace."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, NoReturn, Protocol

from penstock.errors import UnsupportedError

__all__ = ["GraphTrace", "SymbolicSize", "TracedTensor", "active_trace", "untraceable"]

Shape = tuple[Any, ...]


class GraphTrace(Protocol):
    """The recorder of a network while it runs."""

    def call_op(self, name: str, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
        """Write down a call of an op of the table and return its outputs."""

    def call_module(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's ``forward``, inside which calls belong to the module."""

    def add_view(self, source: TracedTensor, shape: Shape, offset: int) -> TracedTensor:
        """Return the rows of ``source`` from element ``offset`` on, in another shape."""

    def module_path(self) -> str:
        """Return the path of the module that runs."""


active_trace: Final[ContextVar[GraphTrace | None]] = ContextVar("penstock_trace", default=None)
"""The trace of the network that runs in this context; None outside of one."""


def untraceable(operation: str, expected: str = "an op of penstock.nn") -> UnsupportedError:
    """Return the refusal of an operation that cannot be written down, or only with another meaning."""
    trace = active_trace.get()
    path = (trace.module_path() if trace else "") or "(root)"
    return UnsupportedError(
        f"capture: {operation} in module {path} is not supported in a built-in network; use {expected}"
    )


class SymbolicSize:
    """A size that each step determines.  It equals only itself; nothing can be computed with it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicSize):
            return self is other
        raise self._refusal("a comparison")

    def _refusal(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"capture: {operation} with the size {self.name}: the network fixes a size that differs between steps"
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise self._refusal("arithmetic")

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __truediv__ = __rtruediv__ = __neg__ = __int__ = __index__ = __float__ = __bool__ = _refuse
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __matmul__ = __rmatmul__ = __and__ = __rand__ = _refuse
    __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __pos__ = __abs__ = __invert__ = __round__ = __trunc__ = __floor__ = __ceil__ = __complex__ = _refuse


class TracedTensor:
    """A value of a step: the ``name`` that the trace gave it, its shape and its type, "float32" or "int32"."""

    __slots__ = ("_dtype", "_trace", "name", "shape")

    def __init__(self, trace: GraphTrace, name: str, shape: Shape, dtype: str) -> None:
        self._trace, self.name, self.shape, self._dtype = trace, name, shape, dtype

    @property
    def written_by(self) -> GraphTrace:
        """The trace that has the value."""
        return self._trace

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def view(self, *shape: Any) -> TracedTensor:
        """Return the same rows in another shape; the first size is that of the tensor, or -1 for it."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
        if not sizes or not all(isinstance(size, int | SymbolicSize) for size in sizes):
            raise untraceable(f"view{shape}", "a view that keeps rows whole")
        row = _elements(self.shape[1:])
        if sizes[0] is self.shape[0] and -1 in sizes[1:]:
            at = sizes.index(-1, 1)
            rest = _elements(size for i, size in enumerate(sizes) if i not in (0, at))
            sizes[at] = row // rest if rest > 0 else -1
        whole = sizes[0] is self.shape[0] or (isinstance(sizes[0], int) and sizes[0] == -1)
        if (
            not whole
            or any(isinstance(size, SymbolicSize) or size < 0 for size in sizes[1:])
            or _elements(sizes[1:]) != row
        ):
            raise untraceable(f"view{shape} of {list(self.shape)}", "a view that keeps rows whole")
        return self._cut((self.shape[0], *sizes[1:]), 0)

    def __getitem__(self, key: Any) -> TracedTensor:
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        is_cut = isinstance(columns, slice) and columns.step in (None, 1) and self.ndim > 1
        if not (isinstance(rows, slice) and rows == slice(None)) or not is_cut:
            raise untraceable(f"the index {key!r:.80}", "penstock.nn.gather_rows, or a range of columns")
        start, stop, _ = columns.indices(self.shape[1])
        return self._columns(start, max(stop - start, 0))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
        """Return at most ``chunks`` equal ranges of columns; the last one may be smaller."""
        length = self._length(dim, "chunk")
        if not isinstance(chunks, int) or chunks < 1:
            raise untraceable(f"chunk into {chunks!r:.80}", "at least one range")
        return self.split(max(1, -(-length // chunks)), dim)

    def split(self, size: int | list[int], dim: int = 0) -> tuple[TracedTensor, ...]:
        """Return ranges of ``size`` columns each, or of the sizes of a list."""
        length = self._length(dim, "split")
        wrong = untraceable(f"split of {length} columns into {size!r:.80}", "sizes whose sum is the number of columns")
        if isinstance(size, int):
            if size < 1:
                raise wrong
            sizes = [min(size, length - at) for at in range(0, length, size)]
        else:
            sizes = list(size)
        if not all(isinstance(own, int) and own >= 0 for own in sizes) or sum(sizes) != length:
            raise wrong
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self._columns(start, size) for start, size in zip(starts, sizes, strict=True))

    def _length(self, dim: int, operation: str) -> int:
        if not isinstance(dim, int) or self.ndim < 2 or dim not in (1, 1 - self.ndim):
            raise untraceable(f"{operation} of dimension {dim}", "dimension 1")
        return int(self.shape[1])

    def _columns(self, start: int, count: int) -> TracedTensor:
        return self._cut((self.shape[0], count, *self.shape[2:]), start * _elements(self.shape[2:]))

    def _cut(self, shape: Shape, offset: int) -> TracedTensor:
        return self if offset == 0 and shape == self.shape else self._trace.add_view(self, shape, offset)

    def __add__(self, other: object) -> Any:
        return self._combined("add", other)

    def __mul__(self, other: object) -> Any:
        return self._combined("mul", other)

    def _combined(self, op: str, other: object) -> Any:
        if not isinstance(other, TracedTensor):
            raise untraceable(f"{op} of a tensor and {type(other).__name__}", "two activations, or scale a weight")
        if self.shape != other.shape or not self._dtype == other._dtype == "float32":
            raise untraceable(op, "two float32 activations of the same shape, without broadcasting")
        return self._trace.call_op(op, (self, other), {})

    def _refuse(self, *_: object) -> NoReturn:
        raise untraceable("an operation or a branch on the values of a tensor")

    __radd__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __pow__ = __rpow__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = __neg__ = __invert__ = __abs__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _refuse
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __setitem__ = __delitem__ = _refuse
    __divmod__ = __rdivmod__ = __pos__ = __round__ = __trunc__ = __floor__ = __ceil__ = __complex__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _refuse

    def __eq__(self, other: object) -> bool:
        self._refuse()

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise untraceable(f"Tensor.{name}")


def _elements(sizes: Any) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
