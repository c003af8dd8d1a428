"""Convolutions and pools.  ONNX has channels before rows and columns; the op table has them last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.graph.general.draft import Tensor
from penstock.graph.general.images import from_channels_last, to_channels_last, weight_channels_last
from penstock.graph.general.sizes import SizeLike, largest, product
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__ = ["from_rows", "to_rows"]

_MAX_TAPS = 128


def to_rows(site: Site, x: Tensor) -> Tensor:
    """Return [N, C, H, W] or [N, C, L] as [N, H, W, C], where H is 1 for the latter."""
    site.require(x.rank in (3, 4), f"images of {x.rank - 2} dimensions are not supported; 1 and 2 are")
    return to_channels_last(site.draft, x, site.node.name)


def from_rows(site: Site, x: Tensor, rank: int) -> Tensor:
    """Return [N, H, W, C] as [N, C, H, W], or as [N, C, L] for rank 3."""
    return from_channels_last(site.draft, x, rank, site.node.name)


def _pair(site: Site, name: str, rank: int, default: int) -> tuple[int, int]:
    """Return the attribute for rows and columns; 1-d ones have it for columns only."""
    values = site.ints(name) or (default,) * (rank - 2)
    site.expect(len(values) == rank - 2 and all(0 <= n < 1 << 31 for n in values), f"{rank - 2} numbers as {name}")
    return (default, values[0]) if rank == 3 else (values[0], values[1])


def _pads(
    site: Site, x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[SizeLike, ...]:
    """Return top, left, bottom and right of the windows over [N, H, W, C]."""
    mode = site.str_attr("auto_pad", "NOTSET")
    site.expect(all(n > 0 for n in (*kernel, *strides, *dilations)), "kernels, strides and dilations of 1 or more")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = [], []
        for i in range(2):
            size, stride = x.shape[1 + i], strides[i]
            reach = dilations[i] * (kernel[i] - 1) + 1
            total = (
                reach - 1 if stride == 1 else largest(((size + stride - 1) // stride - 1) * stride + reach - size, 0)
            )
            small = total // 2
            begins.append(small if mode == "SAME_UPPER" else total - small)
            ends.append(total - small if mode == "SAME_UPPER" else small)
        return (*begins, *ends)
    if mode == "VALID":
        return (0, 0, 0, 0)
    site.expect(mode == "NOTSET", "an auto_pad of NOTSET, SAME_UPPER, SAME_LOWER or VALID")
    return _given_pads(site, x)


def _given_pads(site: Site, x: Tensor) -> tuple[int, int, int, int]:
    pads = site.ints("pads")
    if pads is None:
        return (0, 0, 0, 0)
    site.expect(len(pads) in (2, 4) and all(0 <= n < 1 << 31 for n in pads), "2 or 4 pads of 0 or more")
    return (0, pads[0], 0, pads[1]) if len(pads) == 2 else (pads[0], pads[1], pads[2], pads[3])


def _biased(site: Site, y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else site.binary("add", y, bias)


@reads("Conv")
def _conv(site: Site) -> Tensor:
    x, weight, bias = site.x(0), site.x(1), site.optional(2)
    rank = x.rank
    site.expect(weight.rank == rank and rank > 2, "an image and a weight of the same dimensions")
    rows = to_rows(site, x)
    if rank == 3:
        weight = site.reshape(weight, (*weight.shape[:2], 1, weight.shape[2]))
    kernel = tuple(site.fixed(size, "the kernel") for size in weight.shape[2:])
    strides, dilations = _pair(site, "strides", rank, 1), _pair(site, "dilations", rank, 1)
    pads = _pads(site, rows, kernel, strides, dilations)
    groups = site.int_attr("group", 1)
    site.expect(groups > 0, "a group or more")
    weight = site.permute(weight, (0, 2, 3, 1))
    window: dict[str, Any] = {"kernel": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    site.expect(bias is None or bias.rank == 1, "a bias of one dimension")
    if site.is_plain(weight):
        fused = bias if site.is_plain(bias) else None
        y = site.add("conv", rows, weight, fused, None, groups=groups, **window)
        return from_rows(site, y if fused is bias else _biased(site, y, bias), rank)
    return from_rows(site, _biased(site, _computed_conv(site, rows, weight, groups, window), bias), rank)


def _computed_conv(site: Site, x: Tensor, weight: Tensor, groups: int, window: dict[str, Any]) -> Tensor:
    """Return a convolution by a weight [O, kh, kw, C] that the network computes: a product with the windows."""
    (kh, kw), (dy, dx), (sy, sx) = window["kernel"], window["dilations"], window["strides"]
    top, left, bottom, right = window["pads"]
    site.require(kh * kw <= _MAX_TAPS, f"a kernel of {kh} x {kw} that the network computes is not supported")
    if any(pad != 0 for pad in window["pads"]):
        pads = (0, top, left, 0, 0, bottom, right, 0)
        x = site.add("pad", x, pads=pads, mode="constant", value=0.0)
    n, h, w, c = x.shape
    oh, ow = (h - dy * (kh - 1) - 1) // sy + 1, (w - dx * (kw - 1) - 1) // sx + 1
    taps = [
        site.add("slice", x, begins=(0, i * dy, j * dx, 0), steps=(1, sy, sx, 1),
                 ends=(n, i * dy + (oh - 1) * sy + 1, j * dx + (ow - 1) * sx + 1, c))
        for i in range(kh) for j in range(kw)
    ]  # fmt: skip
    filters, channels = (site.fixed(size, "the channels") for size in (weight.shape[0], c))
    divided = filters % groups == channels % groups == 0 and weight.shape[3] == channels // groups
    site.expect(divided, "groups that divide the channels")
    outputs, inner = filters // groups, channels // groups
    parts = []
    for group in range(groups):
        group_taps = taps if groups == 1 else [site.cut(tap, 3, group * inner, (group + 1) * inner) for tap in taps]
        windows = site.reshape(site.concat(group_taps, 3), (n * oh * ow, kh * kw * inner))
        group_weight = site.reshape(
            site.cut(weight, 0, group * outputs, (group + 1) * outputs), (outputs, kh * kw * inner)
        )
        parts.append(site.add("matmul", windows, group_weight, transpose_b=True))
    return site.reshape(site.concat(parts, 1), (n, oh, ow, filters))


@reads("ConvTranspose")
def _conv_transpose(site: Site) -> Tensor:
    x, weight, bias = site.x(0), site.x(1), site.optional(2)
    rank = x.rank
    site.expect(weight.rank == rank and rank > 2, "an image and a weight of the same dimensions")
    site.require(site.is_plain(weight), "its weight must be constant")
    rows = to_rows(site, x)
    if rank == 3:
        weight = site.reshape(weight, (*weight.shape[:2], 1, weight.shape[2]))
    kernel = tuple(site.fixed(size, "the weight") for size in weight.shape[2:])
    groups = site.int_attr("group", 1)
    site.expect(groups > 0 and weight.shape[0] % groups == 0, "groups that divide the channels")
    last = weight_channels_last(site.draft, weight, site.node.name, transposed=True, groups=groups)
    strides, dilations = _pair(site, "strides", rank, 1), _pair(site, "dilations", rank, 1)
    pads, spare = _transposed_pads(site, rows, kernel, strides, dilations, rank)
    fused = bias if site.is_plain(bias) else None
    y = site.add(
        "conv_transpose", rows, last, fused, strides=strides, dilations=dilations, pads=pads, output_pads=spare,
        groups=groups,
    )  # fmt: skip
    return from_rows(site, y if fused is bias else _biased(site, y, bias), rank)


def _transposed_pads(
    site: Site, x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], rank: int
) -> tuple[tuple[SizeLike, ...], tuple[SizeLike, ...]]:
    spare: list[SizeLike] = list(_pair(site, "output_padding", rank, 0))
    shape = site.ints("output_shape")
    mode = site.str_attr("auto_pad", "NOTSET")
    if shape is None and mode not in ("SAME_UPPER", "SAME_LOWER"):
        return ((0, 0, 0, 0) if mode == "VALID" else _given_pads(site, x)), tuple(spare)
    site.expect(shape is None or len(shape) >= rank - 2, f"{rank - 2} sizes as output_shape")
    begins: list[SizeLike] = []
    ends: list[SizeLike] = []
    for i in range(2):
        size, stride = x.shape[1 + i], strides[i]
        wanted = size * stride if shape is None else ((1, *shape)[-2:])[i]
        total = stride * (size - 1) + spare[i] + (kernel[i] - 1) * dilations[i] + 1 - wanted
        spare[i] = spare[i] + largest(-1 * total, 0)
        total = largest(total, 0)
        small = total // 2
        begins.append(small if mode == "SAME_UPPER" else total - small)
        ends.append(total - small if mode == "SAME_UPPER" else small)
    return (*begins, *ends), tuple(spare)


def _pool_window(site: Site, rows: Tensor, rank: int) -> dict[str, Any]:
    site.expect(site.ints("kernel_shape") is not None, "a kernel_shape")
    kernel, strides = _pair(site, "kernel_shape", rank, 1), _pair(site, "strides", rank, 1)
    dilations = _pair(site, "dilations", rank, 1)
    pads = _pads(site, rows, kernel, strides, dilations)
    return {"kernel": kernel, "strides": strides, "dilations": dilations, "pads": pads, "ceil": site.flag("ceil_mode")}


@reads("MaxPool")
def _max_pool(site: Site) -> Tensor:
    x = site.x()
    site.require(not site.wanted(1), "the indices of the largest elements are not supported")
    kind = x.dtype
    rows = site.cast(to_rows(site, x), DType.F32)
    y = site.add("max_pool", rows, **_pool_window(site, rows, x.rank))
    return site.cast(from_rows(site, y, x.rank), kind)


@reads("AveragePool")
def _average_pool(site: Site) -> Tensor:
    x = site.x()
    rows = to_rows(site, x)
    counted = site.flag("count_include_pad")
    return from_rows(site, site.add("avg_pool", rows, count_pads=counted, **_pool_window(site, rows, x.rank)), x.rank)


@reads("LpPool")
def _lp_pool(site: Site) -> Tensor:
    x, p = site.x(), site.float_attr("p", 2)
    site.expect(p > 0, "p above 0")
    site.require(not site.flag("ceil_mode"), "ceil_mode of LpPool is not supported")
    rows = to_rows(site, x)
    window = _pool_window(site, rows, x.rank)
    power = site.unary("square", rows) if p == 2 else site.binary("pow", site.unary("abs", rows), p)
    mean = site.add("avg_pool", power, count_pads=True, **window)
    total = site.binary("mul", mean, float(np.prod(window["kernel"])))
    return from_rows(site, site.unary("sqrt", total) if p == 2 else site.binary("pow", total, 1.0 / p), x.rank)


@reads("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(site: Site) -> Tensor:
    x = site.x()
    kind = "mean" if site.node.op == "GlobalAveragePool" else "max"
    site.expect(x.rank > 2, "an image")
    made: Tensor = site.add("reduce", x, kind=kind, axes=tuple(range(2, x.rank)), keep=True)
    return made


@reads("GlobalLpPool")
def _global_lp_pool(site: Site) -> Tensor:
    x, p = site.x(), float(site.int_attr("p", 2))
    site.expect(x.rank > 2 and p > 0, "an image, and p above 0")
    power = site.unary("square", x) if p == 2 else site.binary("pow", site.unary("abs", x), p)
    total = site.add("reduce", power, kind="sum", axes=tuple(range(2, x.rank)), keep=True)
    return site.unary("sqrt", total) if p == 2 else site.binary("pow", total, 1.0 / p)


@reads("LRN")
def _lrn(site: Site) -> Tensor:
    x, size = site.x(), site.int_attr("size", 1)
    site.expect(x.rank > 2 and 0 < size < 1 << 16, "an image and a size of 1 or more")
    before = (size - 1) // 2
    flat = site.reshape(site.unary("square", x), (x.shape[0], x.shape[1], product(x.shape[2:]), 1))
    mean = site.add("avg_pool", flat, kernel=(size, 1), strides=(1, 1), pads=(before, 0, size - 1 - before, 0),
                    count_pads=True)  # fmt: skip
    scaled = site.binary("mul", site.reshape(mean, x.shape), site.float_attr("alpha", 1e-4))
    power = site.binary("pow", site.binary("add", scaled, site.float_attr("bias", 1.0)), site.float_attr("beta", 0.75))
    return site.binary("div", x, power)
