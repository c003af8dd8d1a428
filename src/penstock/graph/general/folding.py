"""Calls over constants, computed while a network is read.

Arithmetic on integers, and what moves numbers, is done by numpy, which takes arrays of ``SizeExpression`` too.  Other
ops on constants run in the core, so that folding changes no bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UnsupportedError
from penstock.graph.general.sizes import SizeExpression, SizeLike, is_equal, largest, smallest
from penstock.graph.ir import DType

__all__ = ["fold"]

_MAX_ELEMENTS: Final = 1 << 24
_INTEGERS: Final = (DType.I64, DType.I32, DType.I8, DType.U8, DType.BOOL)
_NUMPY: Final[dict[DType, Any]] = {
    DType.F32: np.float32, DType.F16: np.float16, DType.I8: np.int8, DType.I32: np.int32, DType.U8: np.uint8,
    DType.I64: np.int64, DType.BOOL: np.bool_,
}  # fmt: skip


def fold(
    op: str, inputs: Sequence[Any], attrs: dict[str, Any], types: Sequence[tuple[DType, tuple[SizeLike, ...]]]
) -> list[NDArray[Any]] | None:
    """Return the values of a call whose arguments are constant; None if it must run, or is not computed here."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    if any(tensor.value is None for tensor in tensors) or not _is_constant(types, _MAX_ELEMENTS):
        return None
    values = [None if tensor is None else tensor.value for tensor in inputs]
    has_sizes = any(value is not None and value.dtype == object for value in values)
    whole = has_sizes or all(tensor.dtype in _INTEGERS for tensor in tensors)
    exact = op == "where" or (op in ("unary", "binary") and attrs["kind"] in _EXACT)
    rule = _MOVES.get(op) or (_ARITHMETIC.get(op) if whole or exact else None)
    if rule is None or (has_sizes and op == "binary" and attrs["kind"] not in _BINARY_SIZES):
        return None
    with np.errstate(all="ignore"):
        results = rule(values, attrs)
    if results is None:
        return None
    return [_typed(result, dtype) for result, (dtype, _) in zip(results, types, strict=True)]


def _is_constant(types: Sequence[tuple[DType, tuple[SizeLike, ...]]], most: int) -> bool:
    return all(
        all(isinstance(size, int) for size in shape) and np.prod([int(n) for n in shape], dtype=np.float64) <= most  # type: ignore[arg-type]
        for _, shape in types
    )


def _typed(result: Any, dtype: DType) -> NDArray[Any]:
    array = np.asarray(result)
    if array.dtype == object:
        if any(isinstance(item, SizeExpression) for item in array.flat):
            return array
        array = array.astype(np.int64)
    return np.ascontiguousarray(array.astype(_NUMPY[dtype])).reshape(array.shape)


def _integers(values: tuple[SizeLike, ...]) -> NDArray[Any]:
    return np.array(values, dtype=object)


def _truncated(a: Any, b: Any) -> Any:
    """Divide as ONNX does, towards zero; sizes are never negative."""
    if a.dtype == object or b.dtype == object:
        return a // b
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return (np.sign(a) * np.sign(b) * quotient).astype(a.dtype)


_equal_sizes = np.frompyfunc(is_equal, 2, 1)
_choose_larger = np.frompyfunc(largest, 2, 1)
_choose_smaller = np.frompyfunc(smallest, 2, 1)


def _extreme(a: Any, b: Any, plain: Any, sizes: Any) -> Any:
    return sizes(a, b) if a.dtype == object or b.dtype == object else plain(a, b)


_BINARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _truncated,
    "mod": lambda a, b: a % b if a.dtype == object or b.dtype == object else np.mod(a, b),
    "max": lambda a, b: _extreme(a, b, np.maximum, _choose_larger),
    "min": lambda a, b: _extreme(a, b, np.minimum, _choose_smaller),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip
_EXACT: Final = (
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "neg",
    "abs",
    "floor",
    "ceil",
    "round",
    "sqrt",
)
"""The kinds of floats whose result IEEE 754 determines: numpy computes the same bits as the core."""
_BINARY_SIZES: Final = ("add", "sub", "mul", "div", "mod", "max", "min", "eq", "ne", "lt", "le", "gt", "ge")


