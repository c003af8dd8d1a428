"""Boxes that an op selects, whose number is a result of the run.

The core plans a run before it computes anything, so every size must follow from the sizes of the inputs.  ``nms``
therefore gives as many rows as it can select at most, and their number.  While a network is read that number is a named
size, so that shapes fit and the calls that mix rows are found; ``bound_selections`` then puts the most in its place,
and makes the number an output of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.errors import InternalError, UnsupportedError
from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.sizes import (
    MAX_SIZE,
    SizeExpression,
    SizeLike,
    SizeSymbol,
    bounds,
    product,
    smallest,
    substitute,
    symbol,
    symbols_of,
)

__all__ = ["bound_selections", "select_boxes"]

_ELEMENTWISE: Final = ("unary", "binary", "where", "cast", "permute", "expand", "fill", "iota")
_ROW_WISE: Final = ("linear", "layer_norm", "rms_norm")


def select_boxes(draft: Draft, boxes: Tensor, scores: Tensor, limit: SizeLike, name: str, **attrs: Any) -> Tensor:
    """Add an ``nms`` and return its rows; the first size is a name for their number until ``bound_selections``."""
    rows, count = draft.add_many("nms", boxes, scores, name=name, limit=(limit,), **attrs)
    if rows.value is not None:
        raise InternalError(f"{name}: expected a call that a run computes")
    chosen = symbol(draft.free_name("num_selected"), 0, min(bounds(rows.shape[0])[1], MAX_SIZE))
    (key,) = symbols_of(chosen)
    draft.selections[key] = (rows.shape[0], count)
    rows.shape = (chosen, *rows.shape[1:])
    return rows


def bound_selections(draft: Draft) -> None:
    """Give tensors of selected boxes room for the most, and the network an output for each number of boxes.

    Raises UnsupportedError (code "selected_boxes") for a call that would read rows behind the selected ones.
    """
    if not draft.selections:
        return
    draft.materialised_outputs()
    draft.prune()
    for call in list(draft.calls):
        if call.op == "sizes":
            _give_count(draft, call)
        elif not _keeps_rows(draft, call):
            raise UnsupportedError(
                f"{call.name} ({call.op}): it takes all selected boxes together, and their number is a result of the "
                "run; end the network with the boxes, or with what is computed for each of them",
                code="selected_boxes",
            )
    _add_counts(draft)
    most = {key: size for key, (size, _) in draft.selections.items()}
    draft.origins = [o for o in draft.origins if not any(_is_open(draft, size) for size in o.tensor.shape)]
    for call in draft.calls:
        for tensor in (*call.inputs, *call.outputs):
            if tensor is not None:
                tensor.shape = tuple(substitute(size, most) for size in tensor.shape)
        call.attrs = {
            key: tuple(substitute(item, most) for item in value) if isinstance(value, tuple) else value
            for key, value in call.attrs.items()
        }
    draft.prune()


def _is_open(draft: Draft, size: SizeLike) -> bool:
    return isinstance(size, SizeExpression) and not symbols_of(size).isdisjoint(draft.selections)


def _open_axes(draft: Draft, tensor: Tensor) -> list[int]:
    return [axis for axis, size in enumerate(tensor.shape) if _is_open(draft, size)]


def _keeps_rows(draft: Draft, call: DraftCall) -> bool:
    """Return True if the elements of the selected boxes depend on no others, and stay in front of them."""
    axes = [[] if tensor is None else _open_axes(draft, tensor) for tensor in call.inputs]
    if not any(axes) or call.op in _ELEMENTWISE:
        return True
    if call.op in _ROW_WISE:
        return not {call.argument(0).rank - 1} & set(axes[0])
    rule = _RULES.get(call.op)
    return rule is not None and rule(draft, call, axes)


def _axis_is_closed(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    return all(call.attrs["axis"] not in found for found in axes)


def _gather(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    return call.attrs["axis"] not in axes[0]


def _gather_nd(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    indices = call.argument(1)
    first = call.attrs["batch_dims"]
    depth = indices.shape[-1]
    return (
        isinstance(depth, int) and indices.rank - 1 not in axes[1] and not {*range(first, first + depth)} & {*axes[0]}
    )


def _reduce(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    return not set(call.attrs["axes"] or range(call.argument(0).rank)) & set(axes[0])


def _matmul(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    a, b = call.argument(0), call.argument(1)
    inner = (
        a.rank - 2 if call.attrs["transpose_a"] else a.rank - 1,
        b.rank - 1 if call.attrs["transpose_b"] else b.rank - 2,
    )
    return inner[0] not in axes[0] and inner[1] not in axes[1]


def _slice(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    return all(call.attrs["begins"][axis] == 0 and call.attrs["steps"][axis] == 1 for axis in axes[0])


def _reshape(draft: Draft, call: DraftCall, axes: list[list[int]]) -> bool:
    """The selected boxes stay in front if as many elements are outside their axis as before."""
    before, after = call.argument(0), call.output
    (found, *more), others = axes[0], _open_axes(draft, after)
    if more or len(others) != 1:
        return False
    return bool(product(before.shape[:found]) == product(after.shape[: others[0]]))


_RULES: Final[dict[str, Callable[[Draft, DraftCall, list[list[int]]], bool]]] = {
    "softmax": _axis_is_closed, "cumsum": _axis_is_closed, "arg_reduce": _axis_is_closed, "top_k": _axis_is_closed,
    "concat": _axis_is_closed, "gather": _gather, "gather_elements": _gather, "gather_nd": _gather_nd,
    "reduce": _reduce, "matmul": _matmul, "slice": _slice, "reshape": _reshape,
}  # fmt: skip


def _give_count(draft: Draft, call: DraftCall) -> None:
    """Let those who read the number of boxes as a value read the count."""
    values = call.attrs["values"]
    if not any(_is_open(draft, size) for size in values):
        return
    count = _count_of(draft, values[0], call.name) if len(values) == 1 else None
    if count is None:
        raise UnsupportedError(
            f"{call.name}: it computes with the number of selected boxes, which is a result of the run; return that "
            "number only",
            code="selected_boxes",
        )
    draft.replace(call.output, count)


def _count_of(draft: Draft, size: SizeLike, name: str) -> Tensor | None:
    """Return the count that a size is, or that it limits; None for another expression."""
    for key, (_, count) in draft.selections.items():
        whole = SizeExpression({(key,): 1})
        if size == whole:
            return count
        limit = _limit_of(size, key)
        if limit is not None and size in (smallest(whole, limit), smallest(limit, whole)):
            return draft.add("binary", count, draft.constant([limit]), name=name, kind="min")
    return None


def _limit_of(size: SizeLike, key: SizeSymbol) -> int | None:
    """Return the most of "min(number, most)", the size of the first boxes."""
    low, high = bounds(size)
    return (
        high if isinstance(size, SizeExpression) and symbols_of(size) == {key} and low == 0 < high < key.max else None
    )


def _add_counts(draft: Draft) -> None:
    """Add an output for the number of boxes of each output that has an axis of them."""
    names: dict[SizeLike, str] = {}
    for name, tensor in list(zip(draft.output_names, draft.outputs, strict=True)):
        axes = _open_axes(draft, tensor)
        if not axes:
            continue
        size = tensor.shape[axes[0]]
        count = _count_of(draft, size, name) if len(axes) == 1 and size not in names else None
        if size not in names and count is not None:
            names[size] = "num_selected" if not names else f"num_selected_{len(names)}"
            draft.output(names[size], count)
        if len(axes) != 1 or size not in names:
            raise UnsupportedError(
                f"output {name}: expected one axis of selected boxes, got {tensor}", code="selected_boxes", param=name
            )
        draft.counts[name] = (axes[0], names[size])
