"""Ops that move elements and change shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock.graph.general.draft import NUMPY_TYPES, Tensor
from penstock.graph.general.sizes import SizeLike, bounds, largest, product, smallest
from penstock.graph.ir import DType
from penstock.graph.onnx.context import ELEMENT_TYPES, FLOATS_AS_F32, Site, Value
from penstock.graph.onnx.load import element_name
from penstock.graph.onnx.registry import reads

__all__ = ["padded"]

_FAR: Final = 1 << 31
_MAX_PARTS: Final = 1 << 16


@reads("Shape")
def _shape(site: Site) -> Tensor:
    shape = list(site.x().shape)
    part = shape[site.int_attr("start") : site.int_attr("end", len(shape))]
    return site.constant(part or np.zeros(0, np.int64))


@reads("Size")
def _size(site: Site) -> Tensor:
    return site.reshape(site.constant([product(site.x().shape)]), ())


@reads("Reshape")
def _reshape(site: Site) -> Tensor:
    x = site.x()
    sizes: list[SizeLike] = list(site.sizes(1))
    if not site.flag("allowzero"):
        for at, size in enumerate(sizes):
            if isinstance(size, int) and size == 0:
                site.expect(at < x.rank, f"an axis {at} of the input, which a 0 of the shape copies")
                sizes[at] = x.shape[at]
    return site.reshape(x, _resolved(x.shape, sizes))


def _resolved(shape: Sequence[SizeLike], sizes: list[SizeLike]) -> list[SizeLike]:
    """Return the sizes with the one for -1; a quotient with names becomes a product where equal factors cancel."""
    unknown = [at for at, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    if len(unknown) != 1:
        return sizes
    known = [size for at, size in enumerate(sizes) if at != unknown[0]]
    rest = list(shape)
    for size in list(known):
        if size in rest and size != 0:
            rest.remove(size)
            known.remove(size)
    divisor = product(known)
    sizes[unknown[0]] = product(rest) // divisor if divisor != 0 else 0
    return sizes


@reads("Flatten")
def _flatten(site: Site) -> Tensor:
    x = site.x()
    axis = site.int_attr("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    site.expect(0 <= axis <= x.rank, f"an axis of 0 to {x.rank}")
    return site.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


def _axes(site: Site, since: int) -> tuple[int, ...] | None:
    """Return the axes, which are an input since a version and an attribute before."""
    if site.version >= since:
        return site.whole(1) if site.has(1) else None
    return site.ints("axes")


@reads("Squeeze")
def _squeeze(site: Site) -> Tensor:
    x = site.x()
    axes = _axes(site, 13)
    gone = {site.axis(axis, x.rank) for axis in axes} if axes is not None else set()
    if axes is None:
        if any(map(site.draft.is_open, x.shape)):
            raise site.refused("axes are missing, and the number of selected boxes may be 1; give axes")
        gone = {at for at, size in enumerate(x.shape) if size == 1}
    return site.reshape(x, [size for at, size in enumerate(x.shape) if at not in gone])


@reads("Unsqueeze")
def _unsqueeze(site: Site) -> Tensor:
    x = site.x()
    axes = _axes(site, 13) or ()
    rank = x.rank + len(axes)
    new = {site.axis(axis, rank) for axis in axes}
    site.expect(len(new) == len(axes), "different axes")
    old = iter(x.shape)
    return site.reshape(x, [1 if at in new else next(old) for at in range(rank)])


@reads("Transpose")
def _transpose(site: Site) -> Tensor:
    x = site.x()
    return site.permute(x, site.ints("perm") or tuple(range(x.rank))[::-1])


@reads("Concat")
def _concat(site: Site) -> Tensor:
    parts = site.every()
    site.expect(bool(parts), "an input or more")
    axis = site.axis(site.int_attr("axis", 1 if site.version < 4 else 0), parts[0].rank)
    kept = [part for part in parts if part.shape[axis] != 0]
    return site.concat(kept or parts[:1], axis)


@reads("Split")
def _split(site: Site) -> tuple[Tensor, ...]:
    x = site.x()
    axis = site.axis(site.int_attr("axis"), x.rank)
    count = len(site.node.outputs)
    sizes: tuple[SizeLike, ...]
    if site.version >= 13 and site.has(1):
        sizes = site.sizes(1)
    elif site.version < 13 and site.ints("split") is not None:
        sizes = site.ints("split") or ()
    else:
        count = site.int_attr("num_outputs", count) if site.version >= 18 else count
        site.expect(0 < count <= _MAX_PARTS, f"1 to {_MAX_PARTS} outputs")
        chunk = (x.shape[axis] + count - 1) // count
        sizes = (*[chunk] * (count - 1), x.shape[axis] - chunk * (count - 1))
    parts, begin = [], 0
    for size in sizes:
        parts.append(site.cut(x, axis, begin, begin + size))
        begin = begin + size  # type: ignore[assignment]
    site.expect(len(parts) >= len(site.node.outputs), f"{len(site.node.outputs)} parts or more")
    return tuple(parts)


def _bound(site: Site, value: SizeLike, size: SizeLike, step: int, is_end: bool) -> SizeLike:
    """Return a begin or end of ONNX's Slice inside the axis."""
    low, high = (0, size) if step > 0 else (-1 if is_end else 0, size - 1)
    if isinstance(value, int):
        if value >= _FAR:
            return high
        if value < -_FAR:
            return low
        return smallest(largest(value + size if value < 0 else value, low), high)
    least, most = bounds(value)
    if most < 0:
        value = value + size
    elif least < 0:
        raise site.refused(f"the sign of the bound {value} depends on a free size; give the size a range")
    return smallest(largest(value, low), high)


