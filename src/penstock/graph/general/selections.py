"""Boxes that an op selects, whose number is a result of the run.

The core plans a run before it computes anything, so every size must follow from the sizes of the inputs.  ``nms``
therefore gives as many rows as it can select at most, and their number.  While a network is read that number is a named
size, an open one, so that shapes fit and the calls that read it are found; ``bound_selections`` then puts the most in
its place, and makes the number an output of the network.

So the rows behind the selected ones hold anything, and an element that is read must not depend on them.  A tensor has
one open axis at most, whose size is the number of boxes, the smaller of that and a constant, or a multiple of either.
The ops of ``_RULES`` keep the rows of one box apart from the others, in the cases that are written there.  All else is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.errors import InternalError, UnsupportedError
from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.sizes import (
    MAX_SIZE,
    SizeExpression,
    SizeLike,
    SizeSymbol,
    bounds,
    coefficient,
    parts_of_minimum,
    product,
    substitute,
    symbol,
    symbols_of,
)

__all__ = ["bound_selections", "select_boxes"]


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

    Raises UnsupportedError (code "selected_boxes") for a call that may read rows behind the selected ones.
    """
    if draft.selections:
        _Selections(draft).bind()


class _Number(NamedTuple):
    """``factor`` times the number of boxes that an ``nms`` selects, or times ``limit`` if that is smaller."""

    key: SizeSymbol
    limit: int
    factor: int = 1


