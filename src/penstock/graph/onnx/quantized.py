"""Quantized tensors: constants become f32, other ones are rounded and scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.graph.general.draft import Tensor
from penstock.graph.ir import DType
from penstock.graph.onnx.context import ELEMENT_TYPES, Site
from penstock.graph.onnx.images import from_rows
from penstock.graph.onnx.products import exact_product
from penstock.graph.onnx.registry import reads

__all__: list[str] = []

_BOUNDS: Final = {DType.U8: (0.0, 255.0), DType.I8: (-128.0, 127.0)}


def _shaped(site: Site, x: Tensor, at: int, axis: int) -> Tensor | None:
    """Return scales or zero points, one for all or one for each place of an axis, so that they broadcast."""
    values = site.optional(at)
    if values is None or values.shape in ((), (1,)):
        return None if values is None else site.reshape(values, ())
    site.require(values.rank == 1, "scales of blocks of a computed tensor are not supported")
    axis = site.axis(axis, x.rank)
    return site.reshape(values, [values.shape[0] if i == axis else 1 for i in range(x.rank)])


@reads("QuantizeLinear")
def _quantize(site: Site) -> Tensor:
    x = site.x(0)
    scale, zero = _shaped(site, x, 1, site.int_attr("axis", 1)), _shaped(site, x, 2, site.int_attr("axis", 1))
    element = site.int_attr("output_dtype")
    dtype = zero.dtype if zero is not None else ELEMENT_TYPES.get(element, DType.F32) if element else DType.U8
    site.require(dtype in _BOUNDS and scale is not None, "types other than int8 and uint8 are not supported")
    return _rounded(site, site.binary("div", site.cast(x, DType.F32), scale), zero, dtype)  # type: ignore[arg-type]


def _rounded(site: Site, x: Tensor, zero: Tensor | None, dtype: DType) -> Tensor:
    whole = site.unary("round", x)
    if zero is not None:
        whole = site.binary("add", whole, site.cast(zero, DType.F32))
    return site.cast(site.cast(site.unary("clip", whole, *_BOUNDS[dtype]), DType.I32), dtype)


@reads("DequantizeLinear")
def _dequantize(site: Site) -> Tensor:
    if all(site.is_raw(at) for at in range(site.count()) if site.has(at)):
        return site.constant(_dequantized(site))
    x = site.x(0)
    axis = site.int_attr("axis", 1)
    scale, zero = _shaped(site, x, 1, axis), _shaped(site, x, 2, axis)
    site.expect(scale is not None, "a scale")
    values = site.cast(x, DType.F32)
    if zero is not None:
        values = site.binary("sub", values, site.cast(zero, DType.F32))
    return site.binary("mul", values, scale)  # type: ignore[arg-type]


def _dequantized(site: Site) -> NDArray[np.float32]:
    x, scale = site.raw(0), site.raw(1).astype(np.float32)
    zero = site.raw(2) if site.has(2) else np.zeros_like(scale, np.int32)
    axis, block = site.int_attr("axis", 1), site.int_attr("block_size")
    values = _whole(x) - _whole(_spread(site, zero, x.shape, axis, block))
    spread: NDArray[np.float32] = _spread(site, scale, x.shape, axis, block)
    result: NDArray[np.float32] = values.astype(np.float32) * spread
    return result


def _whole(x: NDArray[Any]) -> NDArray[Any]:
    return x.astype(np.float32) if x.dtype.kind == "f" or "float" in x.dtype.name else x.astype(np.int64)


def _spread(site: Site, values: NDArray[Any], shape: Sequence[int], axis: int, block: int) -> NDArray[Any]:
    if values.size == 1:
        return values.reshape(())
    axis = site.axis(axis, len(shape))
    if values.ndim == 1 and len(shape) >= 1 and not block:
        return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    site.expect(block > 0 and values.ndim == len(shape), "scales of blocks")
    return np.repeat(values, block, axis)[tuple(slice(0, n) for n in shape)]


def _less_zero(site: Site, at: int, zero_at: int, axis: int) -> Tensor:
    """Return an input of integers less its zero point, as f32."""
    x = site.x(at)
    values = site.cast(x, DType.F32)
    zero = site.optional(zero_at)
    if zero is None:
        return values
    if zero.rank == 1 and zero.shape[0] != 1:
        zero = site.reshape(zero, [zero.shape[0] if i == axis % x.rank else 1 for i in range(x.rank)])
    elif zero.rank <= 1:
        zero = site.reshape(zero, ())
    return site.binary("sub", values, site.cast(zero, DType.F32))


@reads("MatMulInteger")
def _matmul_integer(site: Site) -> Tensor:
    return exact_product(site, _less_zero(site, 0, 2, -2), _less_zero(site, 1, 3, -1))


@reads("QLinearMatMul")
def _qlinear_matmul(site: Site) -> Tensor:
    total = exact_product(site, _less_zero(site, 0, 2, -2), _less_zero(site, 3, 5, -1))
    factor = site.binary("div", site.binary("mul", site.x(1), site.x(4)), site.x(6))
    scaled = site.binary("mul", site.cast(total, DType.F32), factor)
    return _rounded(site, scaled, site.x(7), site.x(7).dtype)


def _conv_integer(site: Site, x: Tensor, weight: Tensor) -> Tensor:
    """Return the exact sums of a convolution, whose terms are few enough or split over channels."""
    site.require(x.rank == 4, "images of two dimensions only")
    site.require(site.is_plain(weight), "its weight must be constant")
    site.require(site.str_attr("auto_pad", "NOTSET") in ("NOTSET", "VALID"), "auto_pad is not supported")
    kernel = tuple(site.fixed(size, "the kernel") for size in weight.shape[2:])
    inner, groups = site.fixed(weight.shape[1], "channels"), site.int_attr("group", 1)
    taps = kernel[0] * kernel[1]
    site.require(taps <= 256 and (groups == 1 or taps * inner <= 256), "a kernel of so many terms is not supported")
    pads = site.ints("pads") or (0, 0, 0, 0)
    step = max(256 // taps, 1)
    total = None
    for begin in range(0, inner, step):
        end = min(begin + step, inner)
        part = site.permute(x if groups > 1 else site.cut(x, 1, begin, end), (0, 2, 3, 1))
        filters = site.permute(site.cut(weight, 1, begin, end), (0, 2, 3, 1))
        y = site.add("conv", part, filters, None, None, groups=groups, kernel=kernel, pads=pads,
                     strides=site.ints("strides") or (1, 1), dilations=site.ints("dilations") or (1, 1))  # fmt: skip
        y = site.cast(y, DType.I32)
        total = y if total is None else site.binary("add", total, y)
    site.expect(total is not None, "channels")
    return from_rows(site, total, 4)  # type: ignore[arg-type]


@reads("ConvInteger")
def _read_conv_integer(site: Site) -> Tensor:
    return _conv_integer(site, _less_zero(site, 0, 2, 1), _less_zero(site, 1, 3, 0))


@reads("QLinearConv")
def _qlinear_conv(site: Site) -> Tensor:
    total = _conv_integer(site, _less_zero(site, 0, 2, 1), _less_zero(site, 3, 5, 0))
    if site.has(8):
        total = site.binary("add", total, site.reshape(site.x(8), (site.x(8).shape[0], 1, 1)))
    by_channel = site.x(4)
    if by_channel.rank == 1 and by_channel.shape[0] != 1:
        by_channel = site.reshape(by_channel, (by_channel.shape[0], 1, 1))
    factor = site.binary("div", site.binary("mul", site.x(1), by_channel), site.x(6))
    return _rounded(site, site.binary("mul", site.cast(total, DType.F32), factor), site.x(7), site.x(7).dtype)
