"""Readers of ops that move and select elements, and of those that make tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.shape_rules import broadcast, normalise_axis
from penstock.graph.general.sizes import SizeLike, is_equal, largest, product, smallest
from penstock.graph.general.torch.writer import Writer, common_type, dtype_named, inside, reader
from penstock.graph.ir import DType

_MAX_EXACT: Final = 1 << 53  # whole numbers that a floating-point attribute holds
_MASKS: Final = (DType.BOOL, DType.U8)
"""The types of indices that PyTorch takes to be masks."""


@reader("view.default", "reshape.default", "_unsafe_view.default", "view_copy.default")
def _view(w: Writer, x: Tensor, sizes: Sequence[SizeLike]) -> Tensor:
    return w.reshape(x, sizes)


@reader("flatten.using_ints")
def _flatten(w: Writer, x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    start, end = normalise_axis(start, x.rank), normalise_axis(end, x.rank)
    return w.reshape(x, (*x.shape[:start], product(x.shape[start : end + 1]), *x.shape[end + 1 :]))


@reader("unflatten.int")
def _unflatten(w: Writer, x: Tensor, axis: int, sizes: Sequence[SizeLike]) -> Tensor:
    axis = normalise_axis(axis, x.rank)
    return w.reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


@reader("permute.default")
def _permute(w: Writer, x: Tensor, order: Sequence[int]) -> Tensor:
    return w.permute(x, order)


@reader("transpose.int", "swapaxes.default")
def _transpose(w: Writer, x: Tensor, a: int, b: int) -> Tensor:
    return x if x.rank == 0 else w.swapped(x, a, b)


@reader("t.default", "numpy_T.default", "mT.default")
def _t(w: Writer, x: Tensor) -> Tensor:
    return x if x.rank < 2 else w.swapped(x, -1, -2)


@reader("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(w: Writer, x: Tensor, axes: Any = None) -> Tensor:
    every = range(x.rank) if axes is None else [axes] if isinstance(axes, int) else axes
    return x if x.rank == 0 else w.squeeze(x, list(every))


@reader("unsqueeze.default")
def _unsqueeze(w: Writer, x: Tensor, axis: int) -> Tensor:
    return w.unsqueeze(x, axis)


@reader("expand.default", "broadcast_to.default")
def _expand(w: Writer, x: Tensor, sizes: Sequence[SizeLike], implicit: bool = False) -> Tensor:
    shape = (*[1] * (len(sizes) - x.rank), *x.shape)
    wanted = tuple(
        own if isinstance(size, int) and size == -1 else size for size, own in zip(sizes, shape, strict=True)
    )
    return x if wanted == x.shape else w.add("expand", x, sizes=wanted)


@reader("expand_as.default")
def _expand_as(w: Writer, x: Tensor, other: Tensor) -> Tensor:
    return _expand(w, x, other.shape)


@reader("repeat.default")
def _repeat(w: Writer, x: Tensor, repeats: Sequence[SizeLike]) -> Tensor:
    x = w.reshape(x, (*[1] * (len(repeats) - x.rank), *x.shape))
    wide = tuple(count if size == 1 else size for count, size in zip(repeats, x.shape, strict=True))
    counts = [1 if size == 1 else count for count, size in zip(repeats, x.shape, strict=True)]
    x = x if wide == x.shape else w.add("expand", x, sizes=wide)
    for axis, count in enumerate(counts):
        if count != 1:
            before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
            x = w.reshape(x, (product(before), 1, size, product(after)))
            x = w.add("expand", x, sizes=(x.shape[0], count, *x.shape[2:]))
            x = w.reshape(x, (*before, count * size, *after))
    return x


@reader("repeat_interleave.self_int")
def _repeat_interleave(w: Writer, x: Tensor, count: int, axis: int | None = None, output_size: Any = None) -> Tensor:
    if axis is None:
        x, axis = w.reshape(x, (-1,)), 0
    axis = normalise_axis(axis, x.rank)
    wide = w.unsqueeze(x, axis + 1)
    wide = w.add("expand", wide, sizes=(*wide.shape[: axis + 1], count, *wide.shape[axis + 2 :]))
    return w.reshape(wide, (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :]))


@reader("slice.Tensor")
def _slice(w: Writer, x: Tensor, axis: int = 0, begin: Any = None, end: Any = None, step: int = 1) -> Tensor:
    return w.sliced(x, axis, begin, end, step)


@reader("narrow.default")
def _narrow(w: Writer, x: Tensor, axis: int, begin: SizeLike, length: SizeLike) -> Tensor:
    return w.sliced(x, axis, begin, begin + length)


@reader("select.int")
def _select(w: Writer, x: Tensor, axis: int, index: Any) -> Tensor:
    axis = normalise_axis(axis, x.rank)
    if isinstance(index, int) and index < 0:
        index = x.shape[axis] + index
    part = w.sliced(x, axis, index, index + 1)
    return w.reshape(part, (*x.shape[:axis], *x.shape[axis + 1 :]))


@reader("split.Tensor", "split_with_sizes.default", "split.sizes")
def _split(w: Writer, x: Tensor, size: Any, axis: int = 0) -> list[Tensor]:
    whole = x.shape[normalise_axis(axis, x.rank)]
    if not isinstance(size, (list, tuple)):
        if not isinstance(whole, int):
            raise UnsupportedError(f"split: expected a constant size of axis {axis}, got {whole}")
        size = [min(size, whole - at) for at in range(0, whole, size)]
    parts, at = [], 0
    for length in size:
        parts.append(w.sliced(x, axis, at, at + length))
        at = at + length
    return parts


@reader("chunk.default")
def _chunk(w: Writer, x: Tensor, chunks: int, axis: int = 0) -> list[Tensor]:
    return _split(w, x, (x.shape[normalise_axis(axis, x.rank)] + chunks - 1) // chunks, axis)


@reader("unbind.int")
def _unbind(w: Writer, x: Tensor, axis: int = 0) -> list[Tensor]:
    count = x.shape[normalise_axis(axis, x.rank)]
    if not isinstance(count, int):
        raise UnsupportedError(f"unbind: expected a constant size of axis {axis}, got {count}")
    return [_select(w, x, axis, at) for at in range(count)]


@reader("cat.default", "concatenate.default")
def _cat(w: Writer, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    kept = [t for t in tensors if t.rank != 1 or t.shape[0] != 0] or list(tensors[:1])
    dtype = common_type(t.dtype for t in tensors)
    return w.concat([w.cast(t, dtype) for t in kept], axis)


@reader("stack.default")
def _stack(w: Writer, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    axis = axis + tensors[0].rank + 1 if axis < 0 else axis
    return w.concat([w.unsqueeze(t, axis) for t in tensors], axis)


@reader("roll.default")
def _roll(w: Writer, x: Tensor, shifts: Sequence[int], axes: Sequence[int] = ()) -> Tensor:
    if not axes:
        return w.reshape(_roll(w, w.reshape(x, (-1,)), shifts, (0,)), x.shape)
    for shift, axis in zip(shifts, axes, strict=True):
        size = x.shape[normalise_axis(axis, x.rank)]
        if size == 0:
            return x
        at = (size - shift) % size
        if at != 0:
            x = w.concat([w.sliced(x, axis, at, None), w.sliced(x, axis, 0, at)], axis)
    return x


@reader("flip.default")
def _flip(w: Writer, x: Tensor, axes: Sequence[int]) -> Tensor:
    turned = {normalise_axis(axis, x.rank) for axis in axes}
    begins = tuple(size - 1 if i in turned else 0 for i, size in enumerate(x.shape))
    ends = tuple(-1 if i in turned else size for i, size in enumerate(x.shape))
    steps = tuple(-1 if i in turned else 1 for i in range(x.rank))
    return w.add("slice", x, begins=begins, ends=ends, steps=steps)


@reader("slice_scatter.default")
def _slice_scatter(
    w: Writer, x: Tensor, source: Tensor, axis: int = 0, begin: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    if step != 1:
        raise UnsupportedError(f"slice_scatter: expected a step of 1, got {step}")
    part = w.sliced(x, axis, begin, end)
    start = inside(0 if begin is None else begin, x.shape[normalise_axis(axis, x.rank)])
    length = part.shape[normalise_axis(axis, x.rank)]
    pieces = [w.sliced(x, axis, 0, start), source, w.sliced(x, axis, start + length, None)]
    return w.concat([p for p in pieces if p.shape[normalise_axis(axis, p.rank)] != 0], axis)


@reader("select_scatter.default")
def _select_scatter(w: Writer, x: Tensor, source: Tensor, axis: int, index: int) -> Tensor:
    return _slice_scatter(w, x, w.unsqueeze(source, normalise_axis(axis, x.rank)), axis, index, index + 1 or None)


@reader("diagonal.default", "diagonal_copy.default")
def _diagonal(w: Writer, x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    a, b = normalise_axis(first, x.rank), normalise_axis(second, x.rank)
    rest = [axis for axis in range(x.rank) if axis not in (a, b)]
    rows, cols = x.shape[a], x.shape[b]
    flat = w.reshape(w.permute(x, (*rest, a, b)), (*[x.shape[axis] for axis in rest], rows * cols))
    begin = offset if offset >= 0 else cols * -offset
    count = largest(smallest(rows, cols - offset) if offset >= 0 else smallest(rows + offset, cols), 0)
    places = w.binary("add", w.binary("mul", w.iota(0, 1, count), cols + 1), begin)
    return w.add("gather", flat, places, axis=flat.rank - 1)


@reader("trace.default")
def _trace(w: Writer, x: Tensor) -> Tensor:
    diagonal = _diagonal(w, x if x.dtype == DType.F32 else w.cast(x, DType.I64))
    return w.add("reduce", diagonal, kind="sum", axes=(0,), keep=False)


@reader("index_select.default")
def _index_select(w: Writer, x: Tensor, axis: int, indices: Tensor) -> Tensor:
    return w.add("gather", x, indices, axis=axis)


@reader("embedding.default")
def _embedding(w: Writer, weight: Tensor, ids: Tensor, *options: Any) -> Tensor:
    return w.add("gather", weight, ids, axis=0)


@reader("gather.default")
def _gather(w: Writer, x: Tensor, axis: int, indices: Tensor, sparse_grad: bool = False) -> Tensor:
    if x.rank == 0 or indices.rank == 0:
        raise UnsupportedError("gather: expected a dimension or more, got a number")
    return w.add("gather_elements", _cropped(w, x, indices.shape, but=normalise_axis(axis, x.rank)), indices, axis=axis)


def _cropped(w: Writer, x: Tensor, shape: Sequence[SizeLike], but: int | None = None) -> Tensor:
    """Return the begin of x on all axes: PyTorch's indices may have fewer rows than what they are of."""
    for axis, size in enumerate(shape):
        if axis != but and is_equal(x.shape[axis], size) is not True:
            x = w.sliced(x, axis, 0, size)
    return x


