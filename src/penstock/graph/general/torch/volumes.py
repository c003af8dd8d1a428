"""Readers of convolutions and pools over three axes, [N, C, D, H, W], written with those over images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.torch.layers import adaptive_pool, convolved, pooled
from penstock.graph.general.torch.writer import Writer, reader

__all__: list[str] = []


def _three(value: Any) -> tuple[int, int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * 3 if len(values) == 1 else values)  # type: ignore[return-value]


def _slices(w: Writer, x: Tensor, kernel: int, stride: int, dilation: int) -> list[Tensor]:
    """Return for each place of the kernel along D the planes that it meets, [N, C, planes, H, W]."""
    count = (x.shape[2] - dilation * (kernel - 1) - 1) // stride + 1
    begins = [at * dilation for at in range(kernel)]
    return [w.sliced(x, 2, begin, begin + (count - 1) * stride + 1, stride) for begin in begins]


def _images(w: Writer, x: Tensor) -> Tensor:
    """Return [N, C, D, H, W] as images [N * D, C, H, W]."""
    n, c, d, h, width = x.shape
    return w.reshape(w.permute(x, (0, 2, 1, 3, 4)), (n * d, c, h, width))


def _volume(w: Writer, images: Tensor, like: Tensor) -> Tensor:
    """Return images as volumes with the batch and the number of planes of ``like``."""
    n, _, d, *_ = like.shape
    return w.permute(w.reshape(images, (n, d, *images.shape[1:])), (0, 2, 1, 3, 4))


@reader("conv3d.default")
def _conv3d(
    w: Writer, x: Tensor, weight: Tensor, bias: Any = None, strides: Any = 1, pads: Any = 0, dilations: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Write a convolution over images whose channels are those of all planes that the kernel meets."""
    if weight.value is None:
        raise UnsupportedError(f"{w.name}: expected a constant weight, got one that is computed")
    if x.rank == 4:
        return w.squeeze(_conv3d(w, w.unsqueeze(x, 0), weight, bias, strides, pads, dilations, groups), (0,))
    (s, *stride), (p, *pad), (d, *dilation) = (_three(value) for value in (strides, pads, dilations))
    x = w.add("pad", x, pads=(0, 0, p, 0, 0) * 2, mode="constant", value=0.0) if p else x
    planes = _slices(w, x, int(weight.shape[2]), s, d)  # type: ignore[arg-type]
    n, c, count, h, width = planes[0].shape
    parts = w.concat([w.unsqueeze(part, 2) for part in planes], 2)  # [N, C, kernel, planes, H, W]
    images = w.reshape(w.permute(parts, (0, 3, 1, 2, 4, 5)), (n * count, c * len(planes), h, width))
    array = np.asarray(weight.value, np.float32)
    kernel = w.constant(array.reshape(array.shape[0], -1, *array.shape[3:]))
    out = convolved(w, images, kernel, bias, stride, (*pad, *pad), dilation, groups)
    return _volume(w, out, planes[0])


@reader("max_pool3d.default")
def _max_pool3d(
    w: Writer, x: Tensor, kernel: Any, strides: Any = (), pads: Any = 0, dilations: Any = 1, ceil: bool = False
) -> Tensor:
    if x.rank == 4:
        return w.squeeze(_max_pool3d(w, w.unsqueeze(x, 0), kernel, strides, pads, dilations, ceil), (0,))
    (k, *size), (s, *stride), (p, *pad), (d, *dilation) = map(_three, (kernel, strides or kernel, pads, dilations))
    if p or ceil:
        raise UnsupportedError(f"{w.name}: expected a pool without padding of the first axis and ceil_mode")
    best, *others = _slices(w, x, k, s, d)
    for other in others:
        best = w.binary("max", best, other)
    attrs = {"dilations": tuple(dilation), "ceil": False}
    return _volume(w, pooled(w, "max_pool", 2, _images(w, best), size, stride, pad, **attrs), best)


@reader("avg_pool3d.default")
def _avg_pool3d(
    w: Writer, x: Tensor, kernel: Any, strides: Any = (), pads: Any = 0, ceil: bool = False, count_pads: bool = True,
    divisor: Any = None,
) -> Tensor:  # fmt: skip
    if x.rank == 4:
        return w.squeeze(_avg_pool3d(w, w.unsqueeze(x, 0), kernel, strides, pads, ceil, count_pads, divisor), (0,))
    (k, *size), (s, *stride), padding = _three(kernel), _three(strides or kernel), _three(pads)
    if any(padding) or ceil or divisor is not None:
        raise UnsupportedError(f"{w.name}: expected a pool without padding, ceil_mode and divisor_override")
    total, *others = _slices(w, x, k, s, 1)
    for other in others:
        total = w.binary("add", total, other)
    mean = w.binary("mul", total, 1.0 / k)
    attrs = {"dilations": (1, 1), "ceil": False, "count_pads": True}
    return _volume(w, pooled(w, "avg_pool", 2, _images(w, mean), size, stride, 0, **attrs), mean)


@reader("adaptive_avg_pool3d.default", "_adaptive_avg_pool3d.default")
def _adaptive_avg_pool3d(w: Writer, x: Tensor, sizes: Sequence[Any]) -> Tensor:
    return adaptive_pool(w, "avg_pool", "mean", x, _three(sizes))
