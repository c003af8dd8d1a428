"""Elements of images at places that are computed, as a few gathers of pixels: ``grid_sample``, for every reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from penstock.graph.general.draft import Draft, Tensor
from penstock.graph.general.sizes import SizeLike, product
from penstock.graph.ir import DType

__all__ = ["SamplingWriter", "grid_sampled"]

_CUBIC: Final = -0.75
_Tap = tuple[Tensor, "Tensor | None"]
"""Along one axis, for each place: the index of a pixel, and its weight (None: 1)."""


class SamplingWriter(Protocol):
    """The writer of a reader, which adds calls under the name of a node."""

    draft: Draft

    def add(self, op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Add a call."""

    def binary(self, kind: str, a: Tensor, b: Any) -> Tensor:
        """Add ``a <kind> b``, of which b may be a number."""

    def unary(self, kind: str, x: Tensor) -> Tensor:
        """Add a function of each element."""

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Return x as another type."""

    def reshape(self, x: Tensor, sizes: Sequence[SizeLike]) -> Tensor:
        """Return x with another shape."""

    def permute(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Return x with its axes in another order."""


def grid_sampled(w: SamplingWriter, x: Tensor, grid: Tensor, mode: str, padding: str, align_corners: bool) -> Tensor:
    """Write [N, C, *places], the pixels of [N, C, *sizes] at [N, *places, axes].

    The last axis of the grid has places from -1 to 1, along the last size first.  ``mode``: nearest, linear or cubic;
    ``padding``: zeros, border or reflection.
    """
    n, channels, *sizes = x.shape
    axes = len(sizes)
    rows = w.reshape(w.permute(x, (0, *range(2, x.rank), 1)), (product((n, *sizes)), channels))
    taps = [
        _taps(w, _place(w, grid, axes - 1 - axis), size, (mode, padding), align_corners)
        for axis, size in enumerate(sizes)
    ]
    images = w.reshape(w.add("iota", range=(0, 1, n)), (n, *[1] * axes))
    starts: list[_Tap] = [(images, None)]
    for size, along in zip(sizes, taps, strict=True):
        wide = w.draft.constant([size])
        starts = [
            (w.binary("add", w.binary("mul", index, wide), pixel), _both(w, weight, more))
            for index, weight in starts
            for pixel, more in along
        ]
    total, *others = [_pixels(w, rows, tap) for tap in starts]
    for pixels in others:
        total = w.binary("add", total, pixels)
    return w.permute(total, (0, total.rank - 1, *range(1, total.rank - 1)))


def _pixels(w: SamplingWriter, rows: Tensor, tap: _Tap) -> Tensor:
    """Return the rows at the index of a tap times its weight, [N, *places, C]."""
    index, weight = tap
    pixels: Tensor = w.add("gather", rows, index, axis=0)
    return pixels if weight is None else w.binary("mul", pixels, w.reshape(weight, (*weight.shape, 1)))


def _place(w: SamplingWriter, grid: Tensor, at: int) -> Tensor:
    """Return the places along one axis, [N, *places]."""
    outer = grid.shape[:-1]
    begins, ends = (*[0] * len(outer), at), (*outer, at + 1)
    return w.reshape(w.add("slice", grid, begins=begins, ends=ends, steps=(1,) * grid.rank), outer)


def _both(w: SamplingWriter, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the product of two weights, of which None is 1."""
    if a is None or b is None:
        return b if a is None else a
    return w.binary("mul", a, b)


def _taps(w: SamplingWriter, place: Tensor, size: SizeLike, kinds: tuple[str, str], align_corners: bool) -> list[_Tap]:
    """Return the pixels along one axis, with weights, that a place from -1 to 1 is made of."""
    mode, padding = kinds
    length = w.cast(w.draft.constant([size]), DType.F32)
    from_0 = w.binary("add", place, 1.0)
    if align_corners:
        place = w.binary("mul", w.binary("mul", from_0, 0.5), w.binary("sub", length, 1.0))
    else:
        place = w.binary("mul", w.binary("sub", w.binary("mul", from_0, length), 1.0), 0.5)
    if mode != "cubic":
        place = _padded(w, place, length, padding, align_corners)
    if mode == "nearest":
        return [_tap(w, w.unary("round", place), None, length, padding)]
    begin = w.unary("floor", place)
    part = w.binary("sub", place, begin)
    rest = w.binary("add", w.unary("neg", part), 1.0)
    if mode == "linear":
        return [_tap(w, w.binary("add", begin, float(at)), (rest, part)[at], length, padding) for at in range(2)]
    weights = _cubic_far(w, part), _cubic_near(w, part), _cubic_near(w, rest), _cubic_far(w, rest)
    pixels = [_padded(w, w.binary("add", begin, float(at)), length, padding, align_corners) for at in (-1, 0, 1, 2)]
    return [_tap(w, pixel, weight, length, padding) for pixel, weight in zip(pixels, weights, strict=True)]


def _tap(w: SamplingWriter, pixel: Tensor, weight: Tensor | None, length: Tensor, padding: str) -> _Tap:
    """Return the index of a pixel inside the image; one outside of it has no weight where zeros are around it."""
    last = w.binary("sub", length, 1.0)
    inside = w.binary("min", w.binary("max", pixel, 0.0), last)
    if padding == "zeros":
        is_inside = w.cast(w.binary("eq", inside, pixel), DType.F32)
        weight = is_inside if weight is None else w.binary("mul", weight, is_inside)
    return w.cast(inside, DType.I64), weight


def _padded(w: SamplingWriter, place: Tensor, length: Tensor, padding: str, align_corners: bool) -> Tensor:
    """Return a place inside the image, from the border or reflected there; with zeros the place itself.

    NaN becomes the first pixel, as in PyTorch.
    """
    if padding == "zeros":
        return place
    last = w.binary("sub", length, 1.0)
    if padding == "reflection":  # at the centres of the outer pixels, or at their outer edges
        low, span = (0.0, last) if align_corners else (-0.5, length)
        apart = w.unary("abs", w.binary("sub", place, low))
        period = w.binary("fmod", apart, w.binary("mul", w.binary("max", span, 1.0), 2.0))
        turned = w.binary("sub", w.binary("mul", span, 2.0), period)
        place = w.binary("add", w.binary("min", period, turned), low)
    place = w.add("where", w.unary("is_nan", place), w.draft.constant(0.0), place)
    return w.binary("min", w.binary("max", place, 0.0), last)


def _cubic_near(w: SamplingWriter, t: Tensor) -> Tensor:
    """Return the weight of a pixel that is less than 1 away (Keys, 1981)."""
    inner = w.binary("sub", w.binary("mul", t, _CUBIC + 2), _CUBIC + 3)
    return w.binary("add", w.binary("mul", inner, w.binary("mul", t, t)), 1.0)


def _cubic_far(w: SamplingWriter, t: Tensor) -> Tensor:
    """Return the weight of the pixel behind the one that is t away."""
    far = w.binary("add", t, 1.0)
    inner = w.binary("add", w.binary("mul", w.binary("sub", w.binary("mul", far, _CUBIC), 5 * _CUBIC), far), 8 * _CUBIC)
    return w.binary("sub", w.binary("mul", inner, far), 4 * _CUBIC)