@reader("scatter.src", "scatter.value")
def _scatter(w: Writer, x: Tensor, axis: int, indices: Tensor, source: Any) -> Tensor:
    if x.rank == 0 or indices.rank == 0:
        raise UnsupportedError("scatter: expected a dimension or more, got a number")
    if not isinstance(source, Tensor):
        source = w.add("expand", w.constant(source, x.dtype), sizes=indices.shape)
    return w.add("scatter_elements", x, indices, _cropped(w, source, indices.shape), axis=axis)


@reader("scatter_add.default")
def _scatter_add(w: Writer, x: Tensor, axis: int, indices: Tensor, source: Tensor) -> Tensor:
    if x.rank == 0 or indices.rank == 0:
        raise UnsupportedError("scatter_add: expected a dimension or more, got a number")
    return w.add("scatter_elements", x, indices, _cropped(w, source, indices.shape), axis=axis, reduction="add")


@reader("index.Tensor", "_unsafe_index.Tensor")
def _index(w: Writer, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.dtype in _MASKS for _, index in used):
        raise UnsupportedError("index: a mask selects as many elements as its values say; use torch.where instead")
    axes = [axis for axis, _ in used]
    if len(used) == 1:
        return w.add("gather", x, used[0][1], axis=axes[0])
    is_run = axes == list(range(axes[0], axes[0] + len(axes)))
    rest = [axis for axis in range(x.rank) if axis not in axes]
    shape = broadcast(*[index.shape for _, index in used])
    columns = [w.unsqueeze(_expand(w, w.cast(index, DType.I64), shape), len(shape)) for _, index in used]
    out = w.add("gather_nd", w.permute(x, [*axes, *rest]), w.concat(columns, len(shape)))
    if not is_run or axes[0] == 0:
        return out
    before, depth = axes[0], len(shape)
    order = [*range(depth, depth + before), *range(depth), *range(depth + before, out.rank)]
    return w.permute(out, order)