class _Selections:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.counts: dict[_Number, Tensor] = {}

    def bind(self) -> None:
        self.draft.materialised_outputs()
        for call in [call for call in self.draft.calls if call.op == "sizes"]:
            self._give_count(call)
        self._add_outputs()
        self.draft.prune()  # calls that nobody reads may do anything
        for call in self.draft.calls:
            if not self._keeps_rows(call):
                raise UnsupportedError(
                    f"{call.name} ({call.op}): the number of selected boxes is a result of the run, and this takes "
                    "boxes together, or computes a size of their number; end the network with the boxes, or with what "
                    "is computed for each of them",
                    code="selected_boxes",
                )
        self._put_most()

    def _open_axes(self, tensor: Tensor) -> list[int]:
        return [axis for axis, size in enumerate(tensor.shape) if self.draft.is_open(size)]

    def _number(self, size: SizeLike) -> _Number | None:
        """Return the number that an open size is; None for another expression."""
        number, factor = coefficient(size)
        parts = set(parts_of_minimum(number))
        constants = [part for part in parts if isinstance(part, int)]
        (name, *more) = parts.difference(constants)
        for key in self.draft.selections:
            if not more and factor > 0 and name == SizeExpression({(key,): 1}):
                return _Number(key, min([key.max, *constants]), factor)
        return None

    # Numbers that are read as values.

    def _give_count(self, call: DraftCall) -> None:
        """Let those who read numbers of boxes as values, maybe beside other sizes, read the counts."""
        values = call.attrs["values"]
        numbers = [self._number(size) if self.draft.is_open(size) else None for size in values]
        if not any(numbers) or any(self.draft.is_open(s) and n is None for s, n in zip(values, numbers, strict=True)):
            return
        parts = [
            self.draft.constant([size]) if number is None else self._count(number, call.name)
            for size, number in zip(values, numbers, strict=True)
        ]
        first = len(self.draft.calls)
        joined = self._joined(parts, call.name)
        self._move(first, self.draft.calls.index(call))
        self.draft.replace(call.output, joined)

    def _joined(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """Return numbers behind one another; a sizes attribute has at most 16."""
        parts = [
            self.draft.add("concat", *parts[at : at + 8], name=name, axis=0) if len(parts) > 1 else parts[0]
            for at in range(0, len(parts), 8)
        ]
        return parts[0] if len(parts) == 1 else self.draft.add("concat", *parts, name=name, axis=0)

    def _move(self, first: int, to: int) -> None:
        """Move the calls from ``first`` on, the last ones, in front of the call ``to``."""
        calls = self.draft.calls
        calls[to:] = [*calls[first:], *calls[to:first]]

    def _count(self, number: _Number, name: str) -> Tensor:
        """Return a number of boxes as the run computes it, directly behind its ``nms``."""
        count = self.draft.selections[number.key][1]
        if number not in self.counts:
            calls = self.draft.calls
            behind = next(i for i, call in enumerate(calls) if count in call.outputs) + 1
            first, value = len(calls), count
            if number.limit < number.key.max:
                value = self.draft.add("binary", value, self.draft.constant([number.limit]), name=name, kind="min")
            if number.factor > 1:
                value = self.draft.add("binary", value, self.draft.constant([number.factor]), name=name, kind="mul")
            self._move(first, behind)
            self.counts[number] = value
        return self.counts[number]

    def _add_outputs(self) -> None:
        """Add an output for the number of boxes of each output that has an axis of them."""
        draft = self.draft
        names: dict[_Number, str] = {}
        for name, tensor in list(zip(draft.output_names, draft.outputs, strict=True)):
            axes = self._open_axes(tensor)
            if not axes:
                continue
            number = self._number(tensor.shape[axes[0]])
            if len(axes) > 1 or number is None:
                raise UnsupportedError(
                    f"output {name}: expected one axis, of selected boxes or the first k, got {tensor}",
                    code="selected_boxes",
                    param=name,
                )
            if number not in names:
                names[number] = self._free_output()
                draft.output(names[number], self._count(number, name))
            draft.counts[name] = (axes[0], names[number])

    def _free_output(self) -> str:
        taken = {*self.draft.output_names, *(tensor.name for tensor in self.draft.inputs)}
        name, at = "num_selected", 0
        while name in taken:
            at += 1
            name = f"num_selected_{at}"
        return name

    # Sizes.

    def _keeps_rows(self, call: DraftCall) -> bool:
        """Return True if the elements of the selected boxes depend on no others, and stay in front of them."""
        inputs = [[] if tensor is None else self._open_axes(tensor) for tensor in call.inputs]
        outputs = [self._open_axes(tensor) for tensor in call.outputs]
        attrs = {key: [size for size in _sizes(value) if self.draft.is_open(size)] for key, value in call.attrs.items()}
        attrs = {key: sizes for key, sizes in attrs.items() if sizes}
        if call.op == "nms" or not (any(inputs) or any(outputs) or attrs):
            return not any(inputs) and not attrs
        if not all(len(axes) < 2 for axes in inputs) or not all(len(axes) == 1 for axes in outputs):
            return False
        if not attrs.keys() <= {_OPEN_ATTRS.get(call.op)}:
            return False
        ends = {self._number(size) for sizes in attrs.values() for size in sizes}
        ends |= {self._number(t.shape[axis]) for t, (axis,) in zip(call.outputs, outputs, strict=True)}
        begins = {
            self._number(tensor.shape[axis])
            for tensor, axes in zip(call.inputs, inputs, strict=True)
            for axis in axes
            if tensor is not None
        }
        if not _is_one_number(begins, ends, call.op):
            return False
        rule = _RULES.get(call.op)
        return rule is not None and rule(call, [axes[0] if axes else None for axes in inputs], outputs[0][0])

    def _put_most(self) -> None:
        draft = self.draft
        most = {key: size for key, (size, _) in draft.selections.items()}
        draft.origins = [origin for origin in draft.origins if not self._open_axes(origin.tensor)]
        for call in draft.calls:
            for tensor in (*call.inputs, *call.outputs):
                if tensor is not None:
                    tensor.shape = tuple(substitute(size, most) for size in tensor.shape)
            key = _OPEN_ATTRS.get(call.op)
            if key is not None:
                call.attrs = {**call.attrs, key: tuple(substitute(size, most) for size in call.attrs[key])}


def _sizes(value: Any) -> list[SizeLike]:
    """Return the sizes with a name in an attribute."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, SizeExpression)]


def _is_one_number(begins: set[_Number | None], ends: set[_Number | None], op: str) -> bool:
    """Return True if all open sizes of a call are one number.

    A slice may take the first boxes of more, and a reshape make a multiple of it, or of a multiple the number.
    """
    (end, *others) = ends
    if others or end is None:
        return False
    if op == "slice":
        return all(b is not None and b._replace(limit=end.limit) == end and b.limit >= end.limit for b in begins)
    if op == "reshape":
        return all(begin is not None and begin._replace(factor=end.factor) == end for begin in begins)
    return begins <= {end}


# Rules: whether a call with these axes of selected boxes, None for an input without, and the axis of its outputs, keeps
# the boxes apart.  Before, each output has exactly one such axis, an input one at most, and all are of one number.

_Axes = list[int | None]


def _always(call: DraftCall, axes: _Axes, to: int) -> bool:
    return True


def _broadcast(call: DraftCall, axes: _Axes, to: int) -> bool:
    """Each input has the axis of the boxes, or 1 in its place."""
    from_end = call.outputs[0].rank - to
    for index, axis in enumerate(axes):
        tensor = call.argument(index)
        at = tensor.rank - from_end
        if at != axis if axis is not None else at >= 0 and tensor.shape[at] != 1:
            return False
    return True


def _other_axis(call: DraftCall, axes: _Axes, to: int) -> bool:
    return axes[0] is not None and bool(axes[0] != call.attrs["axis"])


def _concat(call: DraftCall, axes: _Axes, to: int) -> bool:
    present = [axis for axis, tensor in zip(axes, call.inputs, strict=True) if tensor is not None]
    return to != call.attrs["axis"] and all(axis == to for axis in present)


def _gather(call: DraftCall, axes: _Axes, to: int) -> bool:
    return axes[0] is None or _other_axis(call, axes, to)


def _gather_elements(call: DraftCall, axes: _Axes, to: int) -> bool:
    if axes[0] is None:
        return bool(axes[1] == call.attrs["axis"])
    return bool(axes[0] == axes[1] != call.attrs["axis"])


def _gather_nd(call: DraftCall, axes: _Axes, to: int) -> bool:
    """Boxes are places outside the batch."""
    return axes[0] is None and axes[1] is not None and call.attrs["batch_dims"] <= axes[1] < call.argument(1).rank - 1


def _reduce(call: DraftCall, axes: _Axes, to: int) -> bool:
    return axes[0] not in (call.attrs["axes"] or range(call.argument(0).rank))


def _matmul(call: DraftCall, axes: _Axes, to: int) -> bool:
    """Boxes are rows of a, or columns of b."""
    a, b = call.argument(0).rank, call.argument(1).rank
    rows, columns = a - 1 if call.attrs["transpose_a"] else a - 2, b - 2 if call.attrs["transpose_b"] else b - 1
    return axes in ([rows, None], [None, columns])


def _linear(call: DraftCall, axes: _Axes, to: int) -> bool:
    """Boxes are no features, and weights have none."""
    return axes[0] != call.argument(0).rank - 1 and not any(axis is not None for axis in axes[1:])


def _slice(call: DraftCall, axes: _Axes, to: int) -> bool:
    return axes[0] in (None, to) and call.attrs["begins"][to] == 0 and call.attrs["steps"][to] == 1


def _reshape(call: DraftCall, axes: _Axes, to: int) -> bool:
    """The boxes stay in front if as many elements are outside of their axis as before, and behind its begin."""
    axis, before, after = axes[0], call.argument(0).shape, call.output.shape
    if axis is None:
        return False
    return product(before[:axis]) == product(after[:to]) and product(before[axis:]) == product(after[to:])


def _iota(call: DraftCall, axes: _Axes, to: int) -> bool:
    return all(isinstance(number, int) for number in call.attrs["range"][:2])


_OPEN_ATTRS: Final = {"fill": "sizes", "expand": "sizes", "reshape": "sizes", "slice": "ends", "iota": "range"}
"""The only attribute of an op that may hold the number of boxes."""

_RULES: Final[dict[str, Callable[[DraftCall, _Axes, int], bool]]] = {
    "unary": _always, "cast": _always, "permute": _always, "fill": _always, "iota": _iota,
    "binary": _broadcast, "where": _broadcast, "expand": _broadcast, "concat": _concat,
    "softmax": _other_axis, "cumsum": _other_axis, "arg_reduce": _other_axis, "top_k": _other_axis, "reduce": _reduce,
    "gather": _gather, "gather_elements": _gather_elements, "gather_nd": _gather_nd,
    "matmul": _matmul, "linear": _linear, "layer_norm": _linear, "rms_norm": _linear,
    "slice": _slice, "reshape": _reshape,
}  # fmt: skip
