"""Layers whose weights are computed, and not constants of the module: convolutions as matrices, norms as scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import product
from penstock.graph.general.torch.writer import Writer

__all__ = ["computed_conv", "computed_conv_transpose", "is_computed", "per_channel", "scaled"]


def is_computed(*tensors: Tensor | None) -> bool:
    """Return True if one of the tensors is there and no constant."""
    return any(tensor is not None and tensor.value is None for tensor in tensors)


def per_channel(w: Writer, x: Tensor, vector: Tensor) -> Tensor:
    """Return [C] in the shape in which it broadcasts to x, [N, C, *sizes]."""
    return w.reshape(vector, (vector.shape[0], *[1] * (x.rank - 2)))


def scaled(w: Writer, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x * weight + bias, either of which may be absent."""
    x = x if weight is None else w.binary("mul", x, weight)
    return x if bias is None else w.binary("add", x, bias)


def computed_conv(
    w: Writer, x: Tensor, weight: Tensor, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int],
    groups: int,
) -> Tensor:  # fmt: skip
    """Return a convolution of [N, C, *sizes] with a weight [O, C / groups, *kernel] as a product of matrices.

    ``pads``: all begins, then all ends.  The places that each element of the kernel meets become rows.
    """
    n, channels, *_ = x.shape
    axes = weight.rank - 2
    kernel = [int(size) for size in weight.shape[2:]]  # type: ignore[arg-type]
    if any(pads):
        x = w.add("pad", x, pads=(0, 0, *pads[:axes], 0, 0, *pads[axes:]), mode="constant", value=0.0)
    sizes = [(x.shape[2 + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(axes)]
    parts = []
    for place in np.ndindex(*kernel):
        part = x
        for i in range(axes):
            begin = int(place[i]) * dilations[i]
            part = w.sliced(part, 2 + i, begin, begin + (sizes[i] - 1) * strides[i] + 1, strides[i])
        parts.append(w.reshape(part, (n, groups, channels // groups, 1, product(sizes))))
    columns = w.concat(parts, 3)  # [N, groups, C / groups, kernel, places]
    columns = w.reshape(columns, (n, groups, channels // groups * len(parts), product(sizes)))
    rows = w.reshape(weight, (groups, weight.shape[0] // groups, product(weight.shape[1:])))
    return w.reshape(w.add("matmul", rows, columns), (n, weight.shape[0], *sizes))


def computed_conv_transpose(
    w: Writer, x: Tensor, weight: Tensor, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int],
    output_pads: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Return a transposed convolution with a weight [C, O / groups, *kernel].

    It is the convolution with the turned kernel of x with zeros between its elements.  ``pads``: one for each axis.
    """
    axes = weight.rank - 2
    inner, outer, *kernel = weight.shape
    around = [d * (int(k) - 1) - p for d, k, p in zip(dilations, kernel, pads, strict=True)]  # type: ignore[arg-type]
    if any(size < 0 for size in around):
        raise UnsupportedError(f"{w.name}: conv_transpose: expected padding inside the kernel, got {list(pads)}")
    for axis, stride in enumerate(strides, 2):
        x = _spread(w, x, axis, stride)
    begins = tuple(0 if i < 2 else size - 1 for i, size in enumerate(weight.shape))
    ends = tuple(size if i < 2 else -1 for i, size in enumerate(weight.shape))
    turned = w.add("slice", weight, begins=begins, ends=ends, steps=(1, 1, *[-1] * axes))
    turned = w.reshape(turned, (groups, inner // groups, outer, *kernel))
    turned = w.reshape(w.swapped(turned, 1, 2), (outer * groups, inner // groups, *kernel))
    after = [size + more for size, more in zip(around, output_pads, strict=True)]
    return computed_conv(w, x, turned, [1] * axes, (*around, *after), dilations, groups)


def _spread(w: Writer, x: Tensor, axis: int, stride: int) -> Tensor:
    """Return x with ``stride - 1`` zeros between the elements of an axis."""
    if stride == 1:
        return x
    wide = w.unsqueeze(x, axis + 1)
    ends = [0] * wide.rank
    ends[axis + 1] = stride - 1
    wide = w.add("pad", wide, pads=(*[0] * wide.rank, *ends), mode="constant", value=0.0)
    size = x.shape[axis] * stride
    return w.sliced(w.reshape(wide, (*x.shape[:axis], size, *x.shape[axis + 1 :])), axis, 0, size - stride + 1)