@reader("index_put.default", "_unsafe_index_put.default")
def _index_put(
    w: Writer, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    values = w.cast(values, x.dtype)
    if any(index.dtype in _MASKS for _, index in used):
        ((axis, mask),) = used if len(used) == 1 else [(0, None)]
        if mask is None or values.rank or accumulate:
            raise UnsupportedError("index_put: a mask takes as many values as it selects; use torch.where instead")
        mask = w.reshape(mask, (*mask.shape, *[1] * (x.rank - axis - mask.rank)))
        return w.add("where", w.cast(mask, DType.BOOL), values, x)
    axes = [axis for axis, _ in used]
    rest = [axis for axis in range(x.rank) if axis not in axes]
    order = [*axes, *rest]
    shape = broadcast(*[index.shape for _, index in used])
    columns = [w.unsqueeze(_expand(w, w.cast(index, DType.I64), shape), len(shape)) for _, index in used]
    inner = tuple(x.shape[axis] for axis in rest)
    before = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0  # axes in front of the indices'
    values = _expand(w, values, (*inner[:before], *shape, *inner[before:]))
    places = range(before, before + len(shape))
    updates = w.permute(values, [*places, *[axis for axis in range(values.rank) if axis not in places]])
    out = w.add(
        "scatter_nd",
        w.permute(x, order),
        w.concat(columns, len(shape)),
        updates,
        reduction="add" if accumulate else "none",
    )
    return w.permute(out, [order.index(axis) for axis in range(x.rank)])


@reader("scatter_reduce.two")
def _scatter_reduce(
    w: Writer, x: Tensor, axis: int, indices: Tensor, source: Tensor, kind: str, *, include_self: bool = True
) -> Tensor:
    kinds = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
    if kind not in kinds or not include_self:
        raise UnsupportedError(f"scatter_reduce: expected sum, prod, amax or amin with include_self, got {kind}")
    return w.add("scatter_elements", x, indices, source, axis=axis, reduction=kinds[kind])


@reader("unfold.default")
def _unfold(w: Writer, x: Tensor, axis: int, size: int, step: int) -> Tensor:
    axis = normalise_axis(axis, x.rank)
    begins = w.iota(0, step, (x.shape[axis] - size) // step + 1)
    places = w.binary("add", w.unsqueeze(begins, 1), w.unsqueeze(w.iota(0, 1, size), 0))
    parts = w.add("gather", x, places, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, parts.rank), axis + 1]
    return w.permute(parts, order)


@reader("constant_pad_nd.default", "pad.default")
def _pad(w: Writer, x: Tensor, pads: Sequence[SizeLike], mode: Any = "constant", value: Any = None) -> Tensor:
    if not isinstance(mode, str):
        mode, value = "constant", mode
    begins: list[SizeLike] = [0] * x.rank
    ends: list[SizeLike] = [0] * x.rank
    for i in range(len(pads) // 2):
        begins[x.rank - 1 - i], ends[x.rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    if any(isinstance(p, int) and p < 0 for p in (*begins, *ends)):
        for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            cut = (max(-begin, 0), max(-end, 0))
            x = w.sliced(x, axis, cut[0], x.shape[axis] - cut[1])
        begins = [max(b, 0) for b in begins]
        ends = [max(e, 0) for e in ends]
    kinds = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    value = 0 if value is None else value
    number, places = float(value if x.dtype == DType.F32 else int(value)), (*begins, *ends)
    if math.isfinite(number) and (x.dtype == DType.F32 or abs(number) <= _MAX_EXACT):
        return w.add("pad", x, pads=places, mode=kinds[mode], value=number)
    is_inside = w.add("pad", w.filled(x.shape, 1.0, DType.BOOL), pads=places, mode="constant", value=0.0)
    padded = w.add("pad", x, pads=places, mode="constant", value=0.0)
    return w.add("where", is_inside, padded, w.constant(value, x.dtype))


@reader("reflection_pad1d.default", "reflection_pad2d.default", "reflection_pad3d.default")
def _reflection_pad(w: Writer, x: Tensor, pads: Sequence[int]) -> Tensor:
    return _pad(w, x, pads, "reflect")


@reader("replication_pad1d.default", "replication_pad2d.default", "replication_pad3d.default")
def _replication_pad(w: Writer, x: Tensor, pads: Sequence[int]) -> Tensor:
    return _pad(w, x, pads, "replicate")


@reader("arange.default", "arange.start", "arange.start_step")
def _arange(w: Writer, start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **options: Any) -> Tensor:
    if end is None:
        start, end = 0, start
    if any(isinstance(value, (float, Tensor)) for value in (start, end, step)):
        values = _float_range(w, start, end, step)
        return w.cast(values, DType.F32 if dtype is None else dtype_named(dtype))
    span = end - start if step > 0 else start - end
    out = w.iota(start, step, (span + abs(step) - 1) // abs(step))
    return out if dtype is None else w.cast(out, dtype_named(dtype))


def _float_range(w: Writer, start: Any, end: Any, step: Any) -> Tensor:
    """Return numbers from ``start`` on; with a step of 1 their end may be a free size."""
    if all(isinstance(value, (int, float)) for value in (start, end, step)):
        return w.constant(np.arange(start, end, step).astype(np.float32))
    if step != 1 or not isinstance(start, (int, float)) or isinstance(end, Tensor):
        raise UnsupportedError(f"{w.name}: arange: expected constant numbers, or a step of 1 to a free size")
    numbers = w.as_float(w.iota(0, 1, end - math.floor(start)))
    return w.binary("add", numbers, float(start))


@reader("linspace.default")
def _linspace(w: Writer, start: Any, end: Any, steps: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    if all(isinstance(value, (int, float)) for value in (start, end, steps)):
        values = w.constant(np.linspace(start, end, steps).astype(np.float32))
    else:
        gaps = w.constant(largest(steps - 1, 1))
        step = w.binary("div", w.binary("sub", end, start), gaps, at_least=DType.F32)
        numbers = w.binary("mul", w.as_float(w.iota(0, 1, steps)), step)
        values = w.binary("add", numbers, start, at_least=DType.F32)
    return w.cast(values, DType.F32 if dtype is None else dtype_named(dtype))


@reader("full.default", "new_full.default", "full_like.default")
def _full(w: Writer, first: Any, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
    own = first.dtype if isinstance(first, Tensor) else None
    sizes = args[0] if len(args) == 2 else first.shape if isinstance(first, Tensor) else first
    value = args[-1]
    if own is None:
        own = DType.BOOL if isinstance(value, bool) else DType.I64 if isinstance(value, int) else DType.F32
    return w.filled(sizes, value, own if dtype is None else dtype_named(dtype))


@reader("zeros.default", "new_zeros.default", "zeros_like.default", "empty.memory_format", "new_empty.default",
        "empty_like.default", "empty.default")  # fmt: skip
def _zeros(w: Writer, first: Any, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
    return _numbers(w, 0.0, first, args, dtype)


@reader("ones.default", "new_ones.default", "ones_like.default")
def _ones(w: Writer, first: Any, *args: Any, dtype: Any = None, **options: Any) -> Tensor:
    return _numbers(w, 1.0, first, args, dtype)


def _numbers(w: Writer, value: float, first: Any, args: Sequence[Any], dtype: Any) -> Tensor:
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else None
    own = first.dtype if isinstance(first, Tensor) else DType.F32
    sizes = sizes if sizes is not None else first.shape if isinstance(first, Tensor) else first
    return w.filled(sizes, value, own if dtype is None else dtype_named(dtype))


@reader("fill.Scalar", "fill.Tensor")
def _fill(w: Writer, x: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _expand(w, w.cast(value, x.dtype), x.shape)
    return w.filled(x.shape, value, x.dtype)


@reader("zero.default")
def _zero(w: Writer, x: Tensor) -> Tensor:
    return w.filled(x.shape, 0.0, x.dtype)


@reader("scalar_tensor.default")
def _scalar_tensor(w: Writer, value: Any, dtype: Any = None, **options: Any) -> Tensor:
    return w.constant(value, None if dtype is None else dtype_named(dtype))


@reader("copy.default")
def _copy(w: Writer, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return _expand(w, w.cast(source, x.dtype), x.shape)


@reader("tril.default", "triu.default")
def _trilu(w: Writer, x: Tensor, diagonal: int = 0, *, upper: bool = False) -> Tensor:
    return w.add("trilu", x, diagonal=(diagonal,), upper=upper)


@reader("triu.default")
def _triu(w: Writer, x: Tensor, diagonal: int = 0) -> Tensor:
    return _trilu(w, x, diagonal, upper=True)


@reader("pixel_shuffle.default")
def _pixel_shuffle(w: Writer, x: Tensor, factor: int) -> Tensor:
    n, c, h, width = x.shape
    parts = w.reshape(x, (n, c // (factor * factor), factor, factor, h, width))
    return w.reshape(w.permute(parts, (0, 1, 4, 2, 5, 3)), (n, c // (factor * factor), h * factor, width * factor))


@reader("pixel_unshuffle.default")
def _pixel_unshuffle(w: Writer, x: Tensor, factor: int) -> Tensor:
    n, c, h, width = x.shape
    parts = w.reshape(x, (n, c, h // factor, factor, width // factor, factor))
    return w.reshape(w.permute(parts, (0, 1, 3, 5, 2, 4)), (n, c * factor * factor, h // factor, width // factor))


@reader("channel_shuffle.default")
def _channel_shuffle(w: Writer, x: Tensor, groups: int) -> Tensor:
    n, c, *rest = x.shape
    parts = w.reshape(x, (n, groups, c // groups, *rest))
    return w.reshape(w.swapped(parts, 1, 2), x.shape)


@reader("meshgrid.indexing", "meshgrid.default")
def _meshgrid(w: Writer, tensors: Sequence[Tensor], indexing: str = "ij") -> list[Tensor]:
    if indexing != "ij" and len(tensors) > 1:
        swapped = _meshgrid(w, [tensors[1], tensors[0], *tensors[2:]])
        return [swapped[1], swapped[0], *swapped[2:]]
    shape = tuple(size for t in tensors for size in (t.shape or (1,)))
    result = []
    for axis, tensor in enumerate(tensors):
        place = [1] * len(shape)
        place[axis] = -1
        result.append(w.add("expand", w.reshape(tensor, place), sizes=shape))
    return result