@reads("Slice")
def _slice(site: Site) -> Tensor:
    x = site.x()
    starts: Sequence[SizeLike]
    ends: Sequence[SizeLike]
    if site.version < 10:
        starts, ends = site.ints("starts") or (), site.ints("ends") or ()
        axes, steps = site.ints("axes"), None
    else:
        starts, ends = site.sizes(1), site.sizes(2)
        axes = site.whole(3) if site.has(3) else None
        steps = site.whole(4) if site.has(4) else None
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    begins: list[SizeLike] = [0] * x.rank
    lasts, strides = list(x.shape), [1] * x.rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        site.expect(step != 0, "steps other than 0")
        axis = site.axis(axis, x.rank)
        step = max(-_FAR, min(step, _FAR))
        begins[axis] = _bound(site, start, x.shape[axis], step, False)
        lasts[axis] = _bound(site, end, x.shape[axis], step, True)
        strides[axis] = step
    if all(b == 0 for b in begins) and tuple(lasts) == x.shape and all(step == 1 for step in strides):
        return x
    made: Tensor = site.add("slice", x, begins=tuple(begins), ends=tuple(lasts), steps=tuple(strides))
    return made


@reads("Expand")
def _expand(site: Site) -> Tensor:
    made: Tensor = site.add("expand", site.x(), sizes=site.sizes(1))
    return site.x() if made.shape == site.x().shape else made


@reads("Tile")
def _tile(site: Site) -> Tensor:
    x = site.x()
    repeats = site.sizes(1)
    site.expect(len(repeats) == x.rank, f"{x.rank} repeats")
    for axis, count in enumerate(repeats):
        if count == 1:
            continue
        folded = (product(x.shape[:axis]), 1, product(x.shape[axis:]))
        wide = site.add("expand", site.reshape(x, folded), sizes=(folded[0], count, folded[2]))
        x = site.reshape(wide, (*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :]))
    return x


@reads("Pad")
def _pad(site: Site) -> Tensor:
    x = site.x()
    value = 0.0
    if site.version < 11:
        amounts: Sequence[SizeLike] = site.ints("pads") or ()
        value = site.float_attr("value")
    else:
        amounts = site.sizes(1)
        if site.has(2):
            constant = site.raw(2).reshape(-1)
            value = float(constant[0]) if constant.size else 0.0
    axes = site.whole(3) if site.has(3) else tuple(range(x.rank))
    site.expect(len(amounts) == 2 * len(axes), f"{2 * len(axes)} pads")
    pads: list[SizeLike] = [0] * (2 * x.rank)
    for at, axis in enumerate(axes):
        axis = site.axis(axis, x.rank)
        pads[axis], pads[x.rank + axis] = amounts[at], amounts[len(axes) + at]
    for axis in range(x.rank):  # negative pads cut
        begin, end = (pads[i] if isinstance(pads[i], int) and pads[i] < 0 else 0 for i in (axis, x.rank + axis))
        if begin or end:
            x = site.cut(x, axis, -begin, x.shape[axis] + end)
            pads[axis], pads[x.rank + axis] = largest(pads[axis], 0), largest(pads[x.rank + axis], 0)
    if all(pad == 0 for pad in pads):
        return x
    mode = site.str_attr("mode", "constant")
    site.expect(mode in ("constant", "reflect", "edge", "wrap"), "a mode of constant, reflect, edge or wrap")
    return padded(site, x, pads, value, mode)


def padded(site: Site, x: Tensor, pads: Sequence[SizeLike], value: float, mode: str = "constant") -> Tensor:
    """Return ``x`` with pads, all begins first; attributes are finite, so infinite ones are put beside it."""
    if math.isfinite(value) or mode != "constant":
        made: Tensor = site.add("pad", x, pads=tuple(pads), mode=mode, value=value)
        return made
    for axis in range(x.rank):
        parts = [x]
        for at, pad in ((0, pads[axis]), (len(parts), pads[x.rank + axis])):
            if pad != 0:
                sizes = (*x.shape[:axis], pad, *x.shape[axis + 1 :])
                parts.insert(at if at == 0 else len(parts), site.add("expand", site.like(x, value), sizes=sizes))
        x = site.concat(parts, axis)
    return x


