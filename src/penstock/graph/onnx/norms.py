"""Normalisations and softmax."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.graph.general.draft import Tensor
from penstock.graph.general.sizes import product
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__: list[str] = []

_MAX_NORMALISED: Final = 1 << 24  # elements of a weight of ones that a norm gets


def _along_channels(site: Site, values: Tensor, rank: int) -> Tensor:
    """Return [C] as [C, 1, 1], which broadcasts to [N, C, H, W]."""
    return site.reshape(values, (values.shape[0], *[1] * (rank - 2)))


def _ones(site: Site, size: int) -> Tensor:
    """Return the weight of a norm whose own weight is no constant of its shape."""
    site.require(size <= _MAX_NORMALISED, f"a norm over {size} elements whose weight is computed is not supported")
    return site.constant(np.ones(size, np.float32))


@reads("BatchNormalization")
def _batch_norm(site: Site) -> Tensor:
    x = site.x(0)
    site.require(not site.flag("training_mode") and site.flag("spatial", True), "training_mode is not supported")
    site.require(
        not any(site.wanted(at) for at in range(1, len(site.node.outputs))), "outputs of training are not computed"
    )
    site.expect(x.rank >= 2, "2 dimensions or more")
    parts = [site.x(at) for at in range(1, 5)]
    eps = site.float_attr("epsilon", 1e-5)
    if site.is_plain(*parts):
        scale, bias, mean, variance = (site.numbers(at) for at in range(1, 5))
        factor = scale / np.sqrt(variance + eps)
        shift = bias - mean * factor
        by, plus = site.constant(factor.astype(np.float32)), site.constant(shift.astype(np.float32))
    else:
        root = site.unary("sqrt", site.binary("add", parts[3], eps))
        by = site.binary("div", parts[0], root)
        plus = site.binary("sub", parts[1], site.binary("mul", parts[2], by))
    return site.binary(
        "add", site.binary("mul", x, _along_channels(site, by, x.rank)), _along_channels(site, plus, x.rank)
    )


def _over_last(site: Site, op: str, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    """Normalise over the axes from ``axis`` on: as rows."""
    x = site.x(0)
    axis = site.axis(site.int_attr("axis", -1), x.rank)
    inner = product(x.shape[axis:])
    rows = site.reshape(x, (product(x.shape[:axis]), inner))
    eps = site.float_attr("epsilon", 1e-5)
    fits = weight.shape == x.shape[axis:] and (bias is None or bias.shape == x.shape[axis:])
    if fits and site.is_plain(weight, bias):
        weight = site.reshape(weight, (inner,))
        terms = (site.reshape(bias, (inner,)),) if bias is not None else (None,) if op == "layer_norm" else ()
        return site.reshape(site.add(op, rows, weight, *terms, eps=eps), x.shape)
    ones = _ones(site, site.fixed(inner, "the normalised size"))
    plain = (None,) if op == "layer_norm" else ()
    y = site.binary("mul", site.reshape(site.add(op, rows, ones, *plain, eps=eps), x.shape), weight)
    return y if bias is None else site.binary("add", y, bias)


@reads("LayerNormalization")
def _layer_norm(site: Site) -> tuple[Tensor | None, ...]:
    x = site.x(0)
    y = _over_last(site, "layer_norm", site.x(1), site.optional(2))
    if not (site.wanted(1) or site.wanted(2)):
        return (y,)
    axes = tuple(range(site.axis(site.int_attr("axis", -1), x.rank), x.rank))
    mean = site.add("reduce", x, kind="mean", axes=axes, keep=True)
    squares = site.unary("square", site.binary("sub", x, mean))
    variance = site.add("reduce", squares, kind="mean", axes=axes, keep=True)
    root = site.unary("sqrt", site.binary("add", variance, site.float_attr("epsilon", 1e-5)))
    return y, mean, site.unary("reciprocal", root)


@reads("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(site: Site) -> Tensor:
    return _over_last(site, "rms_norm", site.x(1), None)


def _by_groups(site: Site, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    x = site.x(0)
    site.expect(x.rank > 2 and groups > 0, "an image and a group or more")
    channels = site.fixed(x.shape[1], "the number of channels")
    eps = site.float_attr("epsilon", 1e-5)
    constant = site.is_plain(weight, bias)
    terms = (weight, bias) if constant else (_ones(site, channels), site.constant(np.zeros(channels, np.float32)))
    if x.rank == 4:
        last = site.permute(x, (0, 2, 3, 1))
        y = site.permute(site.add("group_norm", last, *terms, groups=groups, eps=eps), (0, 3, 1, 2))
    else:
        last = site.permute(site.reshape(x, (x.shape[0], channels, product(x.shape[2:]))), (0, 2, 1))
        made = site.permute(site.add("group_norm", last, *terms, groups=groups, eps=eps), (0, 2, 1))
        y = site.reshape(made, x.shape)
    if constant:
        return y
    scaled = site.binary("mul", y, _along_channels(site, weight, x.rank))
    return site.binary("add", scaled, _along_channels(site, bias, x.rank))


@reads("InstanceNormalization")
def _instance_norm(site: Site) -> Tensor:
    return _by_groups(site, site.fixed(site.x(0).shape[1], "the number of channels"), site.x(1), site.x(2))


@reads("GroupNormalization")
def _group_norm(site: Site) -> Tensor:
    groups = site.int_attr("num_groups", 1)
    weight, bias = site.x(1), site.x(2)
    channels = site.fixed(site.x(0).shape[1], "the number of channels")
    if site.version < 21:  # a number for each group
        site.expect(groups > 0 and channels % groups == 0, "groups that divide the channels")
        weight, bias = (
            site.reshape(
                site.add("expand", site.reshape(values, (groups, 1)), sizes=(groups, channels // groups)), (channels,)
            )
            for values in (weight, bias)
        )
    return _by_groups(site, groups, weight, bias)


@reads("LpNormalization")
def _lp_norm(site: Site) -> Tensor:
    x, axis, p = site.x(), site.int_attr("axis", -1), site.int_attr("p", 2)
    site.expect(p in (1, 2), "p of 1 or 2")
    kind = "abs" if p == 1 else "square"
    total = site.add("reduce", site.unary(kind, x), kind="sum", axes=(site.axis(axis, x.rank),), keep=True)
    norm = total if p == 1 else site.unary("sqrt", total)
    zero = site.binary("eq", norm, 0.0)  # ONNX says that zeros stay zeros
    return site.binary("div", x, site.add("where", zero, site.like(x, 1.0), norm))


@reads("Softmax", "LogSoftmax")
def _softmax(site: Site) -> Tensor:
    x = site.cast(site.x(), DType.F32)
    if site.version >= 13:
        return _softmax_along(site, x, site.axis(site.int_attr("axis", -1), x.rank))
    axis = site.int_attr("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    site.expect(0 <= axis <= x.rank, f"an axis of 0 to {x.rank}")
    if axis == x.rank - 1:
        return _softmax_along(site, x, axis)
    rows = site.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))
    return site.reshape(_softmax_along(site, rows, 1), x.shape)


def _softmax_along(site: Site, x: Tensor, axis: int) -> Tensor:
    made: Tensor = site.add("softmax", x, axis=axis, log=site.node.op == "LogSoftmax")
    return made


@reads("Hardmax")
def _hardmax(site: Site) -> Tensor:
    x = site.x()
    shape = x.shape
    axis = site.int_attr("axis", -1 if site.version >= 13 else 1)
    axis = axis + x.rank if axis < 0 else axis
    if site.version < 13:
        x = site.reshape(x, (product(shape[:axis]), product(shape[axis:])))
        axis = 1
    axis = site.axis(axis, x.rank)
    best = site.add("arg_reduce", x, kind="max", axis=axis, keep=True)
    places = site.add("iota", range=(0, 1, x.shape[axis]))
    along = site.reshape(places, (x.shape[axis], *[1] * (x.rank - 1 - axis)))
    return site.reshape(site.cast(site.binary("eq", best, along), x.dtype), shape)
