"""The reader of ``grid_sample``: elements of images at places that are computed, as a few gathers of pixels."""

from __future__ import annotations

from typing import Final

from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import SizeLike
from penstock.graph.general.torch.writer import Writer, reader
from penstock.graph.ir import DType

__all__: list[str] = []

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER = 0, 1
_CUBIC: Final = -0.75
_Tap = tuple[Tensor, "Tensor | None"]
"""Along one axis, for each place: the index of a pixel, and its weight (None: 1)."""


@reader("grid_sampler_2d.default")
def _grid_sampler(w: Writer, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """Write [N, C, P, Q], the pixels of [N, C, H, W] at [N, P, Q, 2], whose last axis is x and y from -1 to 1."""
    n, channels, height, width = x.shape
    rows = w.reshape(w.permute(x, (0, 2, 3, 1)), (n * height * width, channels))
    places = [w.reshape(w.sliced(grid, 3, at, at + 1), grid.shape[:3]) for at in range(2)]
    across, down = (
        _taps(w, place, size, mode, padding, align_corners) for place, size in zip(places, (width, height), strict=True)
    )
    first = w.reshape(w.binary("mul", w.iota(0, 1, n), height), (n, 1, 1))  # the first row of each image
    total: Tensor | None = None
    for row, row_weight in down:
        begins = w.binary("mul", w.binary("add", row, first), width)
        for column, weight in across:
            pixels = w.add("gather", rows, w.binary("add", begins, column), axis=0)  # [N, P, Q, C]
            if weight is not None and row_weight is not None:
                pixels = w.binary("mul", pixels, w.unsqueeze(w.binary("mul", weight, row_weight), 3))
            total = pixels if total is None else w.binary("add", total, pixels)
    return w.permute(total, (0, 3, 1, 2))  # type: ignore[arg-type]


def _taps(w: Writer, place: Tensor, size: SizeLike, mode: int, padding: int, align_corners: bool) -> list[_Tap]:
    """Return the pixels along one axis, with weights, that a place from -1 to 1 is made of."""
    length = w.cast(w.constant(size), DType.F32)
    from_0 = w.binary("add", place, 1.0)
    if align_corners:
        place = w.binary("mul", w.binary("mul", from_0, 0.5), w.binary("sub", length, 1.0))
    else:
        place = w.binary("mul", w.binary("sub", w.binary("mul", from_0, length), 1.0), 0.5)
    if mode in (_BILINEAR, _NEAREST):
        place = _padded(w, place, length, padding, align_corners)
    if mode == _NEAREST:
        return [_tap(w, w.unary("round", place), None, length, padding)]
    begin = w.unary("floor", place)
    part = w.binary("sub", place, begin)
    rest = w.binary("sub", 1.0, part)
    if mode == _BILINEAR:
        return [_tap(w, w.binary("add", begin, float(at)), (rest, part)[at], length, padding) for at in range(2)]
    weights = _cubic_far(w, part), _cubic_near(w, part), _cubic_near(w, rest), _cubic_far(w, rest)
    pixels = [_padded(w, w.binary("add", begin, float(at)), length, padding, align_corners) for at in (-1, 0, 1, 2)]
    return [_tap(w, pixel, weight, length, padding) for pixel, weight in zip(pixels, weights, strict=True)]


def _tap(w: Writer, pixel: Tensor, weight: Tensor | None, length: Tensor, padding: int) -> _Tap:
    """Return the index of a pixel inside the image; one outside of it has no weight where zeros are around it."""
    last = w.binary("sub", length, 1.0)
    inside = w.binary("min", w.binary("max", pixel, 0.0), last)
    if padding == _ZEROS:
        is_inside = w.cast(w.binary("eq", inside, pixel), DType.F32)
        weight = is_inside if weight is None else w.binary("mul", weight, is_inside)
    return w.cast(inside, DType.I64), weight


def _padded(w: Writer, place: Tensor, length: Tensor, padding: int, align_corners: bool) -> Tensor:
    """Return a place inside the image, from the border or reflected there; with zeros the place itself."""
    if padding == _ZEROS:
        return place
    last = w.binary("sub", length, 1.0)
    if padding != _BORDER:  # reflected at the centres of the outer pixels, or at their outer edges
        low, span = (0.0, last) if align_corners else (-0.5, length)
        apart = w.unary("abs", w.binary("sub", place, low))
        period = w.binary("fmod", apart, w.binary("mul", w.binary("max", span, 1.0), 2.0))
        turned = w.binary("sub", w.binary("mul", span, 2.0), period)
        place = w.binary("add", w.binary("min", period, turned), low)
    return w.binary("min", w.binary("max", place, 0.0), last)


def _cubic_near(w: Writer, t: Tensor) -> Tensor:
    """Return the weight of a pixel that is less than 1 away (Keys, 1981)."""
    inner = w.binary("sub", w.binary("mul", t, _CUBIC + 2), _CUBIC + 3)
    return w.binary("add", w.binary("mul", inner, w.binary("mul", t, t)), 1.0)


def _cubic_far(w: Writer, t: Tensor) -> Tensor:
    """Return the weight of the pixel behind the one that is t away."""
    far = w.binary("add", t, 1.0)
    inner = w.binary("add", w.binary("mul", w.binary("sub", w.binary("mul", far, _CUBIC), 5 * _CUBIC), far), 8 * _CUBIC)
    return w.binary("sub", w.binary("mul", inner, far), 4 * _CUBIC)