def _binary(values: list[Any], a: dict[str, Any]) -> Any:
    kind = a["kind"]
    x, y = values
    if kind not in _BINARY:
        return None
    if x.dtype != object and y.dtype == object:
        x = x.astype(object)
    if kind in ("add", "sub", "mul") and x.dtype == np.bool_:
        return None
    if kind == "div" and x.dtype.kind == "f":
        return [np.divide(x, y)]
    if x.dtype == object and kind in ("eq", "ne"):
        equal = np.asarray(_equal_sizes(x, y))
        if any(item is None for item in equal.flat):
            return None
        return [equal.astype(np.bool_) if kind == "eq" else ~equal.astype(np.bool_)]
    try:
        return [np.asarray(_BINARY[kind](x, y))]
    except UnsupportedError:
        return None  # an order of sizes that only a run knows


def _unary(values: list[Any], a: dict[str, Any]) -> Any:
    (x,) = values
    kind = a["kind"]
    if kind == "neg":
        return [-x]
    if kind == "not":
        return [np.logical_not(x)]
    if kind in ("abs", "sign") and x.dtype != object:
        return [np.abs(x) if kind == "abs" else np.sign(x)]
    if x.dtype.kind != "f":
        return [x] if kind in ("floor", "ceil", "round") else None
    functions = {"floor": np.floor, "ceil": np.ceil, "round": np.rint, "sqrt": np.sqrt}
    return [functions[kind](x)] if kind in functions else None


def _reduce(values: list[Any], a: dict[str, Any]) -> Any:
    (x,) = values
    functions: dict[str, Any] = {"sum": np.sum, "prod": np.prod}
    if x.dtype != object:
        functions |= {"max": np.max, "min": np.min}
    if a["kind"] not in functions or (x.size == 0 and a["kind"] in ("max", "min")):
        return None
    return [np.asarray(functions[a["kind"]](x, axis=a["axes"], keepdims=a["keep"]))]


def _slice(values: list[Any], a: dict[str, Any]) -> Any:
    bounds = (*a["begins"], *a["ends"])
    if any(isinstance(size, SizeExpression) for size in bounds):
        return None
    index = tuple(
        slice(begin, None if step < 0 and end < 0 else end, step)
        for begin, end, step in zip(a["begins"], a["ends"], a["steps"], strict=True)
    )
    return [values[0][index]]


def _gather(values: list[Any], a: dict[str, Any]) -> Any:
    x, indices = values
    if indices.dtype == object or (
        indices.size and not -x.shape[a["axis"]] <= indices.min() <= indices.max() < x.shape[a["axis"]]
    ):
        return None
    return [np.take(x, indices.astype(np.int64), axis=a["axis"])]


def _cast(values: list[Any], a: dict[str, Any]) -> Any:
    (x,) = values
    if x.dtype == object:
        return [x] if a["dtype"] in ("i64", "i32") else None
    if a["dtype"] == "bf16":
        return None
    target = _NUMPY[DType[a["dtype"].upper()]]
    if x.dtype.kind == "f" and np.dtype(target).kind in "iu":
        return None  # how values out of range are converted is the core's rule
    return [x.astype(target)]


def _fill(values: list[Any], a: dict[str, Any]) -> Any:
    return [np.full(a["sizes"], a["value"])] if a["dtype"] != "bf16" else None


def _iota(values: list[Any], a: dict[str, Any]) -> Any:
    start, step, count = a["range"]
    return [np.array([start + step * i for i in range(count)], dtype=object)]


def _where(values: list[Any], a: dict[str, Any]) -> Any:
    return [np.where(*values)]


_MOVES: Final[dict[str, Callable[[list[Any], dict[str, Any]], Any]]] = {
    "reshape": lambda v, a: [v[0].reshape(a["sizes"])],
    "permute": lambda v, a: [np.transpose(v[0], a["order"])],
    "slice": _slice,
    "expand": lambda v, a: [np.broadcast_to(v[0], a["sizes"])],
    "concat": lambda v, a: [np.concatenate([x for x in v if x is not None], axis=a["axis"])],
    "gather": _gather,
    "cast": _cast,
    "fill": _fill,
    "iota": _iota,
    "sizes": lambda v, a: [_integers(a["values"])],
}  # fmt: skip
_ARITHMETIC: Final[dict[str, Callable[[list[Any], dict[str, Any]], Any]]] = {
    "binary": _binary,
    "unary": _unary,
    "reduce": _reduce,
    "where": _where,
}
