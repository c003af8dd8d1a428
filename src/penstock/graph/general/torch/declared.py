"""Ops of ``torch.library`` in a captured module: taken as custom ops, or decomposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import torch
from torch import fx

from penstock.errors import InvalidArgumentError
from penstock.graph.general.custom import add_custom_call, custom_op_named
from penstock.graph.general.draft import Draft, Shape
from penstock.graph.ir import DType

__all__ = ["add_declared_op", "advice", "overloads"]

_schema_of: Final = attrgetter("_schema")  # PyTorch has no public name for it
_OWN: Final = ("aten", "prims", "prim", "penstock_network", "_operator", "builtins")


def overloads(functions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return functions by the ops that they replace: of "owner::name", or of ops of ``torch.ops``."""
    return {_overload(key): function for key, function in functions.items()}


def _overload(key: Any) -> Any:
    name = str(getattr(key, "_qualname", key)).removeprefix("torch.ops.")
    owner, _, short = name.partition("::")
    op: Any = key
    if short:
        try:
            op = getattr(getattr(torch.ops, owner), short)
        except AttributeError:
            op = None
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = op.default
    if not isinstance(op, torch._ops.OpOverload):
        raise InvalidArgumentError(
            f'decompositions: expected "owner::name" of an op of torch.library, got {key!r}', param="decompositions"
        )
    return op


def add_declared_op(
    draft: Draft, node: fx.Node, place: str, argument: Callable[[Any], Any],
    types: Callable[[Any], list[tuple[DType, Shape]]], values: dict[fx.Node, Any],
) -> bool:  # fmt: skip
    """Add the call of a custom op that ``penstock.custom_op`` declares; return False for any other op."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _OWN:
        return False
    op = custom_op_named(f"{target.namespace}::{target._opname}")
    if op is None:
        return False
    names = [item.name for item in _schema_of(target).arguments]
    arguments = {item.name: item.default_value for item in _schema_of(target).arguments if item.has_default_value()}
    arguments.update(zip(names, argument(node.args), strict=False))
    arguments.update(argument(node.kwargs))
    result = node.meta.get("val")
    outputs = add_custom_call(draft, op, arguments, types(result), place)
    values[node] = outputs[0] if isinstance(result, torch.Tensor) else list(outputs)
    return True


def advice(missing: Iterable[str]) -> str:
    """Return what to do about ops that are the user's own."""
    own = [name for name in missing if "." in name and name.split(".")[0] not in _OWN]
    if not own:
        return ""
    name = "::".join(own[0].split(".")[:2])
    return (
        f'; declare {name} with penstock.custom_op and load its library, or pass decompositions={{"{name}": function}}'
    )
