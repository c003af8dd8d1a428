"""Convolutions, pools and resizes over NCHW and NCL, as PyTorch and ONNX have them, written with the NHWC ops.

Each is a permute, the op, and a permute back; ``passes.layout`` removes the permutes between two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Draft, Tensor
from penstock.graph.general.sizes import SizeLike

__all__ = ["from_channels_last", "image_op", "same_pads", "to_channels_last", "weight_channels_last"]


def to_channels_last(draft: Draft, x: Tensor, name: str) -> Tensor:
    """Return NCHW as NHWC, and NCL as N1LC."""
    if x.rank == 4:
        return draft.add("permute", x, order=(0, 2, 3, 1), name=name)
    if x.rank != 3:
        raise UnsupportedError(f"{name}: expected images [N, C, H, W] or rows [N, C, L], got {x.rank} dimensions")
    last = draft.add("permute", x, order=(0, 2, 1), name=name)
    return draft.add("reshape", last, sizes=(last.shape[0], 1, *last.shape[1:]), name=name)


def from_channels_last(draft: Draft, x: Tensor, rank: int, name: str) -> Tensor:
    """Return NHWC as NCHW (rank 4) or NCL (rank 3)."""
    if rank == 4:
        return draft.add("permute", x, order=(0, 3, 1, 2), name=name)
    rows = draft.add("reshape", x, sizes=(x.shape[0], x.shape[2], x.shape[3]), name=name)
    return draft.add("permute", rows, order=(0, 2, 1), name=name)


def image_op(draft: Draft, op: str, x: Tensor, *weights: Tensor | None, name: str, **attrs: Any) -> Tensor:
    """Add an op of NHWC over NCHW or NCL.  Attributes of two axes may be given with one number for NCL."""
    two = {key: _two(key, value) for key, value in attrs.items()}
    out = draft.add(op, to_channels_last(draft, x, name), *weights, name=name, **two)
    return from_channels_last(draft, out, x.rank, name)


def _two(name: str, value: Any) -> Any:
    """Return an attribute of the axes of rows for images of height 1."""
    if not isinstance(value, tuple):
        return value
    if name == "pads" and len(value) == 2:
        return (0, value[0], 0, value[1])
    if len(value) == 1:
        return (0 if name == "output_pads" else 1, *value)
    return value


def weight_channels_last(
    draft: Draft, weight: Tensor, name: str, *, transposed: bool = False, groups: int = 1
) -> Tensor:
    """Return a constant [O, C, *kernel], or [C, O, *kernel] of a transposed convolution, as [O, kh, kw, C]."""
    if weight.value is None:
        raise UnsupportedError(f"{name}: expected a constant weight, got one that is computed")
    array = np.asarray(weight.value, np.float32)
    if array.ndim == 3:
        array = array[:, :, None, :]
    if array.ndim != 4:
        raise UnsupportedError(f"{name}: expected a kernel of one or two axes, got {array.ndim - 2}")
    if transposed:  # [groups * C, O of a group, h, w] to [groups * O, C, h, w]
        inner, outer, *kernel = array.shape
        array = array.reshape(groups, inner // groups, outer, *kernel).swapaxes(1, 2)
        array = array.reshape(groups * outer, inner // groups, *kernel)
    return draft.constant(np.ascontiguousarray(array.transpose(0, 2, 3, 1)), weight.name)


def same_pads(sizes: Sequence[SizeLike], kernel: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the pads, begins first, with which an output has ceil(size / stride) places.  Sizes must be constant."""
    begins, ends = [], []
    for size, extent, stride in zip(sizes, kernel, strides, strict=True):
        if stride == 1:
            total: SizeLike = extent - 1
        else:
            total = ((size + stride - 1) // stride - 1) * stride + extent - size
        if not isinstance(total, int):
            raise UnsupportedError('padding: "same" with a stride needs constant sizes; fix the sizes of the image')
        begins.append(max(total, 0) // 2)
        ends.append(max(total, 0) - max(total, 0) // 2)
    return (*begins, *ends)
