"""Fold aliases into views: which part of its source's rows an alias covers.  Works on shapes and imports no tensors.

A value consists of rows.  Kernels accept any distance between rows, but each row must be contiguous.  So a view may
reshape rows or take a contiguous piece of each row, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["View", "fold_view", "is_alias"]

_SAME: Final = ("alias", "detach", "clone", "contiguous", "to", "_to_copy", "lift_fresh", "type_as")
_RESHAPE: Final = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as")
_SPLIT: Final = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
_CUT: Final = ("slice", "select", "narrow")
_DEFAULT_DIM: Final = 0


@dataclass(frozen=True)
class View:
    """``tensor`` (its shape and dtype) begins ``offset`` elements into each row of the source."""

    tensor: Any
    offset: int


def is_alias(target: str) -> bool:
    """Return True for an operation ("aten.view.default") that only reshapes or cuts, whatever its arguments are."""
    return _plain_name(target) in (*_SAME, *_RESHAPE, *_SPLIT, *_CUT)


def _plain_name(target: str) -> str:
    return target.split(".")[1] if target.startswith("aten.") else ""


def fold_view(
    target: str, source: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[View] | None:
    """Return the views of the alias ``target`` ("aten.view.default") of ``source``; None if it splits rows.

    ``source`` and ``result`` have ``shape`` and ``dtype``; ``args`` are those after the source.
    """
    name = _plain_name(target)
    if name in _SPLIT:
        return _split(name, source, args, kwargs, result)
    if getattr(result, "dtype", None) != source.dtype:
        return None
    if name in _SAME:
        return [View(result, 0)] if _sizes(result) == _sizes(source) else None
    if name in _RESHAPE:
        keeps_rows = len(result.shape) > 0 and _sizes(result)[0] == _sizes(source)[0]
        return [View(result, 0)] if keeps_rows else None
    if name in _CUT:
        return _cut(name, source, args, kwargs, result)
    return None


def _sizes(tensor: Any) -> list[str]:
    """Return the sizes as strings, because comparing symbols would make the trace depend on the result."""
    return [str(size) for size in tensor.shape]


def _inner(source: Any) -> int:
    """Return the number of elements that one step along dimension 1 covers."""
    elements = 1
    for size in source.shape[2:]:
        elements *= int(size)
    return elements


def _argument(name: str, index: int, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


def _cut(name: str, source: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[View] | None:
    if _sizes(result) == _sizes(source):
        return [View(result, 0)]
    dim = _argument("dim", 0, args, kwargs, _DEFAULT_DIM) % len(source.shape)
    start = _argument("index" if name == "select" else "start", 1, args, kwargs, 0) or 0
    step = _argument("step", 3, args, kwargs, 1) if name == "slice" else 1
    if dim != 1 or step != 1 or not isinstance(start, int):
        return None
    length = int(source.shape[1])
    start = max(start + length, 0) if start < 0 else min(start, length)
    return [View(result, start * _inner(source))]


def _split(name: str, source: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[View] | None:
    dim_index = 0 if name == "unbind" else 1
    if _argument("dim", dim_index, args, kwargs, _DEFAULT_DIM) % len(source.shape) != 1:
        return None
    views, start = [], 0
    for tensor in result:
        views.append(View(tensor, start * _inner(source)))
        start += 1 if name == "unbind" else int(tensor.shape[1])
    return views
