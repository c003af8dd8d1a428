"""Calls of custom ops, ``penstock.custom_op``, in general networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Draft, DraftCall, Shape, Tensor
from penstock.graph.ir import DType
from penstock.ops.schema import parse_arguments
from penstock.ops.table import Op, find_op

__all__ = ["add_custom_call", "check_tensor", "custom_op_named"]

_MAX_RANK: Final = 4
_ATTRS: Final[dict[str, tuple[type, ...]]] = {"int": (int,), "float": (int, float), "bool": (bool, int), "str": (str,)}


def custom_op_named(name: str) -> Op | None:
    """Return the row of a custom op that is declared, or that a loaded library has."""
    try:
        return find_op(name) if "::" in name else None
    except KeyError:
        return None


def add_custom_call(
    draft: Draft, op: Op, values: Mapping[str, Any], shapes: Sequence[tuple[DType, Shape]], place: str
) -> tuple[Tensor, ...]:
    """Add a call, whose arguments and attributes come by name, and whose outputs have these types.

    Raises UnsupportedError for arguments that a custom op cannot have.
    """
    inputs: list[Tensor | None] = []
    attrs: dict[str, Any] = {}
    arguments = parse_arguments(op.schema)
    unknown = set(values) - {argument.name for argument in arguments}
    if unknown:
        raise UnsupportedError(f"{place}: {op.name}: its schema {op.schema} has no {', '.join(sorted(unknown))}")
    for argument in arguments:
        value = values.get(argument.name)
        if argument.is_attr:
            if not isinstance(value, _ATTRS[argument.kind]):
                raise UnsupportedError(f"{place}: {op.name}: {argument.name}: expected {argument.kind}, got {value!r}")
            attrs[argument.name] = value
            continue
        if value is None and not argument.optional:
            raise UnsupportedError(f"{place}: {op.name}: {argument.name}: expected a tensor, got none")
        if value is not None:
            check_tensor(value, f"{place}: {op.name}: {argument.name}", argument.kind)
        inputs.append(value)
    for dtype, shape in shapes:
        if dtype not in (DType.F32, DType.I32) or not 1 <= len(shape) <= _MAX_RANK:
            raise UnsupportedError(
                f"{place}: {op.name}: expected results of float32 or int32 with 1 to {_MAX_RANK} dimensions, "
                f"got {dtype.name.lower()} with {len(shape)}"
            )
    outputs = [Tensor(draft.free_name(place), dtype, tuple(shape)) for dtype, shape in shapes]
    draft.calls.append(DraftCall(op.name, place, inputs, outputs, attrs))
    return tuple(outputs)


def check_tensor(tensor: Any, what: str, kind: str) -> None:
    """Raise UnsupportedError for an argument of a kind ("weight" or another) that a custom op cannot have."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{what}: expected a tensor, got {tensor!r}")
    if kind == "weight":
        if tensor.value is None or tensor.dtype != DType.F32 or tensor.rank not in (1, 2):
            raise UnsupportedError(f"{what}: expected a constant vector or matrix of float32, got {tensor}")
    elif tensor.dtype not in (DType.F32, DType.I32) or not 1 <= tensor.rank <= _MAX_RANK:
        raise UnsupportedError(f"{what}: expected float32 or int32 with 1 to {_MAX_RANK} dimensions, got {tensor}")