@reads("Constant")
def _constant(site: Site) -> Value:
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        value = site.attr(name)
        if value is not None:  # an array stays one: readers may want its type in the file
            kind = np.float32 if name.startswith("value_float") else np.int64
            return value if isinstance(value, np.ndarray) else np.array(value, kind)
    raise site.refused("constants of strings and sparse tensors are not supported")


@reads("ConstantOfShape")
def _constant_of_shape(site: Site) -> Tensor:
    value = site.attr("value", np.zeros(1, np.float32)).reshape(-1)
    site.expect(value.size == 1, "one value")
    sizes = site.sizes(0)
    if value.dtype.kind == "f":
        value = value.astype(np.float32)
    dtype = next((dtype for dtype, kind in NUMPY_TYPES.items() if kind == value.dtype), None)
    if dtype is None:
        raise site.refused(f"a constant of type {value.dtype} is not supported")
    return _filled(site, sizes, dtype, value[0])


def _filled(site: Site, sizes: Sequence[SizeLike], dtype: DType, value: Any) -> Tensor:
    scalar = site.constant(np.asarray(value).astype(NUMPY_TYPES[dtype]))
    made: Tensor = site.add("expand", scalar, sizes=tuple(sizes))
    return made


@reads("Range")
def _range(site: Site) -> Tensor:
    if all(site.raw(at).dtype.kind in "iuO" for at in range(3)):
        start, limit, step = (site.sizes(at)[0] for at in range(3))
        step = site.fixed(step, "delta")
        site.expect(step != 0, "a delta other than 0")
        distance = limit - start if step > 0 else start - limit
        count = largest((distance + abs(step) - 1) // abs(step), 0)
        made: Tensor = site.add("iota", range=(start, step, count))
        return site.cast(made, site.x(0).dtype)
    first, last, delta = (float(site.numbers(at).reshape(-1)[0]) for at in range(3))
    site.expect(delta != 0 and math.isfinite((last - first) / delta), "a delta other than 0 and a finite range")
    number = max(math.ceil((last - first) / delta), 0)
    site.expect(number <= 1 << 24, "at most 2^24 numbers")
    return site.constant((first + delta * np.arange(number)).astype(np.float32))


@reads("EyeLike")
def _eye_like(site: Site) -> Tensor:
    x = site.x()
    element = site.attr("dtype")
    dtype = x.dtype
    if element is not None:
        site.require(element in ELEMENT_TYPES or element in FLOATS_AS_F32, f"{element_name(element)} is not supported")
        dtype = DType.F32 if element in FLOATS_AS_F32 else ELEMENT_TYPES[element]
    rows, columns = (site.fixed(size, "a size") for size in x.shape)
    site.expect(rows * columns <= 1 << 24, "at most 2^24 elements")
    k = max(-_FAR, min(site.int_attr("k"), _FAR))
    return site.constant(np.eye(rows, columns, k).astype(NUMPY_TYPES[dtype]))


@reads("Trilu")
def _trilu(site: Site) -> Tensor:
    diagonal: SizeLike = site.sizes(1)[0] if site.has(1) else 0
    if isinstance(diagonal, int):
        diagonal = max(-_FAR, min(diagonal, _FAR))
    made: Tensor = site.add("trilu", site.x(), diagonal=(diagonal,), upper=site.flag("upper", True))
    return made


@reads("DepthToSpace")
def _depth_to_space(site: Site) -> Tensor:
    x, block = site.x(), site.int_attr("blocksize")
    site.expect(x.rank == 4 and block > 0, "4 dimensions and a block size")
    n, c, h, w = x.shape
    inner = c // (block * block)
    if site.str_attr("mode", "DCR") == "DCR":
        split = site.reshape(x, (n, block, block, inner, h, w))
        order = (0, 3, 4, 1, 5, 2)
    else:
        split = site.reshape(x, (n, inner, block, block, h, w))
        order = (0, 1, 4, 2, 5, 3)
    return site.reshape(site.permute(split, order), (n, inner, h * block, w * block))


@reads("SpaceToDepth")
def _space_to_depth(site: Site) -> Tensor:
    x, block = site.x(), site.int_attr("blocksize")
    site.expect(x.rank == 4 and block > 0, "4 dimensions and a block size")
    n, c, h, w = x.shape
    split = site.reshape(x, (n, c, h // block, block, w // block, block))
    order = (0, 3, 5, 1, 2, 4) if site.str_attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return site.reshape(site.permute(split, order), (n, c * block * block, h // block, w // block))
