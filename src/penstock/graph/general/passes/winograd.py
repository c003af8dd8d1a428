"""Compute 3x3 convolutions of stride 1 by Winograd's F(2x2, 3x3), which takes 16 multiplications instead of 36.

A kernel g becomes G g G^T, 4x4 numbers (Lavin and Gray, 2015, "Fast Algorithms for Convolutional Neural Networks").
They are computed in float64 and rounded to float32 once.  The weight grows to 16/9 of its size.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.graph.general.draft import Draft, DraftCall, Tensor
from penstock.graph.general.sizes import SizeLike

__all__ = ["kernels_of", "transform_convolutions", "transformed"]

_MIN_CHANNELS: Final = 16
_MIN_PRODUCTS: Final = 32 * 32
"""Inputs times outputs.  With fewer, the transformations cost most of what the products gain."""
_MIN_TILES: Final = 32
"""Tiles of 2x2 outputs of an image.  With fewer, reading the larger weight costs what the products gain."""
_FORWARD: Final = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_BACK: Final = np.array([[1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, 1]], np.float64)


def transformed(kernels: NDArray[Any]) -> NDArray[np.float32]:
    """Return kernels [outputs, 3, 3, channels] as [outputs, 4, 4, channels]."""
    exact = np.einsum("ai,oijc,bj->oabc", _FORWARD, kernels.astype(np.float64), _FORWARD)
    return np.asarray(exact, np.float32)


def kernels_of(weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return the kernels [outputs, 3, 3, channels] of a transformed weight [outputs, 4, 4, channels].

    They differ from the original ones by the rounding of the weight.
    """
    exact = np.einsum("ia,oabc,jb->oijc", _BACK, weight.astype(np.float64), _BACK)
    return np.asarray(exact, np.float32)


def transform_convolutions(draft: Draft) -> None:
    """Rewrite the draft in place: convolutions become ``conv_winograd`` where that is faster."""
    weights: dict[int, Tensor] = {}
    for call in draft.calls:
        if not _is_faster(call):
            continue
        kernels = call.argument(1)
        if id(kernels) not in weights:
            array = transformed(np.asarray(kernels.value))
            weights[id(kernels)] = Tensor(draft.free_name(kernels.name), kernels.dtype, array.shape, array)
        call.op = "conv_winograd"
        call.inputs[1] = weights[id(kernels)]
        call.attrs = {key: call.attrs[key] for key in ("out_channels", "pads", "act", "alpha", "beta")}


def _is_faster(call: DraftCall) -> bool:
    if call.op != "conv":
        return False
    a, kernels = call.attrs, call.argument(1)
    if tuple(a["kernel"]) != (3, 3) or tuple(a["strides"]) != (1, 1) or tuple(a["dilations"]) != (1, 1):
        return False
    if a["groups"] != 1 or kernels.value is None:
        return False
    height, width = call.output.shape[1:3]
    outputs, channels = a["out_channels"], kernels.shape[3]
    return (
        min(outputs, channels) >= _MIN_CHANNELS and outputs * channels >= _MIN_PRODUCTS
        and _tiles(height) * _tiles(width) >= _MIN_TILES
    )  # fmt: skip


def _tiles(size: SizeLike) -> int:
    """Return the tiles along an axis.  Images of free size are taken to be large."""
    return (size + 1) // 2 if isinstance(size, int) else _MIN_TILES
