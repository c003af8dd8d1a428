"""Remove permutes between NCHW and NHWC.

Importers write every convolution, pool and resize of images as permute to NHWC, op, permute back.  This pass moves each
permute back behind the ops that read it, where it meets the next one and both disappear.  What is left stands at inputs
and outputs, and before ops that need the order of the axes, such as a flatten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.sizes import SizeLike

__all__ = ["move_permutes"]

_MAX_MOVED_CONSTANT: Final = 1 << 20
"""Elements of a constant that is permuted while reading; larger ones may be weights that are better left alone."""


def move_permutes(draft: Draft) -> None:
    """Rewrite the draft in place."""
    _Mover(draft).run()
    draft.prune()


class _Mover:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.calls: list[DraftCall] = []
        self.sources: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # of each tensor whose permute moves, by id
        self.permuted: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # of each permuted tensor
        self.new: dict[int, Tensor] = {}  # what replaces a tensor

    def run(self) -> None:
        for call in self.draft.calls:
            call.inputs = [self._current(tensor) for tensor in call.inputs]
            if not self._move(call):
                self._keep(call)
        self.draft.outputs = [self._current(tensor) or tensor for tensor in self.draft.outputs]
        self.draft.calls = self.calls

    def _current(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self.new.get(id(tensor), tensor)

    def _keep(self, call: DraftCall) -> None:
        self.calls.append(call)

    def _move(self, call: DraftCall) -> bool:
        if call.op == "permute":
            return self._merge_permute(call)
        rule = _RULES.get(call.op)
        if rule is None or not any(tensor is not None and id(tensor) in self.sources for tensor in call.inputs):
            return False
        return rule(self, call)

    def _merge_permute(self, call: DraftCall) -> bool:
        """Merge it with the permute before it."""
        x, out = call.argument(0), call.output
        order: tuple[int, ...] = call.attrs["order"]
        if id(x) in self.permuted:
            x, first = self.permuted[id(x)]
            order = tuple(first[axis] for axis in order)
        if order == tuple(range(len(order))):
            self.new[id(out)] = x
            return True
        self._permute_into(out, x, order, call.name)
        return True

    def _permute_into(self, out: Tensor, x: Tensor, order: tuple[int, ...], name: str) -> None:
        moved = [axis for axis in order if x.shape[axis] != 1]
        op, attrs = ("permute", {"order": order}) if moved != sorted(moved) else ("reshape", {"sizes": out.shape})
        self._keep(DraftCall(op, name, [x], [out], attrs))
        self.permuted[id(out)] = (x, order)
        if is_image_order(order):
            self.sources[id(out)] = (x, order)

    def emit(self, call: DraftCall, inputs: list[Tensor | None], order: tuple[int, ...], **attrs: Any) -> None:
        """Keep ``call`` over inputs in the order of the source, and permute its output."""
        out = call.output
        shape: list[SizeLike] = [0] * len(order)
        for at, axis in enumerate(order):
            shape[axis] = out.shape[at]
        inner = Tensor(self.draft.free_name(out.name), out.dtype, tuple(shape))
        self._keep(DraftCall(call.op, call.name, inputs, [inner], {**call.attrs, **attrs}))
        self._permute_into(out, inner, order, call.name)

    def aligned(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], tuple[int, ...]] | None:
        """Return the tensors in the order of the source of the permuted ones, and that order; None if it cannot be."""
        orders = {self.sources[id(t)][1] for t in tensors if t is not None and id(t) in self.sources}
        if len(orders) != 1:
            return None
        (order,) = orders
        result: list[Tensor | None] = []
        for tensor in tensors:
            if tensor is None:
                result.append(None)
            elif id(tensor) in self.sources:
                result.append(self.sources[id(tensor)][0])
            else:
                moved = self._reordered(tensor, order)
                if moved is None:
                    return None
                result.append(moved)
        return result, order

    def _reordered(self, tensor: Tensor, order: tuple[int, ...]) -> Tensor | None:
        """Return a small constant, or a tensor whose axes beside one are 1, in the order of the source."""
        rank = len(order)
        if tensor.rank > rank:
            return None
        shape = (*[1] * (rank - tensor.rank), *tensor.shape)
        inverse = tuple(order.index(axis) for axis in range(rank))
        wanted = tuple(shape[axis] for axis in inverse)
        value = tensor.value
        if value is not None and value.size <= _MAX_MOVED_CONSTANT and value.dtype != object:
            ones = (1,) * (rank - value.ndim)
            array = np.ascontiguousarray(value.reshape(ones + value.shape).transpose(inverse))
            return Tensor(self.draft.free_name(tensor.name), tensor.dtype, array.shape, array)
        kept = [axis for axis in inverse if shape[axis] != 1]
        if value is None and kept == sorted(kept):
            out = Tensor(self.draft.free_name(tensor.name), tensor.dtype, wanted)
            self._keep(DraftCall("reshape", tensor.name, [tensor], [out], {"sizes": wanted}))
            return out
        return None


def is_image_order(order: Sequence[int]) -> bool:
    """Return True for the order that moves the last axis behind the first: NHWC to NCHW, NLC to NCL."""
    rank = len(order)
    return rank >= 3 and tuple(order) == (0, rank - 1, *range(1, rank - 1))


def _elementwise(mover: _Mover, call: DraftCall) -> bool:
    if len(call.outputs) != 1:
        return False
    rank = call.outputs[0].rank
    if any(t is not None and id(t) in mover.sources and t.rank != rank for t in call.inputs):
        return False
    aligned = mover.aligned(call.inputs)
    if aligned is None:
        return False
    mover.emit(call, *aligned)
    return True


def _along_axis(mover: _Mover, call: DraftCall) -> bool:
    aligned = mover.aligned(call.inputs)
    if aligned is None:
        return False
    inputs, order = aligned
    mover.emit(call, inputs, order, axis=order[call.attrs["axis"]])
    return True


def _by_axis(*names: str) -> Callable[[_Mover, DraftCall], bool]:
    """Return the rule of an op whose attributes ``names`` have one number, or two runs of them, for each axis."""

    def move(mover: _Mover, call: DraftCall) -> bool:
        x, order = mover.sources[id(call.inputs[0])]
        rank = len(order)
        attrs: dict[str, Any] = {}
        for name in names:
            values: tuple[Any, ...] = call.attrs[name]
            runs = [values[at : at + rank] for at in range(0, len(values), rank)]
            attrs[name] = tuple(run[order.index(axis)] for run in runs for axis in range(rank))
        mover.emit(call, [x, *call.inputs[1:]], order, **attrs)
        return True

    return move


def _reduce(mover: _Mover, call: DraftCall) -> bool:
    x, order = mover.sources[id(call.inputs[0])]
    axes = tuple(sorted(order[axis] for axis in call.attrs["axes"]))
    if call.attrs["keep"]:
        mover.emit(call, [x], order, axes=axes)
        return True
    left = [axis for axis in order if axis not in axes]
    if left != sorted(left):
        return False
    mover._keep(DraftCall(call.op, call.name, [x], call.outputs, {**call.attrs, "axes": axes}))
    return True


def _reshape(mover: _Mover, call: DraftCall) -> bool:
    """Move a permute behind a reshape that removes or adds axes of size 1, or that only merges such."""
    x, out = call.argument(0), call.output
    source, order = mover.sources[id(x)]
    kept = [axis for axis in order if source.shape[axis] != 1]
    if kept == sorted(kept):  # the permute moves nothing
        mover._keep(DraftCall("reshape", call.name, [source], [out], call.attrs))
        return True
    real = [size for size in x.shape if size != 1]
    if real != [size for size in out.shape if size != 1]:
        return False
    # The axes of the output in the order of the source: those of size 1 stay beside the axis before them.
    at = iter(kept)
    places: list[tuple[int, int]] = []
    last = -1
    for index, size in enumerate(out.shape):
        last = next(at) if size != 1 else last
        places.append((last, index))
    arranged = sorted(places)
    new_order = tuple([index for _, index in arranged].index(i) for i in range(out.rank))
    shape = tuple(out.shape[index] for _, index in arranged)
    inner = Tensor(mover.draft.free_name(out.name), out.dtype, shape)
    mover._keep(DraftCall("reshape", call.name, [source], [inner], {"sizes": shape}))
    mover._permute_into(out, inner, new_order, call.name)
    return True


_RULES: Final[dict[str, Callable[[_Mover, DraftCall], bool]]] = {
    "unary": _elementwise,
    "binary": _elementwise,
    "where": _elementwise,
    "cast": _elementwise,
    "softmax": _along_axis,
    "concat": _along_axis,
    "cumsum": _along_axis,
    "slice": _by_axis("begins", "ends", "steps"),
    "pad": _by_axis("pads"),
    "reduce": _reduce,
    "reshape": _reshape,
}
